"""Where a rank stands: among which workers, and with which shard of the model; so under which keys its state is."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from cadenza.engine.model_view import ModelView
from cadenza.participants.level_group import LevelGroup

__all__ = ["Place"]


@dataclass(frozen=True)
class Place:
    """Where a rank stands: among which workers (global ranks), and with which shard of the model.

    Where a worker is a replica of several ranks, these are counted as if all of them were in one group, and each has a
    part of the state for itself, also if all hold the whole model.

    >>> Place((4, 5), 1, 0, 1).worker_root
    'worker/5'
    """

    workers: tuple[int, ...]
    position: int
    shard: int
    shards: int

    @classmethod
    def of(cls, view: ModelView, outermost: LevelGroup) -> Place:
        """Return where this rank stands."""
        view.settle()
        island = outermost.island
        if island.size > 1:
            return cls(outermost.ranks, outermost.position, island.rank, island.size)
        for parameter in view.parameters().values():
            mesh = getattr(parameter, "device_mesh", None)
            if mesh is not None:
                ranks = mesh.mesh.flatten().tolist()
                return cls(outermost.members, outermost.position, ranks.index(dist.get_rank()), len(ranks))
        return cls(outermost.members, outermost.position, 0, 1)

    @property
    def worker(self) -> int:
        return self.workers[self.position]

    @property
    def shared_root(self) -> str:
        return "shared" if self.shards == 1 else f"shared/shard/{self.shard}"

    @property
    def worker_root(self) -> str:
        return f"worker/{self.worker}"

    def positions(self, group: LevelGroup) -> list[int]:
        """Return which workers meet in a group, as positions: ranks may be others after a restart."""
        return [self.workers.index(rank) for rank in group.ranks if rank in self.workers]

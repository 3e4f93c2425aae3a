"""One level: a partition of the ranks into groups."""

from __future__ import annotations

from dataclasses import dataclass

from cadenza.common.later import dist
from cadenza.common.process_groups import resolve
from cadenza.errors import TopologyError

__all__ = ["Level"]


@dataclass(frozen=True)
class Level:
    """A partition of the ranks into groups that come together.

    >>> Level(((0, 2), (1, 3))).group_of(3)
    (1, 3)
    """

    groups: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        ranks = [rank for group in self.groups for rank in group]
        if not ranks or not all(self.groups):
            raise TopologyError(f"A level needs at least one group, and every group a rank; got {self.groups}.")
        if twice := sorted({rank for rank in ranks if ranks.count(rank) > 1}):
            raise TopologyError(
                f"A rank stands in one group of a level; ranks {twice} stand in several: {self.groups}."
            )

    @property
    def ranks(self) -> frozenset[int]:
        """All ranks of the level."""
        return frozenset(rank for group in self.groups for rank in group)

    def group_of(self, rank: int) -> tuple[int, ...]:
        """Return the group in which a rank stands."""
        for group in self.groups:
            if rank in group:
                return group
        raise TopologyError(f"Rank {rank} is not in this level; its groups are {self.groups}.")

    def process_group(self, within: dist.ProcessGroup | None = None) -> dist.ProcessGroup:
        """Return the process group of this rank's group; all of its ranks must call this.

        A group of all the ranks of `within` (the world, if None) is `within` itself; any other is made.
        """
        whole = resolve(within)
        mine = self.group_of(dist.get_rank())
        if set(mine) == set(dist.get_process_group_ranks(whole)):
            return whole
        made = dist.new_group(list(mine), use_local_synchronization=True)
        assert isinstance(made, dist.ProcessGroup)
        return made

"""WITH WHOM: levels of groups, from the innermost (a host) to the outermost (everyone).

A `Topology` is plain data about ranks; building one never communicates, except for `Topology.from_hosts` when it has
to ask every rank where it runs.

>>> topology = Topology.from_sizes([2, 4], ranks=range(4))
>>> [level.groups for level in topology.levels]
[((0, 1), (2, 3)), ((0, 1, 2, 3),)]
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.distributed as dist

from cadenza.common.process_groups import resolve, store_of
from cadenza.errors import TopologyError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Level", "Topology", "check_nesting", "host_name", "hosts_of"]


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


@dataclass(frozen=True)
class Topology:
    """Levels from the innermost to the outermost; each group is made of whole groups of the level below."""

    levels: tuple[Level, ...]

    def __post_init__(self) -> None:
        if not self.levels:
            raise TopologyError("A topology needs at least one level.")
        for inner, outer in zip(self.levels, self.levels[1:], strict=False):
            if inner.ranks != outer.ranks:
                missing = sorted(inner.ranks ^ outer.ranks)
                raise TopologyError(f"Every level holds the same ranks; ranks {missing} are missing from one of them.")
            for group in inner.groups:
                if not set(group) <= set(outer.group_of(group[0])):
                    raise TopologyError(
                        f"Levels must nest: the group {group} lies in several groups of the next level, {outer.groups}."
                    )

    @classmethod
    def from_sizes(cls, sizes: Sequence[int], *, ranks: Iterable[int]) -> Topology:
        """Cut the ranks, in their order, into runs of each size, the smallest first.

        >>> Topology.from_sizes([3], ranks=[0, 1, 2]).levels[0].groups
        ((0, 1, 2),)
        """
        members = tuple(ranks)
        check_nesting(sizes, within=len(members))
        return cls(
            tuple(
                Level(tuple(members[start : start + size] for start in range(0, len(members), size))) for size in sizes
            )
        )

    @classmethod
    def from_mesh(cls, mesh: DeviceMesh, dims: Sequence[str | int] | None = None) -> Topology:
        """Make one level of each mesh dimension, the last dimension innermost; an outer level spans the ones inside it.

        `dims` picks the dimensions, from the innermost to the outermost; the ranks along the others are different
        shards and do not come together, so the levels only hold the ranks that share this rank's place along them.
        """
        names = tuple(mesh.mesh_dim_names or ())
        chosen = list(reversed(range(mesh.ndim))) if dims is None else [_dim(mesh, names, dim) for dim in dims]
        if len(set(chosen)) != len(chosen):
            raise TopologyError(f"Each mesh dimension stands once in dims; got {list(dims or ())}.")
        coordinate = mesh.get_coordinate()
        if coordinate is None:
            raise TopologyError("This rank is not part of the mesh.")
        ranks = mesh.mesh
        for dim in range(mesh.ndim):
            if dim not in chosen:
                ranks = ranks.narrow(dim, coordinate[dim], 1)
        others = [dim for dim in range(mesh.ndim) if dim not in chosen]
        levels = []
        for depth in range(1, len(chosen) + 1):
            inside = chosen[:depth]
            outside = [*others, *reversed(chosen[depth:])]
            size = 1
            for dim in inside:
                size *= ranks.shape[dim]
            rows = ranks.permute(*outside, *reversed(inside)).reshape(-1, size)
            levels.append(Level(tuple(tuple(row) for row in rows.tolist())))
        return cls(tuple(levels))

    @classmethod
    def from_hosts(cls, hosts: Mapping[int, str] | None = None, *, within: dist.ProcessGroup | None = None) -> Topology:
        """Make a level of the ranks of each host and, where there are several hosts, one of everyone.

        Without `hosts`, every rank of `within` (the world, if None) is asked; all of them must call this.

        >>> topology = Topology.from_hosts({0: "north", 1: "south", 2: "north"})
        >>> [level.groups for level in topology.levels]
        [((0, 2), (1,)), ((0, 1, 2),)]
        """
        known = hosts_of(within) if hosts is None else dict(hosts)
        rooms: dict[str, list[int]] = {}
        for rank in sorted(known):
            rooms.setdefault(known[rank], []).append(rank)
        inner = Level(tuple(tuple(room) for room in rooms.values()))
        if len(rooms) == 1:
            return cls((inner,))
        return cls((inner, Level((tuple(sorted(known)),))))


def check_nesting(sizes: Sequence[int], *, within: int) -> None:
    """Refuse group sizes that do not grow by whole factors up to the number of ranks.

    >>> check_nesting([2, 6], within=12)
    >>> check_nesting([4, 6], within=12)
    Traceback (most recent call last):
      ...
    cadenza.errors.TopologyError: Group sizes must nest: 6 is not a multiple of 4. \
Choose sizes of which each divides the next.
    """
    if not sizes:
        raise TopologyError("A topology needs at least one group size.")
    for size in sizes:
        if isinstance(size, bool) or not hasattr(size, "__index__"):
            raise TypeError(f"A group size is a whole number of ranks; got {size!r}.")
        if size < 1:
            raise TopologyError(f"A group has at least one rank; got the size {size}.")
    for inner, outer in zip(sizes, [*sizes[1:], within], strict=True):
        if outer % inner:
            what = f"{outer} is" if outer != within else f"the number of ranks, {outer}, is"
            raise TopologyError(
                f"Group sizes must nest: {what} not a multiple of {inner}. Choose sizes of which each divides the next."
            )


def host_name() -> str:
    """Return what tells this rank's host from others: the launcher's node number if there is one, or the host name.

    Node numbers come from torchrun (``GROUP_RANK``) or SLURM (``SLURM_NODEID``). They keep two launchers on one machine
    apart, as when a cluster is emulated.
    """
    for launcher in ("GROUP_RANK", "SLURM_NODEID"):
        if node := os.environ.get(launcher):
            return f"{launcher} {node}"
    return socket.gethostname()


def hosts_of(group: dist.ProcessGroup | None = None) -> dict[int, str]:
    """Ask every rank of a group for its host; all of them must call this. Return {global rank: host}."""
    whole = resolve(group)
    store = store_of(whole)
    store.set(f"cadenza/host/{dist.get_rank()}", host_name())
    ranks = dist.get_process_group_ranks(whole)
    return {rank: bytes(store.get(f"cadenza/host/{rank}")).decode() for rank in ranks}


def _dim(mesh: DeviceMesh, names: tuple[str, ...], dim: str | int) -> int:
    if isinstance(dim, str) and dim in names:
        return names.index(dim)
    if isinstance(dim, int) and 0 <= dim < mesh.ndim:
        return dim
    raise TopologyError(f"The mesh has no dimension {dim!r}; it has {names or mesh.ndim}.")

"""Levels that nest, cut by sizes, by a mesh or by hosts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cadenza.common.later import dist
from cadenza.errors import TopologyError
from cadenza.topology.hosts import hosts_of
from cadenza.topology.level import Level

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Topology", "check_nesting"]


@dataclass(frozen=True)
class Topology:
    """Levels from the innermost to the outermost; each group is made of whole groups of the level below.

    >>> Topology((Level(((0,), (1,))), Level(((0, 1),)))).levels[1].group_of(0)
    (0, 1)
    """

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


def _dim(mesh: DeviceMesh, names: tuple[str, ...], dim: str | int) -> int:
    if isinstance(dim, str) and dim in names:
        return names.index(dim)
    if isinstance(dim, int) and 0 <= dim < mesh.ndim:
        return dim
    raise TopologyError(f"The mesh has no dimension {dim!r}; it has {names or mesh.ndim}.")

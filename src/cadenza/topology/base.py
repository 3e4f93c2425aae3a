"""Groups that change from round to round, as in gossip."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

__all__ = ["RoundTopology"]


@runtime_checkable
class RoundTopology(Protocol):
    """What cuts the ranks anew for every round of a level.

    >>> class Neighbours:
    ...     def groups(self, round: int, ranks: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    ...         turn = round % 2
    ...         ring = [*ranks[turn:], *ranks[:turn]]
    ...         return tuple(tuple(sorted(ring[i : i + 2])) for i in range(0, len(ring), 2))
    >>> pairs: RoundTopology = Neighbours()
    >>> pairs.groups(0, range(4)), pairs.groups(1, range(4))
    (((0, 1), (2, 3)), ((1, 2), (0, 3)))
    """

    def groups(self, round: int, ranks: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Return a partition of the ranks, the same on all of them; `round` counts a fragment's rounds from 0."""
        ...

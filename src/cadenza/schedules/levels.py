"""Schedules of several levels together: which is due, how near their rounds come, and how fragments take turns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations

from cadenza.schedules.base import Schedule, first_turn
from cadenza.schedules.every import Every

__all__ = ["largest_due", "smallest_gap", "staggered_levels"]


def largest_due(flags: Sequence[bool]) -> int | None:
    """Return the outermost level that is due, or None: levels go from the innermost to the outermost.

    >>> largest_due([True, True, False]), largest_due([False, False, False])
    (1, None)
    """
    return max((level for level, due in enumerate(flags) if due), default=None)


def smallest_gap(schedules: Sequence[Schedule]) -> int:
    """Return a lower bound of the steps between two rounds of one fragment, over all its levels.

    Levels that nest come together, so theirs is the innermost period; others meet at odd distances.

    >>> from cadenza.schedules import every
    >>> smallest_gap([every(4), every(16)]), smallest_gap([every(4), every(6)])
    (4, 2)
    """
    if not schedules:
        raise ValueError("smallest_gap() needs the schedule of at least one level; got none.")
    pairs = (_gap_between(one, other) for one, other in combinations(schedules, 2))
    return min([schedule.shortest_gap for schedule in schedules] + list(pairs))


def staggered_levels(schedules: Sequence[Schedule], index: int, count: int) -> tuple[Schedule, ...]:
    """Return the schedules of fragment `index` of `count` at every level, from the innermost to the outermost.

    Where every period is a multiple of the one inside it, an outer round falls on a step at which the inner level is
    due too, and takes its place. (Staggered one by one, levels would meet at steps of their own.)

    >>> from cadenza.schedules import every
    >>> staggered_levels([every(4), every(16)], 0, 2)
    (Every(period=4, offset=2), Every(period=16, offset=6))
    """
    turns: list[Schedule] = []
    for schedule in schedules:
        inner = turns[-1] if turns else None
        turn = schedule.staggered(index, count)
        if isinstance(turn, Every) and isinstance(inner, Every) and turn.period % inner.period == 0:
            # The latest step up to its turn at which the inner level is due: the longer period's first turn is no less.
            late = (first_turn(index, count, turn.period) - inner.offset) % inner.period
            turn = Every(turn.period, (turn.offset - late) % turn.period)
        turns.append(turn)
    return tuple(turns)


def _gap_between(one: Schedule, other: Schedule) -> int:
    """Return a lower bound of the steps from a round of one level to a later or earlier one of another."""
    if not isinstance(one, Every) or not isinstance(other, Every):
        return 1
    common = math.gcd(one.period, other.period)
    apart = (one.offset - other.offset) % common
    return min(apart, common - apart) if apart else common

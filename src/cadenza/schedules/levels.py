"""Schedules of several levels together: which is due, how near their rounds come, and how fragments take turns."""

from __future__ import annotations

import math
from collections.abc import Sequence

from cadenza.schedules.base import Schedule
from cadenza.schedules.every import Every

__all__ = ["gap_after", "largest_due", "smallest_gap", "staggered_levels"]


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
    return min(gap_after(schedules, level) for level in range(len(schedules)))


def gap_after(schedules: Sequence[Schedule], level: int) -> int:
    """Return a lower bound of the steps from a round of one level to the next one of any level of the fragment.

    >>> from cadenza.schedules import Every
    >>> levels = [Every(8), Every(8, offset=2)]
    >>> gap_after(levels, 0), gap_after(levels, 1)
    (2, 6)
    """
    own = schedules[level]
    others = [other for position, other in enumerate(schedules) if position != level]
    return min([own.shortest_gap, *(_gap_between(own, other) for other in others)])


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
        turn = schedule.staggered(index, count)
        turns.append(_on_inner_rounds(turn, turns[-1]) if turns else turn)
    return tuple(turns)


def _on_inner_rounds(turn: Schedule, inner: Schedule) -> Schedule:
    """Move an outer level's rounds to the latest steps before them at which the inner level is due."""
    if turn.cycle is None or inner.cycle is None:
        return turn
    (period, offset), (inner_period, inner_offset) = turn.cycle, inner.cycle
    late = (offset - inner_offset) % inner_period
    if period % inner_period or not late:
        return turn
    # A schedule with a cycle is due exactly when its cycle says, so that `Every` can stand for any of them.
    return Every(period, (offset - late) % period)


def _gap_between(one: Schedule, other: Schedule) -> int:
    """Return a lower bound of the steps from a round of one level to a later one of another."""
    if one.cycle is None or other.cycle is None:
        return 1
    common = math.gcd(one.cycle[0], other.cycle[0])
    return (other.cycle[1] - one.cycle[1]) % common or common

"""Periods of their own for the entries of the inner optimizer's state, as in DES-LOC (arXiv 2505.22549)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, SupportsIndex

from cadenza.common.protocols import check_piece
from cadenza.schedules.base import Schedule
from cadenza.schedules.every import every

__all__ = ["OwnPeriods", "StateSchedule", "moments"]


class StateSchedule(Protocol):
    """What says when entries of the optimizer's state are averaged.

    >>> def averaged(schedule: StateSchedule, steps: int) -> dict[int, tuple[str, ...]]:
    ...     return {n: schedule.due(n) for n in range(1, steps + 1) if schedule.due(n)}
    >>> averaged(moments(exp_avg=2, exp_avg_sq=4), 4)
    {2: ('exp_avg',), 4: ('exp_avg', 'exp_avg_sq')}
    """

    def due(self, n: int) -> tuple[str, ...]:
        """Return the keys of the optimizer's state that are averaged after local step `n`; the same on all ranks."""


@dataclass(frozen=True)
class OwnPeriods:
    """A schedule for each key of the optimizer's state; made by `moments`.

    >>> OwnPeriods((("exp_avg", every(8)),)).due(16)
    ('exp_avg',)
    """

    periods: tuple[tuple[str, Schedule], ...]

    def __post_init__(self) -> None:
        if not self.periods:
            raise ValueError("Give at least one key of the optimizer's state a period: moments(exp_avg=64).")
        for key, schedule in self.periods:
            check_piece(schedule, Schedule, what=key, such_as="every(64)")
            if schedule.cycle is None:
                raise ValueError(
                    f"{key} needs a period that stays the same, at least here: {schedule!r} depends on more than the "
                    "step, and nothing of that is kept for optimizer state. Use one such as every(64)."
                )

    def due(self, n: int) -> tuple[str, ...]:
        return tuple(key for key, schedule in self.periods if _falls_on(n, schedule))


def _falls_on(n: int, schedule: Schedule) -> bool:
    period, offset = schedule.cycle or (1, 0)
    return n >= 1 and n % period == offset


def moments(**periods: int | Schedule) -> OwnPeriods:
    """Return periods for entries of the inner optimizer's state: a number of steps, or a schedule, by key.

    >>> moments(exp_avg_sq=every(64), exp_avg=16).due(16)
    ('exp_avg',)
    """
    return OwnPeriods(tuple((key, _schedule(given)) for key, given in sorted(periods.items())))


def _schedule(given: int | Schedule) -> Schedule:
    return every(given) if isinstance(given, SupportsIndex) else given

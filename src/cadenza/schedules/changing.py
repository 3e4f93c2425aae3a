"""Rounds whose distance changes over time: by a function of the step, or at milestones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from cadenza.common.checks import as_steps, as_whole_steps
from cadenza.common.milestones import Milestones
from cadenza.schedules.base import NextRound, State, first_turn, refuse_staggering_twice

__all__ = ["Changing", "changing"]

# Two functions are taken for the same if they have one name and give one period at each of these steps.
_PROBED_STEPS = tuple(10**power for power in range(7))


@dataclass(frozen=True)
class Changing(NextRound):
    """Rounds whose distance changes over time; made by `changing`.

    >>> changing({1: 16, 1000: 64}).shortest_gap
    16
    """

    period: Callable[[int], int] = field(metadata={"probe": _PROBED_STEPS})
    minimum: int = 1
    first: int | None = None

    def start(self) -> State:
        return {"next": self._period_at(1) if self.first is None else self.first}

    def after_round(self, n: int, state: State, drift: float | None) -> State:
        return {"next": n + self._period_at(max(n, 1))}

    @property
    def uses_drift(self) -> bool:
        return False

    def staggered(self, index: int, count: int) -> Changing:
        refuse_staggering_twice(self.first is not None)
        return replace(self, first=first_turn(index, count, self._period_at(1)))

    def _period_at(self, n: int) -> int:
        """Return the period in force at step `n`, checked: a function may give anything."""
        period = as_steps(f"The period at step {n}", self.period(n))
        if period < self.minimum:
            raise ValueError(
                f"The period at step {n} is {period}, but at least {self.minimum} was promised; "
                f"let the function give no less, or lower minimum= in changing()."
            )
        return period


def changing(period: Callable[[int], int] | Mapping[int, int], *, minimum: int | None = None) -> Changing:
    """Return a schedule whose period changes: a function of the step, or milestones {first step: period}.

    After a round at step n the next one comes period(n) steps later, so a new period is in force from the first round
    at or after its milestone. A function is asked for steps from 1 on, must give the same on all ranks, and is taken
    to give any period from 1 up; to use it with a delay, promise a larger `minimum`.

    >>> schedule = changing({1: 2, 5: 4})
    >>> state = schedule.start()
    >>> for n in range(1, 15):
    ...     if schedule.is_due(n, state):
    ...         print(n, end=" ")
    ...         state = schedule.after_round(n, state, None)
    2 4 6 10 14
    >>> changing(lambda n: 8 + n // 1000, minimum=8).start()
    {'next': 8}
    """
    if isinstance(period, Mapping):
        if minimum is not None:
            raise TypeError("minimum= is for functions; milestones say themselves what their shortest period is.")
        milestones = _milestones(period)
        return Changing(milestones, minimum=min(gap for _, gap in milestones.points))
    if not callable(period):
        raise TypeError(
            f"changing() takes a function of the step or milestones {{first step: period}}; got {period!r}. "
            "For a period that stays the same use every()."
        )
    schedule = Changing(period, minimum=1 if minimum is None else as_steps("minimum", minimum))
    schedule.start()  # a function that cannot give the first period is refused here, not in the training loop
    return schedule


def _milestones(periods: Mapping[int, int]) -> Milestones[int]:
    if not periods:
        raise ValueError("Milestones {first step: period} need at least one entry, such as {1: 16}; got none.")
    pairs = sorted(
        (as_whole_steps("A milestone", n), as_steps(f"The period from step {n}", gap)) for n, gap in periods.items()
    )
    first = pairs[0][0]
    if first < 0:
        raise ValueError(f"Milestones are steps since the warm-up and count from 1; got {first}.")
    if first > 1:
        raise ValueError(f"No period is in force before step {first}, the first milestone; add one for step 1.")
    return Milestones(tuple(pairs), before=pairs[0][1])  # steps before the first milestone have its period

"""WHEN a round runs: pure functions of the local step and a small state that can be written as JSON.

The step `n` counts local steps since the end of the warm-up, from 1. A schedule keeps nothing to itself: its `State`
travels with the run, so a run that is stopped and resumed meets at the same steps. A schedule may depend only on `n`
and on the drift, which is the same number on all ranks; so all ranks decide alike without asking each other.

>>> schedule = every(4)
>>> state = schedule.start()
>>> [n for n in range(1, 13) if schedule.is_due(n, state)]
[4, 8, 12]

There is no torch in here, so that a planner can use schedules without it.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from numbers import Real
from operator import index as as_int
from typing import Protocol, SupportsIndex, TypeAlias

__all__ = [
    "Adaptive",
    "Changing",
    "Every",
    "Schedule",
    "State",
    "adaptive",
    "changing",
    "every",
    "largest_due",
    "smallest_gap",
    "staggered_levels",
]

State: TypeAlias = dict[str, int | float]

# Two functions are taken for the same if they have one name and give one period at each of these steps.
_PROBED_STEPS = [10**power for power in range(7)]


class Schedule(Protocol):
    """What a schedule gives: whether a round is due, and the state after one.

    Call `after_round` for every round that was due, also for one that was skipped or that a larger level took over.

    >>> def due_steps(schedule: Schedule, steps: int) -> list[int]:
    ...     state, due = schedule.start(), []
    ...     for n in range(1, steps + 1):
    ...         if schedule.is_due(n, state):
    ...             due.append(n)
    ...             state = schedule.after_round(n, state, drift=None)
    ...     return due
    >>> due_steps(every(5).staggered(0, 2), 15)
    [2, 7, 12]
    """

    def start(self) -> State:
        """Return the state before the first step; its "next" is the step of the next round."""

    def is_due(self, n: int, state: State) -> bool:
        """Say whether a round runs after local step `n`."""

    def after_round(self, n: int, state: State, drift: float | None) -> State:
        """Return the state after a round at step `n`; `drift` is None where it was not measured."""

    @property
    def shortest_gap(self) -> int:
        """Return a lower bound of the steps between two rounds; a delay must be shorter."""

    @property
    def uses_drift(self) -> bool:
        """Say whether `after_round` wants to know the drift."""

    def staggered(self, index: int, count: int) -> Schedule:
        """Return the schedule of fragment `index` of `count`, so that the fragments take turns."""

    def describe(self) -> str:
        """Return a line that is equal on two ranks if their schedules are."""


@dataclass(frozen=True)
class Every:
    """A round whenever `n % period == offset`; made by `every`.

    >>> every(500)
    Every(period=500, offset=0)
    """

    period: int
    offset: int = 0

    def start(self) -> State:
        return self.after_round(0, {}, None)

    def is_due(self, n: int, state: State) -> bool:
        return n >= 1 and n % self.period == self.offset

    def after_round(self, n: int, state: State, drift: float | None) -> State:
        return {"next": n + 1 + (self.offset - n - 1) % self.period}

    @property
    def shortest_gap(self) -> int:
        return self.period

    @property
    def uses_drift(self) -> bool:
        return False

    def staggered(self, index: int, count: int) -> Every:
        _refuse_staggering_twice(self.offset != 0)
        return Every(self.period, _turn(index, count, self.period) % self.period)

    def describe(self) -> str:
        return f"every({self.period})" + (f" at {self.offset}" if self.offset else "")


def every(period: int) -> Every:
    """Return a schedule with a round after every `period` local steps.

    Staggered, fragment p of P is due when `n % period == (p + 1) * period // P % period`, as in Streaming DiLoCo.

    >>> every(100).start()
    {'next': 100}
    >>> [every(100).staggered(p, 3).start()["next"] for p in range(3)]
    [33, 66, 100]
    """
    return Every(_steps("period", period))


@dataclass(frozen=True)
class _Milestones:
    """A period for each stretch of steps: a function of the step that can be compared by value.

    >>> _Milestones(((1, 16), (1000, 64)))(999)
    16
    """

    periods: tuple[tuple[int, int], ...]

    def __call__(self, n: int) -> int:
        # Steps before the first milestone have its period.
        position = bisect_right(self.periods, n, key=lambda pair: pair[0])
        return self.periods[max(position - 1, 0)][1]


@dataclass(frozen=True)
class Changing:
    """Rounds whose distance changes over time; made by `changing`.

    >>> changing({1: 16, 1000: 64}).shortest_gap
    16
    """

    period: Callable[[int], int]
    minimum: int = 1
    first: int | None = None

    def start(self) -> State:
        return {"next": self._period_at(1) if self.first is None else self.first}

    def is_due(self, n: int, state: State) -> bool:
        return n >= state["next"]

    def after_round(self, n: int, state: State, drift: float | None) -> State:
        return {"next": n + self._period_at(max(n, 1))}

    @property
    def shortest_gap(self) -> int:
        return self.minimum

    @property
    def uses_drift(self) -> bool:
        return False

    def staggered(self, index: int, count: int) -> Changing:
        _refuse_staggering_twice(self.first is not None)
        return replace(self, first=_turn(index, count, self._period_at(1)))

    def describe(self) -> str:
        if isinstance(self.period, _Milestones):
            text = f"changing({dict(self.period.periods)})"
        else:
            name = getattr(self.period, "__qualname__", type(self.period).__qualname__)
            periods = ", ".join(f"{n}: {self._probed(n)}" for n in _PROBED_STEPS)
            text = f"changing({name} with {{{periods}}}, minimum={self.minimum})"
        return text + (f" from {self.first}" if self.first is not None else "")

    def _period_at(self, n: int) -> int:
        """Return the period in force at step `n`, checked: a function may give anything."""
        period = _steps(f"The period at step {n}", self.period(n))
        if period < self.minimum:
            raise ValueError(
                f"The period at step {n} is {period}, but at least {self.minimum} was promised; "
                f"let the function give no less, or lower minimum= in changing()."
            )
        return period

    def _probed(self, n: int) -> str:
        # A function need not be defined for steps that the run never comes to.
        try:
            return str(self._period_at(n))
        except Exception:
            return "undefined"


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
        return Changing(milestones, minimum=min(gap for _, gap in milestones.periods))
    if not callable(period):
        raise TypeError(
            f"changing() takes a function of the step or milestones {{first step: period}}; got {period!r}. "
            "For a period that stays the same use every()."
        )
    schedule = Changing(period, minimum=1 if minimum is None else _steps("minimum", minimum))
    schedule.start()  # a function that cannot give the first period is refused here, not in the training loop
    return schedule


@dataclass(frozen=True)
class Adaptive:
    """Rounds whose distance follows the drift; made by `adaptive`.

    >>> adaptive(16, target_drift=0.01, minimum=4, maximum=64).uses_drift
    True
    """

    initial: int
    target_drift: float
    minimum: int
    maximum: int
    factor: float
    first: int | None = None

    def start(self) -> State:
        return {"next": self.initial if self.first is None else self.first, "period": float(self.initial)}

    def is_due(self, n: int, state: State) -> bool:
        return n >= state["next"]

    def after_round(self, n: int, state: State, drift: float | None) -> State:
        # Only products and quotients: those are the same to the last bit on every machine.
        period = min(max(state["period"] * self._change(drift), float(self.minimum)), float(self.maximum))
        return {"next": n + round(period), "period": period}

    @property
    def shortest_gap(self) -> int:
        return self.minimum

    @property
    def uses_drift(self) -> bool:
        return True

    def staggered(self, index: int, count: int) -> Adaptive:
        _refuse_staggering_twice(self.first is not None)
        return replace(self, first=_turn(index, count, self.initial))

    def describe(self) -> str:
        return (
            f"adaptive({self.initial}, target_drift={self.target_drift}, minimum={self.minimum}, "
            f"maximum={self.maximum}, factor={self.factor})" + (f" from {self.first}" if self.first is not None else "")
        )

    def _change(self, drift: float | None) -> float:
        """Return by what the period is multiplied: target / drift, within [1 / factor, factor]."""
        if drift is None or math.isnan(drift):
            return 1.0
        if drift * self.factor <= self.target_drift:
            return self.factor
        return max(self.target_drift / drift, 1 / self.factor)


def adaptive(initial: int, *, target_drift: float, minimum: int, maximum: int, factor: float = 2.0) -> Adaptive:
    """Return a schedule that keeps the drift near `target_drift` by changing its period.

    After each round the period is multiplied by target_drift / drift, at most by `factor` and at least by 1 / `factor`,
    and kept within `minimum` and `maximum`. A round without a measured drift leaves it as it is. The state holds the
    period as a fraction, so that many small changes add up; the next round comes after the nearest whole number.
    Staggered fragments start apart, then each follows its own drift.

    >>> schedule = adaptive(16, target_drift=0.01, minimum=4, maximum=64)
    >>> schedule.after_round(16, schedule.start(), drift=0.008)
    {'next': 36, 'period': 20.0}
    >>> schedule.after_round(16, schedule.start(), drift=1.0)
    {'next': 24, 'period': 8.0}
    """
    initial, minimum, maximum = _steps("initial", initial), _steps("minimum", minimum), _steps("maximum", maximum)
    if not minimum <= initial <= maximum:
        raise ValueError(
            f"adaptive() needs minimum <= initial <= maximum; got {minimum}, {initial} and {maximum}. "
            "Start from a period between the two."
        )
    if not 0 < _number("target_drift", target_drift) < math.inf:
        raise ValueError(
            f"target_drift must be a positive number, such as 0.01 for a spread of 1 %; got {target_drift!r}. "
            "The drift of the first rounds is in their reports."
        )
    if not 1 < _number("factor", factor) < math.inf:
        raise ValueError(
            f"factor, the most by which one round changes the period, must be above 1; got {factor!r}. "
            "For a period that stays the same use every()."
        )
    return Adaptive(initial, float(target_drift), minimum, maximum, float(factor))


def largest_due(flags: Sequence[bool]) -> int | None:
    """Return the outermost level that is due, or None: levels go from the innermost to the outermost.

    >>> largest_due([True, True, False]), largest_due([False, False, False])
    (1, None)
    """
    return max((level for level, due in enumerate(flags) if due), default=None)


def smallest_gap(schedules: Sequence[Schedule]) -> int:
    """Return a lower bound of the steps between two rounds of one fragment, over all its levels.

    Levels that nest come together, so theirs is the innermost period; others meet at odd distances.

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

    >>> [schedule.describe() for schedule in staggered_levels([every(4), every(16)], 0, 2)]
    ['every(4) at 2', 'every(16) at 6']
    """
    turns: list[Schedule] = []
    for schedule in schedules:
        inner = turns[-1] if turns else None
        turn = schedule.staggered(index, count)
        if isinstance(turn, Every) and isinstance(inner, Every) and turn.period % inner.period == 0:
            # The latest step up to its turn at which the inner level is due: _turn() of the longer period is no less.
            late = (_turn(index, count, turn.period) - inner.offset) % inner.period
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


def _turn(index: int, count: int, period: int) -> int:
    """Return the step, from 1 to `period`, at which fragment `index` of `count` has its first turn."""
    if not 0 <= index < count:
        raise ValueError(f"There is no fragment {index} of {count}; the index goes from 0 to {count - 1}.")
    if count > period:
        raise ValueError(
            f"{count} fragments cannot take turns within a period of {period} steps; "
            f"use at most {period} fragments or a period of at least {count}."
        )
    return (index + 1) * period // count


def _refuse_staggering_twice(staggered: bool) -> None:
    if staggered:
        raise ValueError("This schedule is a fragment's already; stagger the one that it was made from.")


def _milestones(periods: Mapping[int, int]) -> _Milestones:
    if not periods:
        raise ValueError("Milestones {first step: period} need at least one entry, such as {1: 16}; got none.")
    pairs = sorted((_whole("A milestone", n), _steps(f"The period from step {n}", gap)) for n, gap in periods.items())
    first = pairs[0][0]
    if first < 0:
        raise ValueError(f"Milestones are steps since the warm-up and count from 1; got {first}.")
    if first > 1:
        raise ValueError(f"No period is in force before step {first}, the first milestone; add one for step 1.")
    return _Milestones(tuple(pairs))


def _steps(name: str, value: object) -> int:
    """Return a number of steps as an int; refuse what is not whole or below 1."""
    steps = _whole(name, value)
    if steps < 1:
        raise ValueError(f"{name} must be at least 1 step; got {steps}.")
    return steps


def _whole(name: str, value: object) -> int:
    # With fractions of a step ranks would round, or never meet; integers of other libraries, such as numpy's, will do.
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise TypeError(
            f"{name} must be a whole number of steps (int); got {value!r}, a {type(value).__name__}. "
            "Round it, for example with int()."
        )
    return as_int(value)


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number; got {value!r}, a {type(value).__name__}.")
    return float(value)

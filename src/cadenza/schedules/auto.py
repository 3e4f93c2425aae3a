"""Rounds as often as the link and the step allow: the smallest period that keeps workers busy."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from cadenza.common.checks import as_number, as_steps
from cadenza.schedules.base import NextRound, State, first_turn, refuse_staggering_twice

__all__ = ["Auto", "TimedSchedule", "auto", "enough_steps"]

_UNHEARD = 1  # measurements that are not used: the first round makes connections
_DOUBTS = 2  # rounds in a row that must call for another period


@runtime_checkable
class TimedSchedule(Protocol):
    """A schedule that follows measured times, which are the same numbers on all ranks.

    >>> isinstance(auto(), TimedSchedule)
    True
    """

    @property
    def comfortable(self) -> int:
        """Return the period up to which no lossier codec is wanted, where the codec is chosen too."""

    def learn(self, state: State, step_s: float, stall_s: float) -> State:
        """Return the state after a measurement: a step's time, and for how long a round held training up."""

    def explain(self, before: State, after: State) -> str:
        """Return in words what `learn` has decided, and why; nothing if it has decided nothing."""


def enough_steps(step_s: float, stall_s: float, target: float) -> int:
    """Return the fewest steps after which a stall leaves the target's share of the time to compute.

    >>> enough_steps(0.2, 0.4, 0.95)
    38
    """
    return max(1, math.ceil(stall_s * target / ((1 - target) * step_s) - 1e-9))


@dataclass(frozen=True)
class Auto(NextRound):
    """Rounds as often as the link and the step allow; made by `auto`.

    >>> auto(target=0.9).shortest_gap
    1
    """

    target: float
    initial: int
    minimum: int
    maximum: int
    change: float
    comfortable: int
    first: int | None = None
    count: int = 1

    def start(self) -> State:
        first = self.initial if self.first is None else self.first
        return {"next": first, "period": self.initial, "heard": 0, "doubts": 0, "step_s": 0.0, "stall_s": 0.0}

    def after_round(self, n: int, state: State, drift: float | None) -> State:
        return {**state, "next": n + int(state["period"])}

    def learn(self, state: State, step_s: float, stall_s: float) -> State:
        """Return the state after a measurement; only sums, products and quotients, which round alike everywhere."""
        heard = int(state["heard"]) + 1
        if heard <= _UNHEARD:
            return {**state, "heard": heard}
        period, doubts = int(state["period"]), 0
        wanted = self._wanted(step_s, stall_s)
        if heard == _UNHEARD + 1:
            period = wanted
        elif not period / self.change <= wanted <= period * self.change:
            doubts = int(state["doubts"]) + 1
            if doubts == _DOUBTS:
                means = (state["step_s"] + step_s) / 2, (state["stall_s"] + stall_s) / 2
                period, doubts = self._wanted(*means), 0
        return {**state, "heard": heard, "period": period, "doubts": doubts, "step_s": step_s, "stall_s": stall_s}

    def _wanted(self, step_s: float, stall_s: float) -> int:
        return min(max(enough_steps(step_s, self.count * stall_s, self.target), self.minimum), self.maximum)

    def explain(self, before: State, after: State) -> str:
        if before["period"] == after["period"]:
            return ""
        times = (
            f"a step takes {1000 * after['step_s']:.3g} ms and a round holds it up for {1000 * after['stall_s']:.3g} ms"
        )
        return (
            f"period {int(before['period'])} → {int(after['period'])}: {times}; so few steps leave {self.target:.1%} "
            "of the time to compute"
        )

    @property
    def uses_drift(self) -> bool:
        return False

    def at_least(self, steps: int) -> Auto:
        """Return the schedule with periods of no fewer steps, as a delay asks for.

        >>> auto().at_least(6).minimum
        6
        """
        least = max(self.minimum, steps)
        return replace(self, minimum=least, initial=max(self.initial, least), maximum=max(self.maximum, least))

    def staggered(self, index: int, count: int) -> Auto:
        refuse_staggering_twice(self.first is not None)
        roomy = self.at_least(count)
        return replace(roomy, first=first_turn(index, count, roomy.initial), count=count)


def auto(
    *,
    target: float = 0.95,
    initial: int = 4,
    minimum: int = 1,
    maximum: int = 10_000,
    change: float = 1.5,
    comfortable: int = 100,
) -> Auto:
    """Return a schedule that measures steps and rounds, and takes the smallest period that reaches a utilisation.

    The first rounds come after `initial` steps each, and are measured. In every later round workers tell each other
    what their steps take and for how long the last round held them up; all decide by the slowest step and the shortest
    stall, which is that of whoever waited for nobody. The period changes only if two rounds in a row call for one that
    is `change` times as long or as short. Decisions are in the state, so that a resumed run meets at the same steps.

    Args:
        target: The share of the time that is to be compute.
        initial: The period at first.
        minimum: The shortest period.
        maximum: The longest.
        change: How much the wanted period must differ from the present one to be taken.
        comfortable: The period up to which a codec that is chosen too stays as exact as it is.

    >>> schedule = auto()
    >>> state = schedule.start()
    >>> for _ in range(2):
    ...     state = schedule.learn(state, step_s=0.2, stall_s=0.4)
    >>> schedule.after_round(12, state, None)["next"]
    50
    """
    initial, minimum, maximum = as_steps("initial", initial), as_steps("minimum", minimum), as_steps("maximum", maximum)
    if not minimum <= initial <= maximum:
        raise ValueError(
            f"auto() needs minimum <= initial <= maximum; got {minimum}, {initial} and {maximum}. Start from a period "
            "between the two."
        )
    if not 0 < as_number("target", target) < 1:
        raise ValueError(f"target is a share of the time, above 0 and below 1, such as 0.95; got {target!r}.")
    if not 1 < as_number("change", change) < math.inf:
        raise ValueError(f"change, by how much a period must be wrong to be changed, must be above 1; got {change!r}.")
    return Auto(float(target), initial, minimum, maximum, float(change), as_steps("comfortable", comfortable))

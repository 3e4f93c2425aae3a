"""Rounds whose distance follows the drift."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from cadenza.common.checks import as_number, as_steps
from cadenza.schedules.base import NextRound, State, first_turn, refuse_staggering_twice

__all__ = ["Adaptive", "adaptive"]


@dataclass(frozen=True)
class Adaptive(NextRound):
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

    def after_round(self, n: int, state: State, drift: float | None) -> State:
        # Only products and quotients: those are the same to the last bit on every machine.
        period = min(max(state["period"] * self._change(drift), float(self.minimum)), float(self.maximum))
        return {"next": n + round(period), "period": period}

    @property
    def uses_drift(self) -> bool:
        return True

    def staggered(self, index: int, count: int) -> Adaptive:
        refuse_staggering_twice(self.first is not None)
        return replace(self, first=first_turn(index, count, self.initial))

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
    initial, minimum, maximum = as_steps("initial", initial), as_steps("minimum", minimum), as_steps("maximum", maximum)
    if not minimum <= initial <= maximum:
        raise ValueError(
            f"adaptive() needs minimum <= initial <= maximum; got {minimum}, {initial} and {maximum}. "
            "Start from a period between the two."
        )
    if not 0 < as_number("target_drift", target_drift) < math.inf:
        raise ValueError(
            f"target_drift must be a positive number, such as 0.01 for a spread of 1 %; got {target_drift!r}. "
            "The drift of the first rounds is in their reports."
        )
    if not 1 < as_number("factor", factor) < math.inf:
        raise ValueError(
            f"factor, the most by which one round changes the period, must be above 1; got {factor!r}. "
            "For a period that stays the same use every()."
        )
    return Adaptive(initial, float(target_drift), minimum, maximum, float(factor))

"""A member counts what a function of its own says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from cadenza.weighting.base import Contribution, State, Weighed
from cadenza.weighting.shares import checked_weight, shares_of

__all__ = ["ByFunction", "by_function"]


@dataclass(frozen=True)
class ByFunction:
    """A member counts what a function says when a round is launched; made by `by_function`.

    >>> ByFunction(lambda: 2.5).own(samples=32.0)
    2.5
    """

    function: Callable[[], float]
    needs_samples: ClassVar[bool] = False

    def start(self) -> State:
        return {}

    def own(self, samples: float) -> float:
        return checked_weight(float(self.function()))

    def weigh(self, contributions: Sequence[Contribution], state: State) -> Weighed:
        return Weighed(shares_of(contributions), state=state)


def by_function(function: Callable[[], float]) -> ByFunction:
    """Let a worker count what `function()` says: a finite number of at least 0.

    >>> by_function(lambda: float("nan")).own(samples=0.0)
    Traceback (most recent call last):
    ValueError: the weight is nan, and must be a number that is not negative.
    """
    if not callable(function):
        raise TypeError(
            f"by_function() takes a function without arguments that returns a weight; got {function!r}. "
            "For a weight that stays the same write by_function(lambda: 2.0)."
        )
    return ByFunction(function)

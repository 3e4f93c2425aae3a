"""A member counts by the samples that it has used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from cadenza.weighting.base import Contribution, State, Weighed
from cadenza.weighting.shares import checked_weight, shares_of

__all__ = ["Samples", "samples"]


@dataclass(frozen=True)
class Samples:
    """A member counts by the samples since its last round; made by `samples`.

    >>> Samples().own(samples=32.0)
    32.0
    """

    needs_samples: ClassVar[bool] = True

    def start(self) -> State:
        return {}

    def own(self, samples: float) -> float:
        return checked_weight(samples)

    def weigh(self, contributions: Sequence[Contribution], state: State) -> Weighed:
        return Weighed(shares_of(contributions), state=state)


def samples() -> Samples:
    """Let workers count by the samples that they tell `sync.step(samples=…)`.

    >>> samples().needs_samples
    True
    """
    return Samples()

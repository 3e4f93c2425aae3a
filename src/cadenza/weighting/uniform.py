"""All members count alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from cadenza.weighting.base import Contribution, State, Weighed
from cadenza.weighting.shares import shares_of

__all__ = ["Uniform", "uniform"]


@dataclass(frozen=True)
class Uniform:
    """Every member that has something to add counts 1; made by `uniform`.

    >>> Uniform().own(samples=32.0)
    1.0
    """

    needs_samples: ClassVar[bool] = False

    def start(self) -> State:
        return {}

    def own(self, samples: float) -> float:
        return 1.0

    def weigh(self, contributions: Sequence[Contribution], state: State) -> Weighed:
        return Weighed(shares_of(contributions), state=state)


def uniform() -> Uniform:
    """Let all workers count alike.

    >>> uniform().needs_samples
    False
    """
    return Uniform()

"""From weights to shares, and the check of a weight."""

from __future__ import annotations

import math
from collections.abc import Sequence

from cadenza.weighting.base import Contribution

__all__ = ["checked_weight", "shares_of"]


def shares_of(contributions: Sequence[Contribution]) -> tuple[float, ...]:
    """Return each member's weight as a share of all; where all weights are 0, all count alike.

    >>> from cadenza.weighting import PlainContribution
    >>> shares_of([PlainContribution(weight=3.0), PlainContribution(weight=1.0)])
    (0.75, 0.25)
    >>> shares_of([PlainContribution(weight=0.0)] * 2)
    (0.5, 0.5)
    """
    total = sum(member.weight for member in contributions)
    return tuple(member.weight / total if total else 1 / len(contributions) for member in contributions)


def checked_weight(weight: float) -> float:
    """Return a weight if others can count with it.

    >>> checked_weight(-1.0)
    Traceback (most recent call last):
    ValueError: the weight is -1.0, and must be a number that is not negative.
    """
    if not math.isfinite(weight) or weight < 0:
        raise ValueError(f"the weight is {weight}, and must be a number that is not negative.")
    return weight

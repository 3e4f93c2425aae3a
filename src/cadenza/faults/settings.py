"""Settings that fault policies share: how long to wait, and what is done with a harmful contribution."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_ENOUGH = 8  # rounds, before which nothing is known
_QUANTILE = 0.95

__all__ = ["Patience", "Poison", "poison_of"]


@dataclass(frozen=True)
class Patience:
    """How long a round waits: a grace window, and a multiple of what such rounds have taken so far.

    Attributes:
        grace_s: How long the others wait, at most, for a worker that is alive but late, and for one that has stopped
            sending.
        factor: How many times the usual duration of a round's transfer is not yet a failure.
        first_s: How long the first rounds may take, before anything was measured.

    >>> Patience(grace_s=0)
    Traceback (most recent call last):
    ValueError: grace_s is a positive number; got 0.
    """

    grace_s: float = 10.0
    factor: float = 4.0
    first_s: float = 60.0

    def grace_after(self, waits: Sequence[float]) -> float:
        """Return how long to wait for who is late, after rounds in which all came within these times.

        That is twice what nearly all of them took, but a quarter of `grace_s` at least.

        >>> Patience(grace_s=10.0).grace_after([0.1] * 3), Patience(grace_s=10.0).grace_after([0.1] * 30 + [2.0] * 2)
        (10.0, 4.0)
        """
        if len(waits) < _ENOUGH:
            return self.grace_s
        nearly_all = sorted(waits)[int(_QUANTILE * len(waits))]
        return min(self.grace_s, max(2 * nearly_all, self.grace_s / 4))

    def __post_init__(self) -> None:
        for name in ("grace_s", "factor", "first_s"):
            value = getattr(self, name)
            if not math.isfinite(value) or value <= 0:
                raise ValueError(f"{name} is a positive number; got {value!r}.")


@dataclass(frozen=True)
class Poison:
    """What is done with a contribution that is not finite, or far larger than the others'.

    Attributes:
        leave_out: Whether the round goes on without it; otherwise the round is skipped.
        explosion: How many times the group's median norm is too much; None: any finite norm is accepted.

    >>> Poison(explosion=0.5)
    Traceback (most recent call last):
    ValueError: explosion is a multiple of the median norm, above 1, or None; got 0.5.
    """

    leave_out: bool = True
    explosion: float | None = 10.0

    def __post_init__(self) -> None:
        if self.explosion is not None and not self.explosion > 1:
            raise ValueError(f"explosion is a multiple of the median norm, above 1, or None; got {self.explosion!r}.")


def poison_of(what: str, explosion: float | None) -> Poison:
    """Return the settings for the words that users write.

    >>> poison_of("skip", 10.0)
    Poison(leave_out=False, explosion=10.0)
    """
    if what not in ("leave_out", "skip"):
        raise ValueError(f'poison is "leave_out" or "skip"; got {what!r}.')
    return Poison(what == "leave_out", explosion)

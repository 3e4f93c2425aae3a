"""WHAT IF a worker is gone, late or wrong: raise, skip the round, or go on with those who are left.

A policy only says what is wanted; `cadenza.membership` finds out who is there, and the synchronizer does it. Under
`skip_round` and `shrink` a round that fails changes nothing on any worker.

>>> shrink(min_workers=2).enough(here={0, 2}, last={0, 1, 2})
True
>>> shrink().enough(here={2}, last={0, 1, 2})  # a minority never goes on by itself
False
"""

from __future__ import annotations

import math
from collections.abc import Set
from dataclasses import dataclass, field
from typing import Literal, Protocol

__all__ = [
    "FaultPolicy",
    "Patience",
    "Poison",
    "RaiseError",
    "Shrink",
    "SkipRound",
    "raise_error",
    "shrink",
    "skip_round",
]


@dataclass(frozen=True)
class Patience:
    """How long a round waits: a grace window, and a multiple of what such rounds have taken so far.

    Attributes:
        grace_s: How long the others wait for a worker that is alive but late, and for one that has stopped sending.
        factor: How many times the usual duration of a round's transfer is not yet a failure.
        first_s: How long the first rounds may take, before anything was measured.
    """

    grace_s: float = 10.0
    factor: float = 4.0
    first_s: float = 60.0

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
    """

    leave_out: bool = True
    explosion: float | None = 10.0

    def __post_init__(self) -> None:
        if self.explosion is not None and not self.explosion > 1:
            raise ValueError(f"explosion is a multiple of the median norm, above 1, or None; got {self.explosion!r}.")


class FaultPolicy(Protocol):
    """What a policy gives."""

    @property
    def tolerant(self) -> bool:
        """Whether training goes on when a round fails."""
        ...

    def enough(self, here: Set[int], last: Set[int]) -> bool:
        """Say whether those who are here may hold a round, after a last one that `last` held together."""
        ...

    def describe(self) -> str:
        """Return a line that is equal on two ranks if their policies are."""
        ...


@dataclass(frozen=True)
class RaiseError:
    """A fault ends the training with an error on every rank; made by `raise_error`."""

    @property
    def tolerant(self) -> bool:
        return False

    def enough(self, here: Set[int], last: Set[int]) -> bool:
        return here >= last

    def describe(self) -> str:
        return "raise_error()"


@dataclass(frozen=True)
class SkipRound:
    """A round needs all workers, and is skipped without them; made by `skip_round`."""

    patience: Patience = field(default_factory=Patience)
    poison: Poison = field(default_factory=Poison)

    @property
    def tolerant(self) -> bool:
        return True

    def enough(self, here: Set[int], last: Set[int]) -> bool:
        return here >= last

    def describe(self) -> str:
        return f"skip_round({self.poison})"


@dataclass(frozen=True)
class Shrink:
    """A round goes on with those who are there, and others may join; made by `shrink`."""

    min_workers: int = 1
    quorum: float = 0.5
    patience: Patience = field(default_factory=Patience)
    poison: Poison = field(default_factory=Poison)

    def __post_init__(self) -> None:
        if self.min_workers < 1:
            raise ValueError(f"min_workers is a whole number of at least 1; got {self.min_workers!r}.")
        if not 0 <= self.quorum < 1:
            raise ValueError(
                "quorum is the share of the last membership of which more must be there, from 0 (anyone may go on) to "
                f"below 1; got {self.quorum!r}."
            )

    @property
    def tolerant(self) -> bool:
        return True

    def enough(self, here: Set[int], last: Set[int]) -> bool:
        return len(here) >= self.min_workers and len(here & last) > self.quorum * len(last)

    def describe(self) -> str:
        return f"shrink(min_workers={self.min_workers}, quorum={self.quorum}, {self.poison})"


def raise_error() -> RaiseError:
    """Let a fault end the training, to be restarted from a checkpoint.

    >>> raise_error().tolerant
    False
    """
    return RaiseError()


def skip_round(
    *,
    grace_s: float = 10.0,
    factor: float = 4.0,
    first_s: float = 60.0,
    poison: Literal["leave_out", "skip"] = "leave_out",
    explosion: float | None = 10.0,
) -> SkipRound:
    """Skip a round if not all workers come to it, and let workers come back.

    Args:
        grace_s: How long a round waits for a worker that is alive but late.
        factor: How many times the usual duration of a transfer is not yet a failure.
        first_s: How long the first rounds may take, before anything was measured.
        poison: Whether a contribution that is not finite, or explodes, is left out, or the round is skipped.
        explosion: How many times the group's median norm is too much; None: any finite norm is accepted.

    >>> skip_round().enough(here={0, 1}, last={0, 1, 2})
    False
    """
    return SkipRound(Patience(grace_s, factor, first_s), _poison(poison, explosion))


def shrink(
    *,
    min_workers: int = 1,
    quorum: float = 0.5,
    grace_s: float = 10.0,
    factor: float = 4.0,
    first_s: float = 60.0,
    poison: Literal["leave_out", "skip"] = "leave_out",
    explosion: float | None = 10.0,
) -> Shrink:
    """Go on with the workers that are left, and let others join; `skip_round` tells the arguments that both have.

    Args:
        min_workers: With fewer, rounds are skipped.
        quorum: More than this share of the last round's workers must be there, so a minority never goes on by itself.
        grace_s: How long a round waits for a worker that is alive but late.
        factor: How many times the usual duration of a transfer is not yet a failure.
        first_s: How long the first rounds may take, before anything was measured.
        poison: Whether a contribution that is not finite, or explodes, is left out, or the round is skipped.
        explosion: How many times the group's median norm is too much; None: any finite norm is accepted.

    >>> shrink().enough(here={0, 1, 7}, last={0, 1, 2})
    True
    """
    return Shrink(min_workers, quorum, Patience(grace_s, factor, first_s), _poison(poison, explosion))


def _poison(what: str, explosion: float | None) -> Poison:
    if what not in ("leave_out", "skip"):
        raise ValueError(f'poison is "leave_out" or "skip"; got {what!r}.')
    return Poison(what == "leave_out", explosion)

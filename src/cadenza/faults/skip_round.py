"""A round that not all workers come to is skipped."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from cadenza.faults.settings import Patience, Poison, poison_of

__all__ = ["SkipRound", "skip_round"]


@dataclass(frozen=True)
class SkipRound:
    """A round needs all workers, and is skipped without them; made by `skip_round`.

    >>> SkipRound().tolerant
    True
    """

    patience: Patience = field(default_factory=Patience, metadata={"local": "each worker may wait as long as it likes"})
    poison: Poison = field(default_factory=Poison)
    name: ClassVar[str] = "skip_round"

    @property
    def tolerant(self) -> bool:
        return True

    def enough(self, here: Set[int], last: Set[int]) -> bool:
        return here >= last

    def suffices(self, here: Set[int], last: Set[int], weights: Mapping[int, float]) -> bool:
        return False


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
        grace_s: How long a round waits, at most, for a worker that is alive but late; less once it is known how late
            workers usually are.
        factor: How many times the usual duration of a transfer is not yet a failure.
        first_s: How long the first rounds may take, before anything was measured.
        poison: Whether a contribution that is not finite, or explodes, is left out, or the round is skipped.
        explosion: How many times the group's median norm is too much; None: any finite norm is accepted.

    >>> skip_round().enough(here={0, 1}, last={0, 1, 2})
    False
    """
    return SkipRound(Patience(grace_s, factor, first_s), poison_of(poison, explosion))

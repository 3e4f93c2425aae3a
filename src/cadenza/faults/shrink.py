"""A round goes on with the workers that are left."""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from cadenza.faults.base import FaultPolicy
from cadenza.faults.settings import Patience, Poison, poison_of

__all__ = ["Shrink", "for_inner_level", "shrink", "to_wait_for_all"]


_ROUNDING = 1e-9  # what a sum of shares may be short of


@dataclass(frozen=True)
class Shrink:
    """A round goes on with those who are there, and others may join; made by `shrink`.

    >>> Shrink(quorum=0.0).enough(here={2}, last={0, 1, 2})
    True
    """

    min_workers: int = 1
    quorum: float = 0.5
    commit_at: float | int | None = field(
        default=None, metadata={"local": "whoever proposes the members of a round decides, and all obey"}
    )
    patience: Patience = field(default_factory=Patience, metadata={"local": "each worker may wait as long as it likes"})
    poison: Poison = field(default_factory=Poison)
    name: ClassVar[str] = "shrink"

    def __post_init__(self) -> None:
        if not _is_count(self.min_workers):
            raise ValueError(f"min_workers is a whole number of at least 1; got {self.min_workers!r}.")
        if not 0 <= self.quorum < 1:
            raise ValueError(
                "quorum is the share of the last membership of which more must be there, from 0 (anyone may go on) to "
                f"below 1; got {self.quorum!r}."
            )

        if not _is_commit_at(self.commit_at):
            raise ValueError(
                "commit_at is a share of the last round's weight, above 0 and below 1, a whole number of workers from "
                f"1, or None for all of them; got {self.commit_at!r}."
            )

    @property
    def tolerant(self) -> bool:
        return True

    def enough(self, here: Set[int], last: Set[int]) -> bool:
        return len(here) >= self.min_workers and len(here & last) > self.quorum * len(last)

    def suffices(self, here: Set[int], last: Set[int], weights: Mapping[int, float]) -> bool:
        if self.commit_at is None:
            return False
        if isinstance(self.commit_at, int):
            return len(here) >= self.commit_at
        if not any(weights.get(worker, 0.0) for worker in last):
            return len(here & last) >= self.commit_at * len(last)
        there, whole = (math.fsum(weights.get(worker, 0.0) for worker in group) for group in (here & last, last))
        return there >= self.commit_at * whole * (1 - _ROUNDING)


def _is_commit_at(value: object) -> bool:
    return value is None or _is_count(value) or (isinstance(value, float) and 0 < value < 1)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def shrink(
    *,
    min_workers: int = 1,
    quorum: float = 0.5,
    commit_at: float | int | None = None,
    grace_s: float = 10.0,
    factor: float = 4.0,
    first_s: float = 60.0,
    poison: Literal["leave_out", "skip"] = "leave_out",
    explosion: float | None = 10.0,
) -> Shrink:
    """Go on with the workers that are left, and let others join; `skip_round` tells the arguments that both have.

    Args:
        min_workers: With fewer, rounds are skipped; of several levels it is meant for the outermost.
        quorum: More than this share of the last round's workers must be there, so a minority never goes on by itself.
            Every level asks for it, of those who held its own last round.
        commit_at: Once so many workers have come, or those who had this share of the last round's weight (of its
            workers, where all count alike), a round does not wait for the others: they come to the next one, which
            waits for them, with what they have done; in the first rounds of a run they may miss several, and to the
            last one, as to that after a warm-up, all are awaited. A round waits for a fiftieth of a period even so, for
            who is a moment late. None waits for all of them; 1, with ``quorum=0.0``, for nobody but those who were left
            out (Decoupled DiLoCo): a round that only workers have seen that died is lost then.
        grace_s: How long a round waits, at most, for a worker that is alive but late; less once it is known how late
            workers usually are.
        factor: How many times the usual duration of a transfer is not yet a failure.
        first_s: How long the first rounds may take, before anything was measured.
        poison: Whether a contribution that is not finite, or explodes, is left out, or the round is skipped.
        explosion: How many times the group's median norm is too much; None: any finite norm is accepted.

    >>> shrink().enough(here={0, 1, 7}, last={0, 1, 2})
    True
    """
    return Shrink(min_workers, quorum, commit_at, Patience(grace_s, factor, first_s), poison_of(poison, explosion))


def to_wait_for_all(policy: FaultPolicy) -> FaultPolicy:
    """Return the policy of the last round: who is late is waited for, also where others would be enough.

    >>> to_wait_for_all(shrink(commit_at=1)).suffices(here={0}, last={0, 1}, weights={})
    False
    """
    return replace(policy, commit_at=None) if isinstance(policy, Shrink) else policy


def for_inner_level(policy: FaultPolicy) -> FaultPolicy:
    """Return the policy of a level inside the outermost one: a site may go on with fewer workers than all need.

    >>> for_inner_level(shrink(min_workers=4)).enough(here={0}, last={0})
    True
    """
    return replace(policy, min_workers=1) if isinstance(policy, Shrink) else policy

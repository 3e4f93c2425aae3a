"""What every fault policy promises."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Protocol

from cadenza.faults.settings import Patience, Poison

__all__ = ["FaultPolicy"]


class FaultPolicy(Protocol):
    """What a policy gives.

    >>> from cadenza.faults import shrink
    >>> def may_go_on(policy: FaultPolicy, here: Set[int], last: Set[int]) -> bool:
    ...     return policy.tolerant and policy.enough(here, last)
    >>> may_go_on(shrink(), {0, 1}, {0, 1, 2})
    True
    """

    @property
    def name(self) -> str:
        """A short name for messages and reports."""
        ...

    @property
    def tolerant(self) -> bool:
        """Whether training goes on when a round fails."""
        ...

    def enough(self, here: Set[int], last: Set[int]) -> bool:
        """Say whether those who are here may hold a round, after a last one that `last` held together."""
        ...

    def suffices(self, here: Set[int], last: Set[int], weights: Mapping[int, float]) -> bool:
        """Say whether a round goes on without those who are late, once these are here.

        `weights` says what each of them counted in the last round; it is empty where all counted alike. For the last
        round of a run, and that after a warm-up, it is not asked: all are awaited.
        """
        ...

    @property
    def patience(self) -> Patience:
        """How long a round waits; asked only where training goes on."""
        ...

    @property
    def poison(self) -> Poison | None:
        """What is done with contributions that would do harm; None: they end the training as any fault does."""
        ...

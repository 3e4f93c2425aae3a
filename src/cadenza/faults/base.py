"""What every fault policy promises."""

from __future__ import annotations

from collections.abc import Set
from typing import Protocol

__all__ = ["FaultPolicy"]


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

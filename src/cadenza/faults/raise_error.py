"""A fault ends the training."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import ClassVar

from cadenza.faults.settings import Patience, Poison

__all__ = ["RaiseError", "raise_error"]


@dataclass(frozen=True)
class RaiseError:
    """A fault ends the training with an error on every rank; made by `raise_error`.

    >>> RaiseError().enough(here={0, 1}, last={0, 1, 2})
    False
    """

    name: ClassVar[str] = "raise_error"
    patience: ClassVar[Patience] = Patience()
    poison: ClassVar[Poison | None] = None

    @property
    def tolerant(self) -> bool:
        return False

    def enough(self, here: Set[int], last: Set[int]) -> bool:
        return here >= last

    def suffices(self, here: Set[int], last: Set[int], weights: Mapping[int, float]) -> bool:
        return False


def raise_error() -> RaiseError:
    """Let a fault end the training, to be restarted from a checkpoint.

    >>> raise_error().tolerant
    False
    """
    return RaiseError()

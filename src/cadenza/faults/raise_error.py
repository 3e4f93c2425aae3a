"""A fault ends the training."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

__all__ = ["RaiseError", "raise_error"]


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


def raise_error() -> RaiseError:
    """Let a fault end the training, to be restarted from a checkpoint.

    >>> raise_error().tolerant
    False
    """
    return RaiseError()

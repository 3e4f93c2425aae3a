"""What every fragmentation promises."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias

__all__ = ["Fragmentation", "Sized"]

Sized: TypeAlias = Sequence[tuple[str, int]]


class Fragmentation(Protocol):
    """What a fragmentation gives: lists of names, each name in one of them."""

    def split(self, parameters: Sized) -> list[list[str]]:
        """Cut named sizes (in bytes) into fragments; none is empty."""
        ...

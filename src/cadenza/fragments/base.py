"""What every fragmentation promises."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias

__all__ = ["Fragmentation", "Sized"]

Sized: TypeAlias = Sequence[tuple[str, int]]


class Fragmentation(Protocol):
    """What a fragmentation gives: lists of names, each name in one of them.

    >>> from cadenza.fragments import by_bytes
    >>> def count(fragmentation: Fragmentation, parameters: Sized) -> int:
    ...     return len(fragmentation.split(parameters))
    >>> count(by_bytes(4), [("a", 4), ("b", 4)])
    2
    """

    @property
    def single(self) -> bool:
        """Whether everything travels as one fragment, whatever the model."""
        ...

    def split(self, parameters: Sized) -> list[list[str]]:
        """Cut named sizes (in bytes) into fragments; none is empty."""
        ...

"""Fragments of about equal size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from cadenza.common.checks import as_count
from cadenza.fragments.base import Sized

__all__ = ["ByBytes", "by_bytes"]


@dataclass(frozen=True)
class ByBytes:
    """Fragments of about equal size; made by `by_bytes`.

    >>> ByBytes(4).split([("a", 4), ("b", 4)])
    [['a'], ['b']]
    """

    limit: int
    single: ClassVar[bool] = False

    def split(self, parameters: Sized) -> list[list[str]]:
        """Fill fragments in order; a parameter larger than the limit has one to itself."""
        fragments: list[list[str]] = []
        room = 0
        for name, size in parameters:
            if not fragments or size > room:
                fragments.append([])
                room = self.limit
            fragments[-1].append(name)
            room -= size
        return fragments


def by_bytes(limit: int) -> ByBytes:
    """Send fragments of at most `limit` bytes.

    >>> by_bytes(8).split([("a", 4), ("b", 4), ("c", 4)])
    [['a', 'b'], ['c']]
    """
    return ByBytes(as_count("limit", limit))

"""A value for each stretch of steps or rounds: a function that can be compared by value."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import Generic, TypeVar

__all__ = ["Milestones"]

T = TypeVar("T")


@dataclass(frozen=True)
class Milestones(Generic[T]):
    """The value of the last milestone that was passed; `before` is in force until the first.

    >>> period = Milestones(((1, 16), (1000, 64)), before=16)
    >>> period(0), period(999), period(1000)
    (16, 16, 64)
    """

    points: tuple[tuple[int, T], ...]
    before: T

    def __call__(self, n: int) -> T:
        passed = bisect_right(self.points, n, key=lambda point: point[0])
        return self.points[passed - 1][1] if passed else self.before

"""Everything in one fragment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from cadenza.fragments.base import Sized

__all__ = ["Whole", "whole"]


@dataclass(frozen=True)
class Whole:
    """Everything in one fragment; made by `whole`.

    >>> Whole().split([])
    []
    """

    single: ClassVar[bool] = True

    def split(self, parameters: Sized) -> list[list[str]]:
        return [[name for name, _ in parameters]] if parameters else []


def whole() -> Whole:
    """Send everything at once.

    >>> whole().split([("a", 4), ("b", 4)])
    [['a', 'b']]
    """
    return Whole()

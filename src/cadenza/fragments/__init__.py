"""WHICH parameters travel together: all at once, by layers, or by bytes.

A fragmentation is a pure function of names and sizes, so all ranks cut alike.

>>> by_layers(2).split([("embed", 4), ("layers.0.w", 4), ("layers.1.w", 4), ("layers.2.w", 4), ("head", 4)])
[['embed', 'layers.0.w', 'layers.2.w', 'head'], ['layers.1.w']]
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

__all__ = ["ByBytes", "ByLayers", "Fragmentation", "Whole", "by_bytes", "by_layers", "whole"]

Sized = Sequence[tuple[str, int]]

_LAYER = re.compile(r"(?:^|\.)(\d+)(?=\.|$)")


class Fragmentation(Protocol):
    """What a fragmentation gives: lists of names, each name in one of them."""

    def split(self, parameters: Sized) -> list[list[str]]:
        """Cut named sizes (in bytes) into fragments; none is empty."""
        ...

    def describe(self) -> str:
        """Return a line that is equal on two ranks if their fragmentations are."""
        ...


@dataclass(frozen=True)
class Whole:
    """Everything in one fragment; made by `whole`."""

    def split(self, parameters: Sized) -> list[list[str]]:
        return [[name for name, _ in parameters]] if parameters else []

    def describe(self) -> str:
        return "whole()"


@dataclass(frozen=True)
class ByLayers:
    """Fragments of a few layers each; made by `by_layers`."""

    layers: int
    strided: bool = True

    def split(self, parameters: Sized) -> list[list[str]]:
        """Cut by the first number in a parameter's name; what has none goes with the layer before it, or the first."""
        found = [_LAYER.search(name) for name, _ in parameters]
        numbers = [int(match.group(1)) if match else None for match in found]
        known = sorted({number for number in numbers if number is not None})
        if not known:
            return Whole().split(parameters)
        count = -(-len(known) // self.layers)
        place = {number: index % count if self.strided else index // self.layers for index, number in enumerate(known)}
        fragments: list[list[str]] = [[] for _ in range(count)]
        last = place[known[0]]
        for (name, _), number in zip(parameters, numbers, strict=True):
            last = last if number is None else place[number]
            fragments[last].append(name)
        return fragments

    def describe(self) -> str:
        return f"by_layers({self.layers}, strided={self.strided})"


@dataclass(frozen=True)
class ByBytes:
    """Fragments of about equal size; made by `by_bytes`."""

    limit: int

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

    def describe(self) -> str:
        return f"by_bytes({self.limit})"


def whole() -> Whole:
    """Send everything at once.

    >>> whole().split([("a", 4), ("b", 4)])
    [['a', 'b']]
    """
    return Whole()


def by_layers(layers: int = 3, *, strided: bool = True) -> ByLayers:
    """Send `layers` layers at a time, strided as in Streaming DiLoCo (every so-manieth), or in runs.

    >>> by_layers(1).split([("0.w", 4), ("1.w", 4)])
    [['0.w'], ['1.w']]
    """
    return ByLayers(_positive("layers", layers), strided)


def by_bytes(limit: int) -> ByBytes:
    """Send fragments of at most `limit` bytes.

    >>> by_bytes(8).split([("a", 4), ("b", 4), ("c", 4)])
    [['a', 'b'], ['c']]
    """
    return ByBytes(_positive("limit", limit))


def _positive(name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is a whole number; got {value!r}.")
    if value < 1:
        raise ValueError(f"{name} is at least 1; got {value}.")
    return value

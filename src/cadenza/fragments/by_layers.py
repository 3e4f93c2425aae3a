"""Fragments of a few layers each, as in Streaming DiLoCo."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

from cadenza.common.checks import as_count
from cadenza.fragments.base import Sized
from cadenza.fragments.whole import Whole

__all__ = ["ByLayers", "by_layers"]

_LAYER = re.compile(r"(?:^|\.)(\d+)(?=\.|$)")


@dataclass(frozen=True)
class ByLayers:
    """Fragments of a few layers each; made by `by_layers`.

    >>> ByLayers(1, strided=False).split([("0.w", 4), ("1.w", 4)])
    [['0.w'], ['1.w']]
    """

    layers: int
    strided: bool = True
    single: ClassVar[bool] = False

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


def by_layers(layers: int = 3, *, strided: bool = True) -> ByLayers:
    """Send `layers` layers at a time, strided as in Streaming DiLoCo (each takes every n-th layer), or in runs.

    >>> by_layers(1).split([("0.w", 4), ("1.w", 4)])
    [['0.w'], ['1.w']]
    """
    return ByLayers(as_count("layers", layers), strided)

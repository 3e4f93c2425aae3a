"""Fragments of a few layers each, as in Streaming DiLoCo."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

from cadenza.common.checks import as_count
from cadenza.fragments.base import Sized
from cadenza.fragments.layers import find_layers
from cadenza.fragments.whole import Whole

__all__ = ["ByLayers", "by_layers"]

_UNEVEN = 1.25  # so much larger than need be is a fragment that striding makes no more
_ROOM = 2  # what is in no layer makes a fragment at most so many times as large as the layers' are


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
        """Cut by layers; what is in none goes with the layer before it, or where there is room (see `by_layers`)."""
        return [list(fragment) for fragment in _split(self.layers, self.strided, tuple(parameters))]


@lru_cache(maxsize=16)  # asked for in every round, and the same as long as the same parameters are trained
def _split(layers: int, strided: bool, parameters: Sized) -> list[list[str]]:
    found = find_layers(parameters)
    if not found:
        return Whole().split(parameters)
    sizes = dict(parameters)
    place = {name: i for i, group in enumerate(_groups(found, layers, strided, sizes)) for name in group}
    _place_the_rest(place, sizes)
    fragments: dict[int, list[str]] = {i: [] for i in sorted(set(place.values()))}
    for name in sizes:
        fragments[place[name]].append(name)
    return list(fragments.values())


def _groups(found: Sequence[list[str]], layers: int, strided: bool, sizes: Mapping[str, int]) -> list[list[str]]:
    """Put the layers of each fragment together."""
    count = -(-len(found) // layers)
    if not strided:
        return [_joined(found[i : i + layers]) for i in range(0, len(found), layers)]
    in_turn = [_joined(found[i::count]) for i in range(count)]
    by_size = _dealt_by_size(found, count, sizes)
    largest, least = (max(_bytes(group, sizes) for group in groups) for groups in (in_turn, by_size))
    return in_turn if largest <= _UNEVEN * least else by_size


def _dealt_by_size(found: Sequence[list[str]], count: int, sizes: Mapping[str, int]) -> list[list[str]]:
    """Give each layer, from the largest down, to the group that has least; groups stand in order of their first one."""
    groups: list[list[int]] = [[] for _ in range(count)]
    filled = [0] * count
    weights = [_bytes(layer, sizes) for layer in found]
    for i in sorted(range(len(found)), key=lambda i: -weights[i]):
        least = min(range(count), key=lambda group: (filled[group], len(groups[group])))
        groups[least].append(i)
        filled[least] += weights[i]
    return [_joined(found[i] for i in sorted(group)) for group in sorted(groups, key=min)]


def _place_the_rest(place: dict[str, int], sizes: Mapping[str, int]) -> None:
    """Find a fragment for what is in no layer, in order: its neighbour's, the smallest, or one of such parameters."""
    filled = [0] * (max(place.values()) + 1)
    for name, fragment in place.items():
        filled[fragment] += sizes[name]
    of_layers, usual = range(len(filled)), sum(filled) / len(filled)
    neighbour = next(place[name] for name in sizes if name in place)
    for name, size in sizes.items():
        if name in place:
            neighbour = place[name]
            continue
        known = neighbour, min(of_layers, key=filled.__getitem__)
        own = (i for i in range(len(of_layers), len(filled)) if filled[i] + size <= usual)
        fitting = [i for i in known if filled[i] + size <= _ROOM * usual] or [*own, len(filled)]
        place[name] = fitting[0]
        filled += [0] * (fitting[0] == len(filled))
        filled[place[name]] += size


def _joined(layers: Iterable[list[str]]) -> list[str]:
    return [name for layer in layers for name in layer]


def _bytes(names: Sequence[str], sizes: Mapping[str, int]) -> int:
    return sum(sizes[name] for name in names)


def by_layers(layers: int = 3, *, strided: bool = True) -> ByLayers:
    """Send `layers` layers at a time, strided as in Streaming DiLoCo (each takes every n-th layer), or in runs.

    *Layers* are found by structure, in the parameters' names and sizes: modules that a number tells apart and that
    repeat each other, the outermost that do. So `blocks.0`, `block0`, `model.layers.0`, `layer1.0` and `0.0` are layers
    and what is numbered inside them is not; `encoder.layers.0` and `decoder.layers.0` are two. Where nothing repeats,
    whatever is numbered is a layer.

    *Fragments* are balanced by bytes: if striding layers of unlike sizes makes one fragment more than a quarter larger
    than it need be, they are dealt out by size. What is in no layer, such as an embedding, goes with the layer before
    it (or the first) or else to the smallest fragment, as long as that stays below twice the usual size; the rest has
    fragments of its own. A tensor is never cut.

    A model in which no two layers are found, or fewer than `layers`, is one fragment; `attach` warns of it.

    >>> by_layers(1).split([("0.w", 4), ("1.w", 4)])
    [['0.w'], ['1.w']]
    >>> by_layers(1).split([("embedding", 640), ("block0.w", 4), ("block1.w", 4), ("norm", 1)])
    [['block0.w'], ['block1.w', 'norm'], ['embedding']]
    """
    return ByLayers(as_count("layers", layers), strided)

"""Tuning: from a first guess to a setting whose neighbours on every axis are all worse.

An axis is a list of values, from small to large, such as learning rates a factor apart. The best point so far is
compared with its two neighbours on each axis, one axis after the other; a better one takes its place. A search has
ended when all neighbours of the best point are known and worse: its optimum lies inside the grid. If the best point is
at the end of an axis, the search says so ("at the edge"), and the axis must be made longer; ends that nothing can lie
beyond (a batch of one window, a momentum of 0) count as inside.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Axis", "Found", "Point", "search"]

Point = Mapping[str, Any]


@dataclass(frozen=True)
class Axis:
    """The values that a setting may take, from small to large."""

    values: Sequence[float]
    closed_below: bool = False  # nothing can lie below the first value

    def beside(self, value: float) -> list[float]:
        """Return the neighbours of a value, the larger one first.

        >>> Axis((1, 2, 4)).beside(2), Axis((1, 2, 4)).beside(4)
        ([4, 1], [2])
        """
        i = self.values.index(value)
        return [*self.values[i + 1 : i + 2], *self.values[max(0, i - 1) : i]]

    def at_edge(self, value: float) -> bool:
        i = self.values.index(value)
        return i == len(self.values) - 1 or (i == 0 and not self.closed_below)


@dataclass(frozen=True)
class Found:
    """How far a search is.

    Attributes:
        best: The best point that is known; None if none is.
        wanted: Points to try next; none if the search has ended.
        edges: The axes at whose ends the best point lies.
    """

    best: Point | None
    wanted: Sequence[Point]
    edges: Sequence[str]


def search(axes: Mapping[str, Axis], start: Point, loss: Callable[[Point], float | None]) -> Found:
    """Return the best point, and what must be tried before it can be called the optimum.

    `loss` gives the validation loss of a point, or None if it is not known yet; not a number counts as infinite.

    >>> axes, known = {"lr": Axis((1, 2, 4, 8))}, {1: 0.5, 2: 0.4, 4: 0.3}
    >>> search(axes, {"lr": 2}, lambda point: known.get(point["lr"]))
    Found(best={'lr': 4}, wanted=[{'lr': 8}], edges=[])
    """
    best: Point = dict(start)
    names, settled = list(axes), 0  # how many axes in a row have no better value for the best point
    if loss(best) is None:
        return Found(None, [best], [])
    for name in itertools.cycle(names):
        better = _better(name, axes[name], best, loss)
        while isinstance(better, dict):
            best, settled = better, 0
            better = _better(name, axes[name], best, loss)
        if better is not None:
            return Found(best, [better.point], [])
        settled += 1
        if settled >= len(names):
            break
    return Found(best, [], [name for name, axis in axes.items() if axis.at_edge(best[name])])


@dataclass(frozen=True)
class _Unknown:
    """A neighbour that must be tried before the search can go on."""

    point: Point


def _better(
    name: str, axis: Axis, best: Point, loss: Callable[[Point], float | None]
) -> dict[str, Any] | _Unknown | None:
    """Return a neighbour on an axis that is known to be better than the best point, or one to try, or None."""
    points = [{**best, name: value} for value in axis.beside(best[name])]
    for point in points:
        found = loss(point)
        if found is not None and found < _number(loss(best)):
            return point
    return next((_Unknown(point) for point in points if loss(point) is None), None)


def _number(value: float | None) -> float:
    return math.inf if value is None or math.isnan(value) else value

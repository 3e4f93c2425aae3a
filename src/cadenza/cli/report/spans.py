"""Stretches of time: what they cover together, what is left of them, and how much of each bin they fill.

>>> minus([(0.0, 10.0)], [(2.0, 3.0), (9.0, 12.0)])
[(0.0, 2.0), (3.0, 9.0)]
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

__all__ = ["Span", "filled", "lives", "minus", "total", "union", "within"]

Span: TypeAlias = tuple[float, float]


def union(spans: Iterable[Span]) -> list[Span]:
    """Return what the spans cover together, in order, without overlaps.

    >>> union([(4.0, 5.0), (0.0, 2.0), (1.0, 3.0)])
    [(0.0, 3.0), (4.0, 5.0)]
    """
    merged: list[Span] = []
    for start, end in sorted(span for span in spans if span[1] > span[0]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def minus(spans: Sequence[Span], holes: Sequence[Span]) -> list[Span]:
    """Return what is left of the spans outside the holes; both in order, without overlaps."""
    left: list[Span] = []
    first = 0
    for start, end in spans:
        while first < len(holes) and holes[first][1] <= start:
            first += 1
        hole = first
        while hole < len(holes) and holes[hole][0] < end:
            low, high = holes[hole]
            if low > start:
                left.append((start, low))
            start = max(start, high)
            hole += 1
        if start < end:
            left.append((start, end))
    return left


def within(spans: Iterable[Span], window: Span) -> list[Span]:
    """Return the parts of the spans that lie in the window.

    >>> within([(0.0, 2.0), (5.0, 6.0)], (1.0, 3.0))
    [(1.0, 2.0)]
    """
    cut = ((max(start, window[0]), min(end, window[1])) for start, end in spans)
    return [(start, end) for start, end in cut if end > start]


def total(spans: Iterable[Span]) -> float:
    """Return the length of the spans together.

    >>> total([(0.0, 1.5), (2.0, 3.0)])
    2.5
    """
    return sum(end - start for start, end in spans)


def filled(spans: Iterable[Span], end: float, bins: int) -> list[float]:
    """Return, for each of `bins` equal bins of the time from 0 to `end`, which share of it the spans fill.

    >>> filled([(0.0, 1.0), (3.5, 4.0)], end=4.0, bins=2)
    [0.5, 0.25]
    """
    width = end / bins
    seconds = [0.0] * bins
    for start, stop in within(spans, (0.0, end)):
        for number in range(min(bins - 1, int(start / width)), min(bins - 1, int(stop / width)) + 1):
            seconds[number] += max(0.0, min(stop, (number + 1) * width) - max(start, number * width))
    return [min(1.0, value / width) for value in seconds]


def lives(lines: Iterable[tuple[str, float]]) -> list[Span]:
    """Return when a worker was there, by the kinds and times of its lines: from each start to its last own line.

    Events are not its own: others write them, once it is dead.

    >>> lives([("start", 0.0), ("step", 3.0), ("event", 4.0), ("start", 6.0), ("end", 9.0)])
    [(0.0, 3.0), (6.0, 9.0)]
    """
    found: list[Span] = []
    for kind, time in lines:
        if kind == "start" or not found:
            found.append((time if found else 0.0, time))
        elif kind != "event":
            found[-1] = found[-1][0], max(found[-1][1], time)
    return found

"""Fewer points of a line, without hiding what it did.

>>> keep_extremes([0.0, 9.0, 0.0, 0.0, -9.0, 0.0, 0.0, 0.0], limit=4)
[0, 1, 4, 7]
"""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["keep_every", "keep_extremes", "moving_mean"]


def keep_extremes(values: Sequence[float], limit: int) -> list[int]:
    """Return at most `limit` indices: both ends, and the lowest and highest of equal stretches between them.

    Every peak and every dip of the line stays. A stretch in which all is NaN keeps one of them, so the gap stays too.

    >>> keep_extremes([1.0, 2.0, 3.0], limit=10)
    [0, 1, 2]
    """
    count = len(values)
    if count <= limit:
        return list(range(count))
    stretches = max(1, (limit - 2) // 2)
    kept = {0, count - 1}
    for number in range(stretches):
        indices = range(number * count // stretches, (number + 1) * count // stretches)
        finite = [index for index in indices if math.isfinite(values[index])]
        if finite:
            kept.add(min(finite, key=values.__getitem__))
            kept.add(max(finite, key=values.__getitem__))
        else:
            kept.add(indices.start)
    return sorted(kept)


def keep_every(count: int, limit: int) -> list[int]:
    """Return at most `limit` of `count` indices, evenly, with both ends.

    >>> keep_every(9, 3), keep_every(2, 3), keep_every(0, 3)
    ([0, 4, 8], [0, 1], [])
    """
    if count <= limit:
        return list(range(count))
    return [round(number * (count - 1) / (limit - 1)) for number in range(limit)]


def moving_mean(values: Sequence[float], width: int) -> list[float]:
    """Return the mean of the `width` values around each one, fewer at the ends; what is not finite is left out.

    Where nothing around is finite, the mean is NaN.

    >>> moving_mean([0.0, 3.0, 6.0, float("nan")], width=3)
    [1.5, 3.0, 4.5, 6.0]
    """
    sums, counts = [0.0], [0]
    for value in values:
        finite = math.isfinite(value)
        sums.append(sums[-1] + (value if finite else 0.0))
        counts.append(counts[-1] + finite)
    means = []
    for index in range(len(values)):
        low, high = max(0, index - width // 2), min(len(values), index + (width - 1) // 2 + 1)
        number = counts[high] - counts[low]
        means.append((sums[high] - sums[low]) / number if number else math.nan)
    return means

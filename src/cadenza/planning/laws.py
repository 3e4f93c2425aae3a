"""What papers measured of the loss against data parallel, and where it holds.

One table is a law in the sense that it can be read between its points: DiLoCo's scaling laws (arXiv 2503.09799, table
4), each side tuned, H = 30, 20 tokens a parameter. Beyond it there are single findings, and no numbers.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Loss", "loss_of", "outer_settings"]

SIZES = (35e6, 335e6, 2.4e9)
REPLICAS = (1, 2, 4, 8)
PERCENT = ((-0.1, 0.7, 2.0, 3.9), (-0.3, 0.1, 0.9, 2.0), (-0.4, -0.1, 0.3, 1.1))
PERIOD = 30
SOURCE = "arXiv 2503.09799, table 4"


@dataclass(frozen=True)
class Loss:
    """What is published of the loss.

    Attributes:
        percent: Above data parallel's, each side tuned; None where nothing was published.
        valid: Whether the question lies inside what was measured.
        note: What to know: the source, and what lies outside.
    """

    percent: float | None
    valid: bool
    note: str


def loss_of(parameters: float, workers: int, period: int, *, outer: bool = True) -> Loss:
    """Return what the law says at a size, a number of workers and a period; outside it, at the nearest point of it.

    Args:
        parameters: The size of the model.
        workers: Replicas that meet.
        period: Steps between rounds.
        outer: Whether an outer step with momentum is taken; plain averages were not measured there.

    >>> loss_of(335e6, 4, 30).percent
    0.9
    >>> loss_of(70e9, 64, 500).note
    'arXiv 2503.09799, table 4, read at 2.4B parameters (70B asked), 8 workers (64 asked), H = 30 (500 asked)'
    """
    if period <= 1:
        return Loss(0.0, True, "averaged in every step: data parallel itself")
    if not outer:
        return Loss(None, False, f"no law was published for plain averages; with an outer step: {SOURCE}")
    size = min(max(parameters, SIZES[0]), SIZES[-1])
    replicas = min(max(workers, REPLICAS[0]), REPLICAS[-1])
    sizes, columns = [math.log(n) for n in SIZES], [math.log2(m) for m in REPLICAS]
    rows = [_between(columns, row, math.log2(replicas)) for row in PERCENT]
    percent = round(_between(sizes, rows, math.log(size)), 3)
    asked = []
    if size != parameters:
        asked.append(f"{_short(size)} parameters ({_short(parameters)} asked)")
    if replicas != workers:
        asked.append(f"{replicas} workers ({workers} asked)")
    if period != PERIOD:
        asked.append(f"H = {PERIOD} ({period} asked)")
    return Loss(percent, not asked, SOURCE + (f", read at {', '.join(asked)}" if asked else ""))


def outer_settings(parameters: float, workers: int) -> tuple[float, float]:
    """Return the outer learning rate and momentum that were best there: constant, rising with the workers.

    >>> outer_settings(1e9, 8), outer_settings(35e6, 8)
    ((0.8, 0.9), (1.0, 0.9))
    """
    rates = (0.6, 0.6, 0.6, 1.0) if parameters < math.sqrt(SIZES[0] * SIZES[1]) else (0.4, 0.6, 0.6, 0.8)
    return rates[max(0, bisect_right(REPLICAS, workers) - 1)], 0.9


def _between(places: Sequence[float], values: Sequence[float], at: float) -> float:
    """Return the value at a place, on the straight line between its neighbours."""
    right = min(max(1, bisect_right(places, at)), len(places) - 1)
    share = (at - places[right - 1]) / (places[right] - places[right - 1])
    return values[right - 1] + share * (values[right] - values[right - 1])


def _short(count: float) -> str:
    return f"{count / 1e9:g}B" if count >= 1e9 else f"{count / 1e6:g}M"

"""What this worker measures of its own pace, for schedules and codecs that follow it."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from cadenza.codecs.auto import ChoosingCodec
from cadenza.schedules.auto import TimedSchedule
from cadenza.strategy import Strategy

__all__ = ["Pace"]

_STEPS = 64  # the last steps, of which the median counts: an evaluation in between is no step


class Pace:
    """How long this worker's steps take, and for how long the last round of each level and fragment held them up.

    Attributes:
        on: Whether anything follows it; otherwise nothing is measured.
    """

    def __init__(self, strategy: Strategy) -> None:
        self.on = any(
            isinstance(level.schedule, TimedSchedule) or isinstance(level.codec, ChoosingCodec)
            for level in strategy.levels
        )
        self._steps: deque[float] = deque(maxlen=_STEPS)
        self._stalls: dict[str, float] = {}
        self._left: float | None = None

    def enter(self) -> None:
        """Note that a local step is over."""
        if self.on and self._left is not None:
            self._steps.append(time.perf_counter() - self._left)

    def leave(self) -> None:
        """Note that a local step begins."""
        if self.on:
            self._left = time.perf_counter()

    def note_stall(self, level: int, fragment: int, stall_s: float) -> None:
        """Note for how long a round has held training up."""
        if self.on:
            self._stalls[f"{level}/{fragment}"] = stall_s

    def measured(self, level: int, fragment: int) -> tuple[float, float]:
        """Return a step's time and the stall of the last round; 0 where they are not known yet."""
        if not self.on or not self._steps:
            return 0.0, 0.0
        return statistics.median(self._steps), self._stalls.get(f"{level}/{fragment}", 0.0)

    def facts(self) -> dict[str, Any]:
        """Return everything, as JSON can hold it."""
        return {"steps": list(self._steps), "stalls": dict(self._stalls)}

    def set_facts(self, facts: Mapping[str, Any]) -> None:
        """Take what `facts` told; the time until the next step is not one's own."""
        self._steps = deque(facts.get("steps", ()), maxlen=_STEPS)
        self._stalls = dict(facts.get("stalls", {}))
        self._left = None

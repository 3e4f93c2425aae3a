"""How many local steps a worker takes in a period, when fast ones shall take more than slow ones."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from cadenza.engine.header import Header
from cadenza.strategy import Strategy

__all__ = ["Balance"]


class Balance:
    """How many local steps this worker takes in a period: as many as its speed allows, the mean being the period.

    Attributes:
        on: Whether workers take unequal numbers of steps at all.
        quota: How many steps this period has.
        steps: How many of them were taken.
        periods: How many periods have passed.
    """

    def __init__(self, strategy: Strategy) -> None:
        self.on = strategy.balanced
        self._period = strategy.period
        self.quota = self._period
        self.steps = 0
        self.periods = 0
        self._started = time.perf_counter()

    def tick(self, n: int, *, idle: bool = False) -> int | None:
        """Count a local step; return the step that schedules see, or None inside a period.

        An `idle` one is no step but a worker without data that comes to the next round.
        """
        self.steps += not idle
        if not self.on:
            return n
        if self.steps < self.quota and not idle:
            return None
        self.periods += 1
        return self.periods * self._period

    def speed(self) -> float:
        """Return the local steps a second since the last round."""
        return self.steps / max(1e-9, time.perf_counter() - self._started) if self.on else 0.0

    def learn(self, headers: Sequence[Header], position: int) -> None:
        """Set the quota from the speeds that all members know alike; who has run out of data does not count."""
        self.steps = 0
        self._started = time.perf_counter()
        speeds = [header.speed for header in headers if not header.exhausted]
        if self.on and sum(speeds) > 0 and not headers[position].exhausted:
            mean = sum(speeds) / len(speeds)
            self.quota = max(1, round(self._period * headers[position].speed / mean))

    def facts(self) -> dict[str, Any]:
        """Return everything, as JSON can hold it."""
        elapsed_s = time.perf_counter() - self._started
        return {"quota": self.quota, "steps": self.steps, "periods": self.periods, "elapsed_s": elapsed_s}

    def set_facts(self, facts: Mapping[str, Any]) -> None:
        """Take what `facts` told."""
        self.quota, self.steps, self.periods = facts["quota"], facts["steps"], facts["periods"]
        self._started = time.perf_counter() - facts["elapsed_s"]

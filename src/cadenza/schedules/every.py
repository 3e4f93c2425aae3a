"""A round after every so many local steps."""

from __future__ import annotations

from dataclasses import dataclass

from cadenza.common.checks import as_steps
from cadenza.schedules.base import State, first_turn, refuse_staggering_twice

__all__ = ["Every", "every"]


@dataclass(frozen=True)
class Every:
    """A round whenever `n % period == offset`; made by `every`.

    >>> every(500)
    Every(period=500, offset=0)
    """

    period: int
    offset: int = 0

    def start(self) -> State:
        return self.after_round(0, {}, None)

    def is_due(self, n: int, state: State) -> bool:
        return n >= 1 and n % self.period == self.offset

    def after_round(self, n: int, state: State, drift: float | None) -> State:
        return {"next": n + 1 + (self.offset - n - 1) % self.period}

    @property
    def shortest_gap(self) -> int:
        return self.period

    @property
    def cycle(self) -> tuple[int, int]:
        return self.period, self.offset

    @property
    def uses_drift(self) -> bool:
        return False

    def staggered(self, index: int, count: int) -> Every:
        refuse_staggering_twice(self.offset != 0)
        return Every(self.period, first_turn(index, count, self.period) % self.period)


def every(period: int) -> Every:
    """Return a schedule with a round after every `period` local steps.

    Staggered, fragment p of P is due when `n % period == (p + 1) * period // P % period`, as in Streaming DiLoCo.

    >>> every(100).start()
    {'next': 100}
    >>> [every(100).staggered(p, 3).start()["next"] for p in range(3)]
    [33, 66, 100]
    """
    return Every(as_steps("period", period))

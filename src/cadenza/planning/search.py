"""The smallest period that reaches a utilisation, what is nearest where none does, and calibration on what was seen."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from cadenza.errors import UsageError
from cadenza.planning.inputs import Cluster, Model, Work
from cadenza.planning.timeline import predict

if TYPE_CHECKING:
    from cadenza.strategy import Strategy

__all__ = ["LONGEST", "Calibration", "Seen", "calibrate", "smallest_period"]

LONGEST = 1 << 16  # steps: longer periods are nobody's plan
_SEEN_WITHIN = 0.02
_RIGHT_WITHIN = 2.0


def smallest_period(reaches: Callable[[int], bool], *, least: int = 1, most: int = LONGEST) -> int | None:
    """Return the smallest period for which `reaches` holds, as it does for all longer ones; None if for none.

    >>> smallest_period(lambda period: period >= 37)
    37
    """
    if not reaches(most):
        return None
    low, high = least, most
    while low < high:
        middle = (low + high) // 2
        if reaches(middle):
            high = middle
        else:
            low = middle + 1
    return low


@dataclass(frozen=True)
class Seen:
    """A utilisation that was measured, with the strategy that ran."""

    strategy: Strategy
    utilisation: float

    def __post_init__(self) -> None:
        if not 0 < self.utilisation <= 1:
            raise UsageError(
                f"A measured utilisation is a share above 0 and up to 1, such as 0.93; got {self.utilisation:g}."
            )


@dataclass(frozen=True)
class Calibration:
    """By what the time of rounds is multiplied, so that it fits what was seen.

    Attributes:
        factor: 1 is the model as it is; above it, rounds take longer than it says.
        worst: The largest error in a step's time that is left, as a share of it.
    """

    factor: float
    worst: float

    def apply(self, cluster: Cluster, work: Work) -> tuple[Cluster, Work]:
        """Return links and work that are as much slower."""
        link = replace(cluster.link, efficiency=cluster.link.efficiency / self.factor)
        uplink = cluster.uplink and replace(cluster.uplink, efficiency=cluster.uplink.efficiency / self.factor)
        return replace(cluster, link=link, uplink=uplink), replace(work, scale=work.scale * self.factor)


def calibrate(seen: Sequence[Seen], cluster: Cluster, model: Model, work: Work) -> Calibration:
    """Return the factor that fits what was seen best, and is no further from 1 than that asks for.

    A utilisation is taken to be right within 2 %, and the model within a factor of 2, both as standard deviations. So a
    run in which rounds hardly cost anything, and noise is all that is seen of them, does not tell how long they take.

    >>> import cadenza
    >>> from cadenza.planning import Cluster, Link, Model, Work
    >>> place = Cluster(8, Link(200e6), 0.8), Model(1_300_000_000), Work()
    >>> round(calibrate([Seen(cadenza.diloco(100), 0.1)], *place).factor, 1)
    1.8
    """

    def misfit(power: float) -> float:
        errors = _errors(math.exp(power), seen, cluster, model, work)
        return sum((error / _SEEN_WITHIN) ** 2 for error in errors) + (power / math.log(_RIGHT_WITHIN)) ** 2

    power = min((step / 10 for step in range(-30, 31)), key=misfit)
    for step in (0.02, 0.004, 0.0008):
        power = min((power + step * i for i in range(-5, 6)), key=misfit)
    factor = math.exp(power)
    return Calibration(factor, max(abs(error) for error in _errors(factor, seen, cluster, model, work)))


def _errors(factor: float, seen: Sequence[Seen], cluster: Cluster, model: Model, work: Work) -> list[float]:
    """Return how far predictions are from what was seen, as shares of it, if rounds take so many times as long."""
    place, scaled = Calibration(factor, 0.0).apply(cluster, work)
    return [predict(one.strategy, place, model, scaled).utilisation / one.utilisation - 1 for one in seen]

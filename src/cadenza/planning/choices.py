"""Strategies side by side, each at the shortest period that is enough, and which of them to begin with."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from cadenza.planning.inputs import Cluster, Model, Work
from cadenza.planning.laws import Loss, loss_of
from cadenza.planning.memory import Memory, memory_of
from cadenza.planning.search import LONGEST, smallest_period
from cadenza.planning.timeline import Outcome, predict

if TYPE_CHECKING:
    from cadenza.strategy import Strategy

__all__ = ["Candidate", "Recommendation", "Row", "plan_row", "recommend", "shortest_row"]

# What a choice is thought to cost in the loss, in doublings of the period; no paper has measured them side by side.
_CODEC_COST = {"fp32": 0.0, "bf16": 0.25, "fp16": 0.25, "int8": 0.5, "e3m0": 1.0, "topk": 2.0}
_LATE_COST = 0.5
_NEARLY = 0.995  # of the utilisation that the longest period gives, where no period reaches the target
_PLAIN_COST = 0.5  # a mean without an outer step: it wants shorter periods


@dataclass(frozen=True)
class Candidate:
    """A strategy at any period.

    Attributes:
        name: The preset's.
        codec: The codec's name in a configuration.
        delay: Steps from launch to landing.
        make: Builds it at a period, and raises ValueError where it cannot be.
        least: The shortest period that it has.
        most: The longest.
    """

    name: str
    codec: str
    delay: int
    make: Callable[[int], Strategy]
    least: int = 1
    most: int = LONGEST


@dataclass(frozen=True)
class Row:
    """A candidate at one period, with all that follows."""

    name: str
    codec: str
    delay: int
    period: int
    outcome: Outcome
    memory: Memory
    loss: Loss
    reaches: bool
    fits: bool

    @property
    def cost(self) -> float:
        """What the loss is thought to suffer, in doublings of the period from 1."""
        codec = _CODEC_COST.get(self.codec.partition("+")[0], 1.0)
        late = _LATE_COST if self.delay else 0.0
        plain = _PLAIN_COST if self.loss.percent is None else 0.0
        return math.log2(self.period) + codec + late + plain

    def plain(self) -> dict[str, Any]:
        """Return it as JSON can hold it."""
        return {
            "strategy": self.name,
            "codec": self.codec,
            "delay": self.delay,
            "period": self.period,
            "utilisation": self.outcome.utilisation,
            "step_s": self.outcome.step_s,
            "stall_s": self.outcome.stall_s,
            "round_s": self.outcome.round_s,
            "bytes_a_step": self.outcome.sent,
            "memory": {**asdict(self.memory), "device": self.memory.device, "host": self.memory.host},
            "loss": asdict(self.loss),
            "reaches_target": self.reaches,
            "fits_memory": self.fits,
        }


@dataclass(frozen=True)
class Recommendation:
    """The row to begin with, and why; `possible` says whether it is what was asked for or only the nearest to it."""

    row: Row
    possible: bool
    why: str


@dataclass(frozen=True)
class Place:
    """Where all candidates are tried."""

    cluster: Cluster
    model: Model
    work: Work
    target: float
    memory: int | None = None


def plan_row(candidate: Candidate, period: int, place: Place) -> Row:
    """Return what a candidate costs at a period."""
    strategy = candidate.make(period)
    outcome = predict(strategy, place.cluster, place.model, place.work)
    memory = memory_of(strategy, place.cluster, place.model)
    outer = candidate.name == "ddp" or any(not level.outer.plain for level in strategy.levels)
    loss = loss_of(place.model.parameters, place.cluster.workers, period, outer=outer)
    fits = place.memory is None or memory.device <= place.memory
    reaches = outcome.utilisation >= place.target
    return Row(candidate.name, candidate.codec, candidate.delay, period, outcome, memory, loss, reaches, fits)


def shortest_row(candidate: Candidate, place: Place) -> Row:
    """Return a candidate at the shortest period that reaches the target, or nearly the most that any does."""

    def used(period: int) -> float:
        return predict(candidate.make(period), place.cluster, place.model, place.work).utilisation

    if candidate.least >= candidate.most:
        return plan_row(candidate, candidate.most, place)
    most = used(candidate.most)
    target = place.target if most >= place.target else _NEARLY * most
    found = smallest_period(lambda period: used(period) >= target, least=candidate.least, most=candidate.most)
    return plan_row(candidate, found or candidate.most, place)


def recommend(rows: Sequence[Row], place: Place) -> Recommendation:
    """Return the row that is thought to cost least of the loss among those that reach the target and fit.

    Where none does, the nearest: the highest utilisation of those that fit, or the least memory if none fits.
    """
    fitting = [row for row in rows if row.fits]
    good = [row for row in fitting if row.reaches]
    if good:
        best = min(good, key=lambda row: (row.cost, -row.outcome.utilisation))
        return Recommendation(best, True, _why(best, place))
    if fitting:
        most = max(row.outcome.utilisation for row in fitting)
        best = min((row for row in fitting if row.outcome.utilisation >= _NEARLY * most), key=lambda row: row.cost)
        return Recommendation(
            best,
            False,
            f"No strategy reaches {place.target:.1%} at any period up to {LONGEST:,} steps: waits and faults cost more "
            f"than rounds do. The nearest is {best.outcome.utilisation:.1%}; ask for that, or mend what workers wait "
            "for.",
        )
    best = min(rows, key=lambda row: row.memory.device)
    assert place.memory is not None
    return Recommendation(
        best,
        False,
        f"Nothing fits {place.memory / 1e9:.3g} GB: the least is {best.memory.device / 1e9:.3g} GB, of which the model "
        f"with gradients and optimizer takes {best.memory.model / 1e9:.3g} GB. offload=True keeps the rest on the "
        "host; shard the model (FSDP2) or give a larger device.",
    )


def _why(row: Row, place: Place) -> str:
    if row.name == "ddp":
        return f"Averaging gradients in every step reaches {row.outcome.utilisation:.1%}: no need to talk less."
    parts = [f"{row.period} is the shortest period with which it reaches {place.target:.1%} here"]
    if row.codec not in ("fp32", "", "preset"):
        parts.append(f"{row.codec} makes rounds short enough for that")
    if row.delay:
        parts.append(f"its rounds travel while {row.delay} steps are taken")
    return "; ".join(parts) + "."

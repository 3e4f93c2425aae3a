"""What a strategy keeps in memory, on the device and on the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cadenza.common.messages import LANE_BYTES, LANES
from cadenza.planning.inputs import Cluster, Model
from cadenza.planning.rounds import fragment_sizes, group_size

if TYPE_CHECKING:
    from cadenza.strategy import Strategy

__all__ = ["Memory", "memory_of"]

_SCRATCH = 32 << 20  # what is encoded and decoded beside the lanes


@dataclass(frozen=True)
class Memory:
    """Bytes by what they are for; `extra` is what the strategy needs beyond training alone.

    Attributes:
        model: Parameters, gradients and the inner optimizer's state.
        anchors: Where differences are taken from, one a level that has one.
        outer: What outer updates remember.
        residuals: What codecs have lost and will send.
        in_flight: Copies of the values while a round is on its way.
        buckets: The lanes between members, and scratch for codecs.
        offloaded: Whether all but the model is in the host's memory.
    """

    model: int
    anchors: int
    outer: int
    residuals: int
    in_flight: int
    buckets: int
    offloaded: bool

    @property
    def extra(self) -> int:
        """What is there beside the model."""
        return self.anchors + self.outer + self.residuals + self.in_flight + self.buckets

    @property
    def device(self) -> int:
        """What the device must hold."""
        return self.model + (0 if self.offloaded else self.extra)

    @property
    def host(self) -> int:
        """What the host must hold besides."""
        return self.extra if self.offloaded else 0


def memory_of(strategy: Strategy, cluster: Cluster, model: Model) -> Memory:
    """Return what a worker keeps under a strategy.

    >>> import cadenza
    >>> from cadenza.planning import Cluster, Link, Model
    >>> kept = memory_of(cadenza.diloco(500), Cluster(4, Link(1e9), 0.1), Model(100_000_000))
    >>> kept.anchors, kept.outer, kept.in_flight
    (400000000, 400000000, 400000000)
    """
    whole = 4 * model.parameters
    training = round(model.parameters * (2 * model.value_bytes + 4 * model.optimizer_values))
    buckets = LANES * LANE_BYTES + _SCRATCH
    if strategy.warmup_steps >= 2**60:  # DDP's own buckets
        return Memory(training, 0, 0, 0, 0, model.value_bytes * model.parameters, False)
    anchors = outer = residuals = in_flight = 0
    largest = 4 * max(fragment_sizes(strategy, model))
    for level, plan in enumerate(strategy.levels):
        if not plan.anchored:
            continue
        anchors += whole
        outer += whole * _outer_values(strategy, level)
        if plan.codec.feedback is not None:
            members = group_size(plan, cluster)
            residuals += whole + (0 if plan.codec.sparse else whole // members)
    delayed = any(strategy.delay_of(level) for level in range(len(strategy.levels)))
    if delayed:
        in_flight = 2 * largest * _in_flight(strategy, model)
    elif anchors:
        in_flight = largest
    return Memory(training, anchors, outer, residuals, in_flight, buckets, strategy.offload)


def _outer_values(strategy: Strategy, level: int) -> int:
    """Return how many values an outer update keeps for each parameter: 1 with momentum, 0 of a mean."""
    outer = strategy.levels[level].outer
    if outer.plain:
        return 0
    return 0 if getattr(outer, "momentum", 1.0) == 0 and not outer.needs_inner_lr else 1


def _in_flight(strategy: Strategy, model: Model) -> int:
    """Return how many fragments are on their way at a time, at most."""
    count = len(fragment_sizes(strategy, model))
    gap = max(1, strategy.period // count)
    longest = max(strategy.delay_of(level) for level in range(len(strategy.levels)))
    return min(count, -(-longest // gap))

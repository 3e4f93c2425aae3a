"""How long a round takes: on the wire, at work, and how much of both training waits for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cadenza.planning.inputs import Cluster, Model, Work
from cadenza.planning.sizes import Traffic, exchange_traffic, staged_traffic

if TYPE_CHECKING:
    from cadenza.strategy import LevelPlan, Strategy

__all__ = ["Costs", "costs_of", "fragment_sizes", "group_size", "overlapped"]

_MESSAGES = 8  # of a round, by which wire and work overlap


@dataclass(frozen=True)
class Costs:
    """What a round of one fragment at one level costs.

    Attributes:
        sent: Bytes that a worker sends.
        wire_s: Until the last byte is there, if nothing else were to be done.
        launch_s: Work in the training loop before values travel.
        work_s: Work beside the wire: differences, encoding, decoding, the outer step.
        land_s: Work in the training loop to take the result.
        contention: How much of `work_s` training pays for, if it goes on meanwhile.
    """

    sent: int
    wire_s: float
    launch_s: float
    work_s: float
    land_s: float
    contention: float

    @property
    def whole_s(self) -> float:
        """From the launch to the landing, if training waits."""
        return self.launch_s + self.away_s + self.land_s

    @property
    def away_s(self) -> float:
        """From the end of the launch until the result is there."""
        return overlapped(self.wire_s, self.work_s)


def overlapped(wire_s: float, work_s: float) -> float:
    """Return how long wire and work take together: messages follow each other, so most of the shorter is hidden.

    >>> overlapped(0.5, 0.25)
    0.53125
    """
    return max(wire_s, work_s) + min(wire_s, work_s) / _MESSAGES


def fragment_sizes(strategy: Strategy, model: Model) -> list[int]:
    """Return how many values each fragment has, cut by the strategy's own rule from layers of equal size.

    >>> import cadenza
    >>> fragment_sizes(cadenza.streaming_diloco(layers=3), Model(1200, layers=6))
    [600, 600]
    """
    layers = model.layer_count
    each, more = divmod(model.parameters, layers)
    sizes = {f"layers.{i}.weight": each + (i < more) for i in range(layers)}
    fragments = strategy.fragments.split(list(sizes.items()))
    return [sum(sizes[name] for name in fragment) for fragment in fragments]


def group_size(plan: LevelPlan, cluster: Cluster) -> int:
    """Return how many workers meet in a round of a level."""
    if isinstance(plan.groups, int):
        return min(plan.groups, cluster.workers)
    if isinstance(plan.groups, tuple):
        return max(len(group) for group in plan.groups)
    if plan.groups in ("host", "site"):
        return min(cluster.host_workers, cluster.workers)
    return cluster.workers if plan.groups == "all" else min(2, cluster.workers)  # pairs


def costs_of(strategy: Strategy, level: int, numel: int, cluster: Cluster, model: Model, work: Work) -> Costs:
    """Return what a round of `numel` values at a level costs."""
    plan = strategy.levels[level]
    members = group_size(plan, cluster)
    itemsize = 4 if plan.anchored else model.value_bytes
    inside = group_size(strategy.levels[level - 1], cluster) if level else 1
    parts: tuple[Traffic, ...]
    if 1 < inside < members and members % inside == 0:
        parts = staged_traffic(numel, inside, members // inside, plan.codec, cluster, itemsize=itemsize)
    else:
        parts = (exchange_traffic(numel, members, plan.codec, cluster, itemsize=itemsize),)
    wire_s = sum(_transfer_s(part, cluster) for part in parts)
    traffic = sum(parts, Traffic(0))
    codec_s = work.scale * work.of(plan.codec.name)
    # Own values are encoded, those of a share decoded from all and encoded once, and the mean decoded. Of sparse ones,
    # a member's own are encoded and decoded, and of each other's there are few to decode.
    coded = (2 + members / 10 if plan.codec.sparse else 3 + 1 / members) * codec_s if members > 1 else 0.0
    outer = work.scale * (work.outer_s if plan.anchored else 0.0)
    return Costs(
        traffic.sent,
        wire_s,
        work.scale * work.pack_s * numel,
        (coded + outer) * numel,
        work.scale * work.land_s * numel,
        work.contention,
    )


def _transfer_s(traffic: Traffic, cluster: Cluster) -> float:
    """Return how long it takes over whichever link is the slowest, with the turns that messages take."""
    latency = traffic.turns * cluster.link.latency_s
    shared = 0.0
    if cluster.uplink is not None:
        shared = cluster.uplink.transfer_s(traffic.uplink)
        latency += traffic.slow_turns * cluster.uplink.latency_s
    return max(cluster.link.transfer_s(traffic.sent), shared) + latency

"""A run's time, round by round: the strategy's own schedules, played on a clock that costs advance.

The order is the engine's: a step, then what is due lands, then what is due is launched. Rounds that land late travel
one after the other on one background thread, as the engine's do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cadenza.planning.fragment_rounds import FAR, FragmentRounds, rounds_of
from cadenza.planning.inputs import Cluster, Model, Work
from cadenza.planning.rounds import group_size
from cadenza.planning.sizes import exchange_traffic
from cadenza.planning.waiting import fault_share, waiting_s

if TYPE_CHECKING:
    from cadenza.strategy import Strategy

__all__ = ["GRADIENT_BUCKET", "HIDDEN", "Outcome", "gradient_stall_s", "predict"]

GRADIENT_BUCKET = 25 << 20  # bytes, DDP's own
HIDDEN = 2 / 3  # the share of a step, backward, behind which DDP hides what it sends
_CYCLES = 2  # that pass before it is measured, and that are measured


@dataclass(frozen=True)
class Outcome:
    """What comes of a strategy.

    Attributes:
        utilisation: The share of the time in which a usual worker computes, after waits and faults.
        step_s: What a step takes on average, everything included.
        stall_s: What of it is not compute.
        sent: Bytes that a worker sends in a step on average.
        round_s: The longest of its rounds, from launch to landing.
    """

    utilisation: float
    step_s: float
    stall_s: float
    sent: float
    round_s: float


def gradient_stall_s(whole_s: float, step_s: float, size: int) -> float:
    """Return how long a step waits for its gradients: what backward does not hide, and always the last bucket.

    >>> gradient_stall_s(1.0, 0.3, 100 << 20)
    0.8
    """
    buckets = max(1, -(-size // GRADIENT_BUCKET))
    return max(whole_s - HIDDEN * step_s, whole_s / buckets)


def predict(strategy: Strategy, cluster: Cluster, model: Model, work: Work | None = None) -> Outcome:
    """Return what a strategy makes of the time of these workers.

    >>> import cadenza
    >>> from cadenza.planning import Cluster, Link, Model
    >>> eight = Cluster(8, Link(200e6), 0.8)
    >>> predict(cadenza.diloco(500), eight, Model(1_300_000_000)).utilisation
    0.502...
    """
    work = work or Work()
    run = _Run(strategy, cluster, model, work)
    averages_always = strategy.average_gradients or strategy.warmup_steps >= FAR
    gradients = _gradients(cluster, model) if averages_always else (0.0, 0)
    if strategy.warmup_steps >= FAR:
        per_step_s, sent, round_s = run.pace_s + gradients[0], float(gradients[1]), gradients[0]
    else:
        per_step_s, sent, round_s = run.play()
        per_step_s, sent = per_step_s + gradients[0], sent + gradients[1]
    if averages_always:
        per_step_s += waiting_s(cluster, cluster.workers, 1)
    period = 1 if strategy.warmup_steps >= FAR else strategy.period
    left = fault_share(strategy.faults, cluster, period * per_step_s)
    whole_s = per_step_s / left
    return Outcome(cluster.step_s / whole_s, whole_s, whole_s - cluster.step_s, sent, round_s)


def _gradients(cluster: Cluster, model: Model) -> tuple[float, int]:
    """Return how long a step of DDP waits, and what it sends."""
    size = 4 * model.parameters if model.value_bytes == 4 else model.value_bytes * model.parameters
    traffic = exchange_traffic(size // 4, cluster.workers, _Exact(), cluster)  # type: ignore[arg-type]
    seconds = cluster.link.transfer_s(traffic.sent) + traffic.turns * cluster.link.latency_s
    if cluster.uplink is not None:
        slow = cluster.uplink.transfer_s(traffic.uplink) + traffic.slow_turns * cluster.uplink.latency_s
        seconds = max(seconds, slow)
    return gradient_stall_s(seconds, cluster.step_s, size) if cluster.workers > 1 else 0.0, traffic.sent


class _Exact:
    """As much of fp32 as counting bytes needs."""

    exact, sparse, shaped = True, False, False


class _Run:
    """The clock of a run, and what is in flight."""

    def __init__(self, strategy: Strategy, cluster: Cluster, model: Model, work: Work) -> None:
        self.strategy, self.cluster = strategy, cluster
        self.pace_s = cluster.step_s * cluster.slowest  # who is slower for good sets the pace of all
        self.fragments = rounds_of(strategy, cluster, model, work)
        self.step, self.now, self.sent = 0, 0.0, 0
        self._met = 0  # the step at which workers last waited for each other
        self._free = 0.0  # when the background thread is free
        self._pending: dict[int, tuple[int, float, float]] = {}  # fragment: land at, done at, work of landing

    def play(self) -> tuple[float, float, float]:
        """Return seconds and bytes a step in the long run, and the longest round."""
        gaps = [plan.schedule.shortest_gap for plan in self.strategy.levels]
        cycle = max((gap for gap in gaps if gap < FAR), default=1)
        cycle *= -(-max(self.strategy.delay_of(i) for i in range(len(gaps))) // cycle) or 1
        self._until(_CYCLES * cycle)
        now, sent = self.now, self.sent
        self._until(2 * _CYCLES * cycle)
        steps = _CYCLES * cycle
        longest = max(cost.whole_s for fragment in self.fragments for cost in fragment.costs)
        return (self.now - now) / steps, (self.sent - sent) / steps, longest

    def _until(self, last: int) -> None:
        while True:
            due = min(fragment.next for fragment in self.fragments)
            at = min([due, *(land_at for land_at, _, _ in self._pending.values())])
            if at > last:
                break
            self._advance(at)
            for number in [i for i, (land_at, _, _) in self._pending.items() if land_at <= at]:
                self._land(number)
            for number, fragment in enumerate(self.fragments):
                self._launch(number, fragment)
        self._advance(last)

    def _advance(self, step: int) -> None:
        self.now += (step - self.step) * self.pace_s
        self.step = step

    def _land(self, number: int) -> None:
        _, done, land_s = self._pending.pop(number)
        self.now = max(self.now, done) + land_s

    def _launch(self, number: int, fragment: FragmentRounds) -> None:
        n = self.step
        level = fragment.due(n)
        if level is None:
            return
        if number in self._pending:
            self._land(number)
        cost, delay = fragment.costs[level], self.strategy.delay_of(level)
        members = group_size(self.strategy.levels[level], self.cluster)
        wait = waiting_s(self.cluster, members, n - self._met)
        self._met = n
        self.sent += cost.sent
        if delay:
            self._free = max(self.now + cost.launch_s, self._free) + cost.away_s + wait
            self._pending[number] = n + delay, self._free, cost.land_s
            self.now += cost.launch_s + cost.contention * cost.work_s
        else:
            self.now = max(self.now, self._free) + cost.whole_s + wait
        fragment.count(n)

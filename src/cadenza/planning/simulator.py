"""Whole runs of thousands of workers, round by round: clocks that drift apart, wait for each other, fail and come back.

Plain Python: a round of 10,000 workers takes some milliseconds, since only their clocks are kept. Random numbers come
from one generator in one order, so a seed gives the same run on every machine.
"""

from __future__ import annotations

import heapq
import math
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cadenza.errors import UsageError
from cadenza.planning.fragment_rounds import FAR, FragmentRounds, rounds_of
from cadenza.planning.inputs import Cluster, Model, Work
from cadenza.planning.rounds import Costs, group_size
from cadenza.planning.waiting import pause_s

if TYPE_CHECKING:
    from cadenza.strategy import Strategy

__all__ = ["SimulatedRound", "Simulation", "simulate"]

_MANY = 9  # stragglers of a worker between two rounds, from which on their number is about normal


@dataclass(frozen=True)
class SimulatedRound:
    """One round, as the whole run saw it.

    Attributes:
        step: After which local step it was launched.
        level: Whose it was, and of which `fragment`.
        launched_s: When its last member came.
        landed_s: When its last member had the result.
        waits_s: How long each watched worker stood still for it.
        mean_wait_s: How long members stood still on average.
        sent: Bytes that a worker sent.
        failed: Whether it changed nothing.
        absent: Workers that were not there.
        slowest: The member that came last.
    """

    step: int
    level: int
    fragment: int
    launched_s: float
    landed_s: float
    waits_s: tuple[float, ...]
    mean_wait_s: float
    sent: int
    failed: bool
    absent: int
    slowest: int


@dataclass(frozen=True)
class Event:
    """Something out of the ordinary: a worker that failed, or came back."""

    step: int
    seconds: float
    worker: int
    text: str


@dataclass
class Simulation:
    """What came of a simulated run.

    Attributes:
        watched: The workers whose waits each round tells.
        seconds: When the last worker was done.
        steps: Local steps of a worker.
        computed_s: What all steps would have taken workers that are neither slow nor held up.
    """

    workers: int
    watched: tuple[int, ...]
    rounds: list[SimulatedRound] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    seconds: float = 0.0
    steps: int = 0
    computed_s: float = 0.0

    @property
    def utilisation(self) -> float:
        """The share of all workers' time that usual steps would have taken."""
        return self.computed_s / (self.workers * self.seconds) if self.seconds else 1.0


def simulate(
    strategy: Strategy, cluster: Cluster, model: Model, work: Work | None = None, *, rounds: int, seed: int = 1
) -> Simulation:
    """Return what becomes of a run of so many rounds; the same for the same seed.

    >>> import cadenza
    >>> from cadenza.planning import Cluster, Link, Model
    >>> place = Cluster(100, Link(1e9), 0.5, jitter=0.1), Model(10_000_000)
    >>> run = simulate(cadenza.diloco(20), *place, rounds=10)
    >>> len(run.rounds), run.steps, run == simulate(cadenza.diloco(20), *place, rounds=10)
    (10, 200, True)
    """
    if rounds < 1:
        raise UsageError(f"A simulation has at least one round; got {rounds}.")
    if strategy.warmup_steps >= FAR:
        raise UsageError("Averaged gradients have no rounds to simulate; choose a strategy that has, such as diloco.")
    return _Simulator(strategy, cluster, model, work or Work(), seed).run(rounds)


class _Simulator:
    def __init__(self, strategy: Strategy, cluster: Cluster, model: Model, work: Work, seed: int) -> None:
        self.strategy, self.cluster = strategy, cluster
        self.random = random.Random(seed)
        count = cluster.workers
        self.speeds = [cluster.step_s * self.random.uniform(1.0, cluster.slowest) for _ in range(count)]
        self.clocks = [0.0] * count
        self.back_at: dict[int, float] = {}  # absent workers, and when they are back
        self.saved_s = 0.0  # when the last checkpoint was made
        self.result = Simulation(count, tuple(sorted({i * count // 8 for i in range(8)})))
        self._step = 0
        self._pending: dict[int, tuple[int, float, Costs, SimulatedRound]] = {}
        self.fragments = rounds_of(strategy, cluster, model, work)
        self._failures: list[tuple[float, int]] = []
        if cluster.faults.mean_time_s:
            rate = 1 / cluster.faults.mean_time_s
            self._failures = [(self.random.expovariate(rate), worker) for worker in range(count)]
            heapq.heapify(self._failures)

    def run(self, rounds: int) -> Simulation:
        while len(self.result.rounds) + len(self._pending) < rounds:
            self._to(min(fragment.next for fragment in self.fragments))
            for number, fragment in enumerate(self.fragments):
                if len(self.result.rounds) + len(self._pending) < rounds:
                    self._launch(number, fragment)
        while self._pending:
            self._to(min(land_at for land_at, *_ in self._pending.values()))
        self.result.seconds, self.result.steps = max(self.clocks), self._step
        return self.result

    # ---- local steps -----------------------------------------------------------------------------------------------

    def _to(self, step: int) -> None:
        """Take local steps up to one, and land what is due on the way."""
        while self._pending and (at := min(land_at for land_at, *_ in self._pending.values())) <= step:
            self._steps(at - self._step)
            for number in [i for i, pending in self._pending.items() if pending[0] <= at]:
                self._land(number)
        self._steps(step - self._step)

    def _steps(self, steps: int) -> None:
        if steps <= 0:
            return
        self._step += steps
        cluster, gauss = self.cluster, self.random.gauss
        self.result.computed_s += steps * cluster.step_s * (cluster.workers - len(self.back_at))
        if cluster.jitter:
            noise = cluster.jitter * cluster.step_s * math.sqrt(steps)
            least = 0.1 * steps * cluster.step_s  # however lucky, steps take time
            both = zip(self.clocks, self.speeds, strict=True)
            self.clocks = [now + max(least, steps * speed + noise * gauss(0.0, 1.0)) for now, speed in both]
        else:
            self.clocks = [now + steps * speed for now, speed in zip(self.clocks, self.speeds, strict=True)]
        if cluster.straggle:
            self._straggle(steps)

    def _straggle(self, steps: int) -> None:
        """Hold some steps up: each worker's number of them drawn by itself where it is large, which is quicker."""
        cluster, gauss = self.cluster, self.random.gauss
        each = steps * cluster.straggle
        if each > _MANY:
            spread = math.sqrt(each * (1 - cluster.straggle))
            self.clocks = [now + cluster.straggle_s * max(0, round(gauss(each, spread))) for now in self.clocks]
            return
        for worker in self.random.choices(range(cluster.workers), k=self._stragglers(steps)):
            self.clocks[worker] += cluster.straggle_s

    def _stragglers(self, steps: int) -> int:
        """Return how many steps of all workers are held up: about normal around the mean, exact where that is small."""
        tries, share = steps * self.cluster.workers, self.cluster.straggle
        mean = tries * share
        if mean > 50:
            return max(0, round(self.random.gauss(mean, math.sqrt(mean * (1 - share)))))
        limit, product, count = math.exp(-mean), self.random.random(), 0
        while product > limit:
            count, product = count + 1, product * self.random.random()
        return count

    # ---- rounds ----------------------------------------------------------------------------------------------------

    def _launch(self, number: int, fragment: FragmentRounds) -> None:
        n = self._step
        level = fragment.due(n)
        if level is None:
            return
        if number in self._pending:
            self._land(number)
        failed = self._faults(max(self.clocks))
        cost, delay = fragment.costs[level], self.strategy.delay_of(level)
        size = group_size(self.strategy.levels[level], self.cluster)
        if failed:
            self._tell(number, level, cost, self.clocks, failed=True)
        elif delay:
            came = max(self._present())
            round_ = self._round(number, level, cost, came, (0.0,) * len(self.result.watched), 0.0)
            self.clocks = [now + cost.launch_s + cost.contention * cost.work_s for now in self.clocks]
            self._pending[number] = n + delay, came + cost.launch_s + cost.away_s, cost, round_
        else:
            self._meet(number, level, cost, size)
        fragment.count(n)

    def _present(self) -> list[float]:
        """Return the clocks of those who are there, or of all if nobody is."""
        if not self.back_at:
            return self.clocks
        return [now for worker, now in enumerate(self.clocks) if worker not in self.back_at] or self.clocks

    def _meet(self, number: int, level: int, cost: Costs, size: int) -> None:
        """Let the members of each group wait for their last, and go on together."""
        before, clocks = self.clocks, []
        if size >= len(before):
            clocks = [max(self._present()) + cost.whole_s] * len(before)
        else:
            for start in range(0, len(before), size):
                group = before[start : start + size]
                clocks += [max(group) + cost.whole_s] * len(group)
        self.clocks = clocks
        self._tell(number, level, cost, before)

    def _land(self, number: int) -> None:
        _, done, cost, round_ = self._pending.pop(number)
        before = self.clocks
        self.clocks = [max(now, done) + cost.land_s for now in before]
        waits = tuple(self.clocks[worker] - before[worker] for worker in self.result.watched)
        mean = (sum(self.clocks) - sum(before)) / len(before)
        told = {**round_.__dict__, "landed_s": max(self.clocks), "waits_s": waits, "mean_wait_s": mean}
        self.result.rounds.append(SimulatedRound(**told))

    def _tell(self, number: int, level: int, cost: Costs, before: list[float], *, failed: bool = False) -> None:
        waits = tuple(self.clocks[worker] - before[worker] for worker in self.result.watched)
        mean = (sum(self.clocks) - sum(before)) / len(before)
        self.result.rounds.append(self._round(number, level, cost, max(before), waits, mean, failed=failed))

    def _round(
        self,
        number: int,
        level: int,
        cost: Costs,
        came: float,
        waits: tuple[float, ...],
        mean: float,
        *,
        failed: bool = False,
    ) -> SimulatedRound:
        last = max(range(len(self.clocks)), key=self.clocks.__getitem__) if self.cluster.workers < 1000 else -1
        sent = 0 if failed else cost.sent
        absent = len(self.back_at)
        return SimulatedRound(
            self._step, level, number, came, max(self.clocks), waits, mean, sent, failed, absent, last
        )

    # ---- faults ----------------------------------------------------------------------------------------------------

    def _faults(self, now: float) -> bool:
        """Let workers fail and come back up to a time; return whether the round of this moment fails for it."""
        faults, policy = self.cluster.faults, self.strategy.faults
        if not faults.mean_time_s:
            return False
        for worker in [one for one, back in self.back_at.items() if back <= now]:
            self._note(now, worker, f"Worker {worker} is back")
            del self.back_at[worker]
        hit = False
        while self._failures and self._failures[0][0] <= now:
            at, worker = heapq.heappop(self._failures)
            heapq.heappush(self._failures, (at + self.random.expovariate(1 / faults.mean_time_s), worker))
            if worker in self.back_at:
                continue
            hit = True
            if policy.tolerant:
                self.back_at[worker] = max(at, now) + faults.restart_s
                self._note(at, worker, f"Worker {worker} failed; the others go on")
            else:
                self._restart(worker, now)
                now = max(self.clocks)
        if not policy.tolerant:
            if faults.checkpoint_s:
                self.saved_s += math.floor((now - self.saved_s) / faults.checkpoint_s) * faults.checkpoint_s
            return False
        if hit:
            pause = pause_s(policy)
            self.clocks = [clock + pause for clock in self.clocks]
        return policy.name == "skip_round" and bool(self.back_at)

    def _restart(self, worker: int, now: float) -> None:
        """Start all workers anew from the last checkpoint: what they did since then is done again."""
        faults = self.cluster.faults
        since = now - self.saved_s
        again = math.fmod(since, faults.checkpoint_s) if faults.checkpoint_s else 0.0
        lost = faults.restart_s + again
        self._note(now, worker, f"Worker {worker} failed; all start anew and do {again:.0f} s again")
        self.clocks = [clock + lost for clock in self.clocks]
        self.saved_s = now + lost

    def _note(self, seconds: float, worker: int, text: str) -> None:
        self.result.events.append(Event(self._step, seconds, worker, text))

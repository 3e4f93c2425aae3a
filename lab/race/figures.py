"""What follows from the runs: steps and seconds to a loss, stall, bytes, and what physics allows."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lab.race import plans
from lab.race.jobs import Job
from lab.race.plans import ENTRIES, Entry, Scale
from lab.race.runner import Link, Results, bits_a_second

__all__ = ["Finish", "Times", "crossing", "curves", "final_losses", "link_allows", "quickest", "target_of", "ways"]


def crossing(curve: Sequence[tuple[int, float]], loss: float) -> float | None:
    """Return after how many steps a curve first is at or below a loss, between two points by a straight line.

    >>> crossing([(10, 3.0), (20, 2.0)], 2.5)
    15.0
    """
    before: tuple[float, float] | None = None
    for step, value in curve:
        if value <= loss:
            if before is None or before[1] == value:
                return float(step)
            return before[0] + (step - before[0]) * (before[1] - loss) / (before[1] - value)
        before = (step, value)
    return None


class Times:
    """What a step takes and sends, by contender, link and period; medians over the repeats."""

    def __init__(self, runs: Sequence[dict[str, Any]], scale: Scale) -> None:
        self._runs, self._scale = [run for run in runs if "failed" not in run], scale

    def of(self, job: Job, link: str, what: str) -> float | None:
        """Return the median of a figure over a job's repeats, by step."""
        figures = self.all(job, link, what)
        return statistics.median(figures) if figures else None

    def all(self, job: Job, link: str, what: str) -> list[float]:
        return [run[what] / job.steps for run in self._same(job, link)]

    def _same(self, job: Job, link: str) -> list[dict[str, Any]]:
        key = Job.from_json(job.to_json())
        return [run for run in self._runs if run["link"] == link and Job(**plain(run["job"])) == key]

    def step(self, label: str, link: str, period: int | None = None) -> float | None:
        """Return what one step takes on average: compute alone, as all runs on the link saw it, and what is above."""
        alone, above = self.alone(link), self.above(label, link, period)
        return None if alone is None or above is None else alone + above

    def above(self, label: str, link: str, period: int | None = None) -> float | None:
        """Return what a step takes above compute alone, which every run measured beside its own steps."""
        return self._by_period(
            ENTRIES[label],
            period,
            lambda job: [run["elapsed_s"] / job.steps - run["floor_s"] for run in self._same(job, link)],
        )

    def sent(self, label: str, link: str, period: int | None = None) -> float | None:
        """Return the bytes that a worker sends in a step on average."""
        return self._by_period(ENTRIES[label], period, lambda job: self.all(job, link, "bytes_sent"))

    def _by_period(self, entry: Entry, period: int | None, figures: Callable[[Job], list[float]]) -> float | None:
        """Return the median of a step's figures; where a period was not timed, from the one that was."""
        period = period or entry.timed_period
        for timed in [period] if entry.each_period else [period, entry.timed_period]:
            if found := figures(plans.timed(entry, self._scale, timed)):
                return statistics.median(found) * timed / period
        return None

    def sync(self, label: str, millions: float, link: str) -> float | None:
        """Return what one synchronisation of a model of matrices takes."""
        own = self.of(plans.one_sync(label, millions), link, "elapsed_s")
        alone = self.of(plans.one_sync("compute alone", millions), link, "elapsed_s")
        return None if own is None or alone is None else own - alone

    def extra_models(self, label: str, millions: float) -> float | None:
        """Return the peak of the resident set above compute alone's, in copies of a model of matrices."""
        job, alone = plans.one_sync(label, millions), plans.one_sync("compute alone", millions)
        own, other = (self.of(one, plans.SYNC_LINK, "peak_bytes") for one in (job, alone))
        return None if own is None or other is None else (own - other) * job.steps / (millions * 4e6)

    def alone(self, link: str) -> float | None:
        """Return what a step of compute alone takes, by all blocks of it on a link."""
        found = [run["floor_s"] for run in self._runs if run["link"] == link and run.get("floor_s")]
        return statistics.median(found) if found else None


def plain(job: dict[str, Any]) -> dict[str, Any]:
    return {**job, "size": plans.Size(**job["size"])}


def curves(results: Results, scale: Scale, label: str) -> list[tuple[Job, list[tuple[int, float]]]]:
    """Return every training run of a contender: its job and its curve."""
    source = ENTRIES[plans.SAME_CURVE.get(label, label)]
    found = []
    for job, link in plans.training(scale, [source.label]):
        run = results.find(job, link)
        if run is not None and "failed" not in run:
            found.append((job, [(step, loss) for step, loss in run["curve"]]))
    return found


def final_losses(results: Results, scale: Scale) -> dict[str, list[float]]:
    """Return the last loss of every strategy and codec, for each seed that has run."""
    return {
        label: [
            run["curve"][-1][1]
            for job, link in plans.losses(scale, [label])
            if (run := results.find(job, link)) is not None and run.get("curve")
        ]
        for label in plans.LOSSES
    }


def target_of(results: Results, scale: Scale) -> float:
    """Return the lowest loss, in hundredths, that every contender reaches at its best settings."""
    ends = [
        min(min(loss for _, loss in curve) for _, curve in found)
        for label in ENTRIES
        if label != "hivemind" and (found := curves(results, scale, label))
    ]
    return -(-max(ends) * 100 // 1) / 100


@dataclass(frozen=True)
class Finish:
    """How a contender came to the target on a link, at the settings that were quickest there."""

    label: str
    link: str
    job: Job
    steps: float
    seconds: float
    alone_s: float  # as many steps of compute alone
    megabytes: float  # what a worker sent

    @property
    def overhead_s(self) -> float:
        return self.seconds - self.alone_s


def finish(label: str, link: str, job: Job, steps: float, times: Times) -> Finish | None:
    """Return how long so many steps take on a link; None if it was not timed."""
    first = min(steps, job.settings.get("gradient_steps", 0))
    own, own_bytes = times.step(label, link, job.period), times.sent(label, link, job.period)
    alone, ddp, ddp_bytes = times.alone(link), times.step("DDP", link), times.sent("DDP", link)
    if own is None or own_bytes is None or alone is None or (first and (ddp is None or ddp_bytes is None)):
        return None
    seconds = (steps - first) * own + (first * ddp if first and ddp else 0.0)
    sent = (steps - first) * own_bytes + (first * ddp_bytes if first and ddp_bytes else 0.0)
    return Finish(label, link, job, steps, seconds, steps * alone, sent / 1e6)


def ways(training: Results, times: Times, scale: Scale, target: float, link: str) -> list[Finish]:
    """Return every contender's ways to the target on a link: one for each of its settings that comes there."""
    return [
        way
        for label in ENTRIES
        for job, curve in curves(training, scale, label)
        if (steps := crossing(curve, target)) is not None
        and (way := finish(label, link, job, steps, times)) is not None
    ]


def quickest(found: Sequence[Finish]) -> list[Finish]:
    """Return every contender's quickest way."""
    best: dict[str, Finish] = {}
    for way in sorted(found, key=lambda way: way.seconds):
        best.setdefault(way.label, way)
    return list(best.values())


def least_megabytes(entry: Entry, parameters: int, workers: int, period: int) -> float:
    """Return what a worker must send in a step on average: a mean needs 2(N − 1)/N of every value, once a period."""
    return 2 * (workers - 1) / workers * parameters * entry.bits / 8 / period / 1e6


def link_allows(millions: float, link: str) -> float:
    """Return the seconds that a link needs for one mean in fp32."""
    sent = least_megabytes(ENTRIES["DDP"], round(millions * 1e6), Link(link).hosts, 1) * 1e6
    return sent * 8 / (bits_a_second(link) or 1)

"""What the runs say: final losses with their spread, excess over the baseline, what a change was worth."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from lab.quality.records import Records
from lab.quality.studies import SEEDS, TUNING_SEED, Study, Variant, find
from lab.quality.training import Setting

__all__ = [
    "BARS",
    "PUBLISHED",
    "Bar",
    "CodecBar",
    "Final",
    "NearerBar",
    "baseline_of",
    "change_of",
    "excess",
    "final_of",
    "trail",
]

# Loss against data parallel, each side tuned, period 30, by workers (arXiv 2503.09799, table 4), in percent.
PUBLISHED = {
    "35 M": {1: -0.1, 2: 0.7, 4: 2.0, 8: 3.9},
    "335 M": {1: -0.3, 2: 0.1, 4: 0.9, 8: 2.0},
    "2.4 B": {1: -0.4, 2: -0.1, 4: 0.3, 8: 1.1},
}


@dataclass(frozen=True)
class Final:
    """The runs of a tuned setting with the final seeds, on the text that tuning has not seen."""

    setting: Setting
    runs: Sequence[dict[str, Any]]  # in the order of the entry's seeds

    @property
    def losses(self) -> list[float]:
        return [run["test"] for run in self.runs]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.losses)

    @property
    def spread(self) -> float:
        """The standard deviation over seeds."""
        return statistics.stdev(self.losses)

    @property
    def bytes_sent(self) -> int:
        return int(self.runs[0]["bytes_sent"])


def final_of(entry: Study | Variant, records: Records) -> Final | None:
    """Return the final runs, if there are any and all are done."""
    tuned, seeds = entry.tuned(records), [seed for seed in entry.seeds if seed in SEEDS]
    if tuned is None or not seeds:
        return None
    runs = [records.get(replace(tuned, seed=seed)) for seed in seeds]
    done = [run for run in runs if run is not None]
    return Final(tuned, done) if len(done) == len(seeds) else None


def excess(ours: Final, theirs: Final) -> tuple[float, float]:
    """Return how much higher a loss is, in percent, and the standard error of that over seeds.

    >>> setting = Setting({"name": "ddp"}, workers=1, batch=8, lr=1e-3, seed=1)
    >>> more, less = (Final(setting, [{"test": loss + d} for d in (0.0, 0.1, 0.2)]) for loss in (1.1, 1.0))
    >>> [round(number, 2) for number in excess(more, less)]
    [9.14, 0.48]
    """
    ratios = [100 * (a / b - 1) for a, b in zip(ours.losses, theirs.losses, strict=True)]
    return statistics.fmean(ratios), statistics.stdev(ratios) / len(ratios) ** 0.5


def baseline_of(entry: Study | Variant) -> Study:
    """Return DDP on the same model with the same inner optimizer."""
    if isinstance(entry, Variant):
        return baseline_of(find(entry.of))
    name = "ddp" if entry.fixed.inner == "adamw" else f"ddp {entry.fixed.inner}"
    task, _, _ = entry.name.partition(", ")
    name = f"{task}, ddp" if task.startswith("default task") else name
    found = find(name if entry.fixed.size == "170k" else f"{name} {entry.fixed.size}")
    assert isinstance(found, Study)
    return found


def change_of(variant: Variant, records: Records) -> list[float]:
    """Return what a change was worth with each seed that is done, in percent of the unchanged run's loss.

    The final seeds are judged on the text for the final figures, the tuning seed on that for tuning.
    """
    tuned, unchanged = variant.tuned(records), find(variant.of).tuned(records)
    if tuned is None or unchanged is None:
        return []
    found = []
    for seed in variant.seeds:
        runs = records.get(replace(tuned, seed=seed)), records.get(replace(unchanged, seed=seed))
        text = "validation" if seed == TUNING_SEED else "test"
        if runs[0] is not None and runs[1] is not None:
            found.append(100 * (runs[0][text] / runs[1][text] - 1))
    return found


def trail(study: Study, records: Records) -> list[tuple[Setting, dict[str, Any]]]:
    """Return the runs of a study's tuning, the best first."""
    same = study.setting(study.start)
    found = []
    for run in records.runs.values():
        setting = Setting.from_key(run["key"])
        if setting.seed != TUNING_SEED:
            continue
        point = {name: _value(setting, name) for name in study.axes}
        if None not in point.values() and study.setting({**study.start, **point}) == setting:
            found.append((setting, run))
    assert all(setting.workers == same.workers for setting, _ in found)
    return sorted(found, key=lambda pair: pair[1]["validation"])


def _value(setting: Setting, name: str) -> Any:
    return getattr(setting, name) if name in ("lr", "batch") else setting.strategy.get(name)


@dataclass(frozen=True)
class Bar:
    """A bound that the project has set itself: the excess of an entry over its baseline, in percent."""

    name: str
    entry: str
    most: float

    @property
    def bound(self) -> str:
        return f"{self.most:+.1f} % against DDP"

    def verdict(self, records: Records) -> str:
        found = _excess_of(self.entry, records)
        return _first_look(self.entry, records) if found is None else _told(found, found[0] <= self.most)


@dataclass(frozen=True)
class CodecBar:
    """How much a codec may cost, in percent of what its method ends with in fp32, beyond the spread of seeds."""

    name: str
    entry: str
    most: float

    @property
    def bound(self) -> str:
        return f"{self.most:+.1f} % against fp32"

    def verdict(self, records: Records) -> str:
        variant = find(self.entry)
        assert isinstance(variant, Variant)
        found = change_of(variant, records)
        if len(found) < len(SEEDS):
            return "not measured yet"
        mean, error = statistics.fmean(found), statistics.stdev(found) / len(found) ** 0.5
        return _told((mean, error), mean - error <= self.most)


@dataclass(frozen=True)
class NearerBar:
    """One entry is to be nearer its own baseline than another one is its."""

    name: str
    entry: str
    other: str

    @property
    def bound(self) -> str:
        return f"nearer its DDP than {self.other}"

    def verdict(self, records: Records) -> str:
        ours, theirs = _excess_of(self.entry, records), _excess_of(self.other, records)
        if ours is None or theirs is None:
            return "not measured yet"
        return f"{_told(ours, ours[0] <= theirs[0])} ({theirs[0]:+.2f} %)"


def _excess_of(name: str, records: Records) -> tuple[float, float] | None:
    entry = find(name)
    ours, theirs = final_of(entry, records), final_of(baseline_of(entry), records)
    return None if ours is None or theirs is None else excess(ours, theirs)


def _first_look(name: str, records: Records) -> str:
    """Say what the tuning itself shows of a study whose final runs are missing."""
    study = find(name)
    assert isinstance(study, Study)
    best = []
    for one in (study, baseline_of(study)):
        point = one.found(records).best
        run = None if point is None else records.get(one.setting(point))
        if run is None:
            return "not measured yet"
        best.append((run["validation"], one.tuned(records) is not None))
    (ours, tuned), (theirs, tuned_too) = best
    goes_on = "" if tuned and tuned_too else ", and not all neighbours of the best settings tried"
    return f"not decided; {100 * (ours / theirs - 1):+.2f} % with the tuning's one seed, on its text{goes_on}"


def _told(found: tuple[float, float], held: bool) -> str:
    return f"{found[0]:+.2f} % ± {found[1]:.2f}: {'held' if held else 'missed'}"


BARS = (
    Bar("one replica with an outer step", "diloco 1 workers period 30", 0.0),
    Bar("two workers", "diloco 2 workers period 30", 1.5),
    Bar("four workers", "diloco 4 workers period 30", 4.0),
    Bar("four workers, 3.3 M parameters", "diloco 4 workers period 30 3.3M", 2.8),
    NearerBar("Muon inside, four workers", "muloco 4 workers period 30", "diloco 4 workers period 30"),
    CodecBar("int8 with feedback", "int8 with feedback", 0.5),
    CodecBar("4 bits with feedback", "4 bits with feedback", 0.5),
    NearerBar("Muon inside, 35 k parameters", "muloco 4 workers period 30 35k", "diloco 4 workers period 30 35k"),
    CodecBar("int8 with feedback, 35 k parameters", "int8 with feedback 35k", 0.5),
    CodecBar("4 bits with feedback, 35 k parameters", "4 bits with feedback 35k", 0.5),
)

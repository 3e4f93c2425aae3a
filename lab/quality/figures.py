"""What the runs say: final losses with their spread, excess over the baseline, what a change was worth."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from lab.quality.records import Records
from lab.quality.studies import SEEDS, TUNING_SEED, Study, Variant, find
from lab.quality.training import Setting

__all__ = ["BARS", "PUBLISHED", "Bar", "Final", "baseline_of", "change_of", "excess", "final_of", "trail"]

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
    runs: Sequence[dict[str, Any]]  # in the order of SEEDS

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
    """Return the final runs, if all are done."""
    tuned = entry.tuned(records)
    if tuned is None:
        return None
    runs = [records.get(replace(tuned, seed=seed)) for seed in SEEDS]
    done = [run for run in runs if run is not None]
    return Final(tuned, done) if len(done) == len(SEEDS) else None


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
    name = "default task, ddp" if entry.name.startswith("default task") else name
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

    def verdict(self, records: Records) -> str:
        entry = find(self.entry)
        ours, theirs = final_of(entry, records), final_of(baseline_of(entry), records)
        if ours is None or theirs is None:
            return "not measured yet"
        found, error = excess(ours, theirs)
        return f"{found:+.2f} % ± {error:.2f}: {'held' if found <= self.most else 'missed'}"


BARS = (
    Bar("one replica with an outer step", "diloco 1 workers period 30", 0.0),
    Bar("two workers", "diloco 2 workers period 30", 1.5),
    Bar("four workers", "diloco 4 workers period 30", 4.0),
)

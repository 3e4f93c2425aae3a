"""What the runs say: final losses with their spread, excess over the baseline, what a change was worth."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from lab.quality.model import new_model
from lab.quality.records import Records
from lab.quality.studies import SEEDS, TUNING_SEED, Study, Variant, find
from lab.quality.training import Setting

__all__ = [
    "PUBLISHED",
    "RING",
    "Final",
    "baseline_of",
    "bytes_sent",
    "change_of",
    "excess",
    "excesses",
    "final_of",
    "mean_and_error",
    "told",
    "trail",
]

RING = 4  # workers that DDP's traffic is told for: in the lab it is one worker with the batch of all

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
    def averages(self) -> list[float] | None:
        """The losses of the moving average of the workers' mean, where they are known."""
        found = [run["average_test"] for run in self.runs if "average_test" in run]
        return found if len(found) == len(self.runs) else None


def final_of(entry: Study | Variant, records: Records) -> Final | None:
    """Return the final runs, if there are any and all are done."""
    tuned, seeds = entry.tuned(records), [seed for seed in entry.seeds if seed in SEEDS]
    if tuned is None or not seeds:
        return None
    runs = [records.get(replace(tuned, seed=seed)) for seed in seeds]
    done = [run for run in runs if run is not None]
    return Final(tuned, done) if len(done) == len(seeds) else None


def mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
    """Return the mean over seeds and its standard error, which one seed does not have.

    >>> mean_and_error([1.0, 2.0, 3.0]), mean_and_error([1.0])
    ((2.0, 0.5773502691896258), (1.0, None))
    """
    return statistics.fmean(values), statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None


def told(values: Sequence[float]) -> str:
    """Return what seeds say, in words for a table.

    >>> told([1.0, 2.0, 3.0]), told([1.0])
    ('+2.00 % ± 0.58', '+1.00 %')
    """
    mean, error = mean_and_error(values)
    return f"{mean:+.2f} %" + ("" if error is None else f" ± {error:.2f}")


def excesses(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Return how much higher each seed's loss is, in percent.

    >>> [round(number, 2) for number in excesses([1.1, 1.2], [1.0, 1.0])]
    [10.0, 20.0]
    """
    return [100 * (a / b - 1) for a, b in zip(ours, theirs, strict=True)]


def excess(ours: Final, theirs: Final) -> tuple[float, float]:
    """Return how much higher a loss is, in percent, and the standard error of that over seeds.

    >>> setting = Setting({"name": "ddp"}, workers=1, batch=8, lr=1e-3, seed=1)
    >>> more, less = (Final(setting, [{"test": loss + d} for d in (0.0, 0.1, 0.2)]) for loss in (1.1, 1.0))
    >>> [round(number, 2) for number in excess(more, less)]
    [9.14, 0.48]
    """
    mean, error = mean_and_error(excesses(ours.losses, theirs.losses))
    assert error is not None
    return mean, error


def bytes_sent(final: Final) -> int:
    """Return what a worker sends in the whole run; of DDP, what each of four would, by a ring, in fp32.

    >>> setting = Setting({"name": "ddp"}, workers=1, batch=8, lr=1e-3, seed=1, size="35k", tokens=10 * 8 * 64)
    >>> bytes_sent(Final(setting, [])) // 10  # a step: 1.5 times the bytes of 35,200 parameters
    211200
    """
    if final.setting.strategy["name"] != "ddp":
        return int(final.runs[0]["bytes_sent"])
    model = new_model(final.setting.shape, seed=0, qk_norm=final.setting.qk_norm)
    values = sum(p.numel() for p in model.parameters())
    return final.setting.steps * 2 * (RING - 1) * 4 * values // RING


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

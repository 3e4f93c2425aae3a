"""The pictures of learning quality, as SVG."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lab.quality.figures import PUBLISHED, baseline_of, excess, final_of, trail
from lab.quality.records import Records
from lab.quality.studies import QUEUE, Study

__all__ = ["draw"]

OURS, THEIRS, DDP = "#c2410c", "#475569", "#94a3b8"


def draw(records: Records, folder: Path) -> Iterator[Path]:
    """Draw every picture that there are figures for, and return their files."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.hashsalt": "cadenza", "font.size": 9, "svg.fonttype": "none"})
    for name, drawn in (
        ("quality_workers", by_workers),
        ("quality_batch", by_batch),
        ("quality_period", by_period),
        ("quality_bytes", by_bytes),
    ):
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(figsize=(5.2, 3.4))
        if drawn(axes, records):
            axes.grid(alpha=0.3)
            axes.legend(frameon=False)
            figure.tight_layout()
            figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
            yield folder / f"{name}.svg"
        pyplot.close(figure)


def by_workers(axes: Any, records: Records) -> bool:
    """Draw the excess over DDP by the number of workers, beside the published points."""
    for label, points in PUBLISHED.items():
        axes.plot(list(points), list(points.values()), "o--", color=THEIRS, alpha=0.6, label=f"{label}, published")
    found = []
    for study in _dilocos(period=30):
        ours, theirs = final_of(study, records), final_of(baseline_of(study), records)
        if ours is not None and theirs is not None:
            found.append((study.fixed.workers, *excess(ours, theirs)))
    if not found:
        return False
    workers, excesses, errors = zip(*sorted(found), strict=True)
    axes.errorbar(workers, excesses, yerr=errors, fmt="o-", color=OURS, capsize=3, label="0.17 M, here")
    axes.axhline(0, color=DDP, lw=1)
    axes.set(xscale="log", xticks=(1, 2, 4, 8), xticklabels=("1", "2", "4", "8"), xlabel="workers")
    axes.set_ylabel("loss against DDP, %")
    return True


def by_batch(axes: Any, records: Records) -> bool:
    """Draw the best validation loss found with each batch of all workers together."""
    drawn = False
    for entry in QUEUE:
        if not isinstance(entry, Study) or entry.fixed.size != "170k" or entry.name.startswith("default task"):
            continue
        best: dict[int, float] = {}
        for setting, run in trail(entry, records):
            tokens = setting.workers * setting.batch * setting.context
            best[tokens] = min(best.get(tokens, run["validation"]), run["validation"])
        if len(best) > 1:
            axes.plot(sorted(best), [best[tokens] for tokens in sorted(best)], "o-", label=entry.name)
            drawn = True
    axes.set(xscale="log", xlabel="tokens in a step of all workers", ylabel="validation loss, nats")
    return drawn


def by_period(axes: Any, records: Records) -> bool:
    """Draw the excess over DDP by the period, of four workers."""
    found = []
    for study in _dilocos(workers=4):
        ours, theirs = final_of(study, records), final_of(baseline_of(study), records)
        if ours is not None and theirs is not None:
            found.append((study.fixed.strategy["period"], *excess(ours, theirs)))
    if len(found) < 2:
        return False
    periods, excesses, errors = zip(*sorted(found), strict=True)
    axes.errorbar(periods, excesses, yerr=errors, fmt="o-", color=OURS, capsize=3, label="DiLoCo, 4 workers")
    axes.set(xscale="log", xlabel="period, steps", ylabel="loss against DDP, %")
    return True


def by_bytes(axes: Any, records: Records) -> bool:
    """Draw the final loss of every method with four workers by what a worker has sent."""
    drawn = False
    for entry in QUEUE:
        final = final_of(entry, records)
        if final is None or final.setting.workers != 4 or final.setting.size != "170k":
            continue
        axes.errorbar(final.bytes_sent / 1e6, final.mean, yerr=final.spread, fmt="o", capsize=3, label=entry.name)
        drawn = True
    axes.set(xscale="log", xlabel="MB that a worker has sent", ylabel="loss, nats")
    return drawn


def _dilocos(**wanted: int) -> list[Study]:
    studies = [entry for entry in QUEUE if isinstance(entry, Study) and entry.fixed.strategy["name"] == "diloco"]
    studies = [s for s in studies if s.fixed.size == "170k" and not s.name.startswith("default task")]
    return [
        s for s in studies if all({**s.fixed.strategy, "workers": s.fixed.workers}[k] == v for k, v in wanted.items())
    ]

"""The pictures of learning quality, as SVG."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from lab.quality.figures import PUBLISHED, baseline_of, bytes_sent, excess, final_of, trail
from lab.quality.records import Records
from lab.quality.studies import QUEUE, Study, Variant, find

__all__ = ["draw"]

OURS, THEIRS, DDP = {"35k": "#ea9a5b", "170k": "#c2410c", "830k": "#7c2d12", "3.3M": "#431407"}, "#475569", "#94a3b8"
PARAMETERS = {"35k": 35_000, "170k": 170_000, "830k": 830_000, "3.3M": 3_300_000}
PUBLISHED_PARAMETERS = {"35 M": 35e6, "335 M": 335e6, "2.4 B": 2.4e9}


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
        ("quality_size", by_size),
    ):
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(figsize=(5.2, 3.4))
        if drawn(axes, records):
            axes.grid(alpha=0.3)
            _explain(axes)
            figure.savefig(folder / f"{name}.svg", metadata={"Date": None}, bbox_inches="tight")
            yield folder / f"{name}.svg"
        pyplot.close(figure)


def by_workers(axes: Any, records: Records) -> bool:
    """Draw the excess over DDP by the number of workers, beside the published points."""
    for label, points in PUBLISHED.items():
        axes.plot(list(points), list(points.values()), "o--", color=THEIRS, alpha=0.6, label=f"{label}, published")
    drawn = _lines(axes, records, lambda study: study.fixed.workers, period=30)
    axes.axhline(0, color=DDP, lw=1)
    _along(axes, "workers", (1, 2, 4, 8))
    axes.set_ylabel("loss against DDP, %")
    return drawn


def by_period(axes: Any, records: Records) -> bool:
    """Draw the excess over DDP by the period, of four workers."""
    drawn = _lines(axes, records, lambda study: study.fixed.strategy["period"], workers=4)
    _along(axes, "period, steps", (8, 30, 100))
    axes.set_ylabel("loss against DDP, %")
    return drawn


def by_size(axes: Any, records: Records) -> bool:
    """Draw the excess over DDP of four workers by the model's size, beside the published points."""
    sizes = [PUBLISHED_PARAMETERS[label] for label in PUBLISHED]
    axes.plot(sizes, [points[4] for points in PUBLISHED.values()], "o--", color=THEIRS, label="published")
    found = []
    for study in _dilocos(workers=4, period=30):
        ours, theirs = final_of(study, records), final_of(baseline_of(study), records)
        if ours is not None and theirs is not None:
            found.append((PARAMETERS[study.fixed.size], *excess(ours, theirs)))
    if len(found) < 2:
        return False
    parameters, excesses, errors = zip(*sorted(found), strict=True)
    axes.errorbar(parameters, excesses, yerr=errors, fmt="o-", color=OURS["170k"], capsize=3, label="here")
    axes.axhline(0, color=DDP, lw=1)
    axes.set(xscale="log", xlabel="parameters", ylabel="four workers against DDP, %")
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
    _along(axes, "tokens in a step of all workers", (128, 256, 512, 1024))
    axes.set_ylabel("validation loss, nats")
    return drawn


def by_bytes(axes: Any, records: Records) -> bool:
    """Draw the final loss of every method with four workers by what a worker has sent, on the smallest model.

    DDP stands where a ring of four workers would send its gradients.
    """
    finals = [
        (final, entry.name.removesuffix(" 35k").replace(" 4 workers period 30", "").replace(" 4 workers", ""))
        for entry in QUEUE
        if (final := final_of(entry, records)) is not None
        and (final.setting.workers == 4 or entry.name in ("ddp 35k", "ddp muon 35k"))
        and final.setting.size == "35k"
        and _is_method(entry)
    ]
    for number, (final, name) in enumerate(sorted(finals, key=lambda found: -found[0].mean)):  # as they lie
        look: dict[str, Any] = {"fmt": "os^DvPX"[number % 7], "color": f"C{number % 10}", "capsize": 3}
        if name.startswith("ddp"):
            look |= {"fmt": "*", "markersize": 11, "color": "black" if name == "ddp" else "dimgray"}
        axes.errorbar(bytes_sent(final) / 1e6, final.mean, yerr=final.spread, label=name, **look)
    baseline = final_of(find("ddp 35k"), records)
    if baseline is not None:
        axes.axhline(baseline.mean, color=DDP, lw=1)
    _along(axes, "MB that a worker has sent", (10, 20, 50, 100, 200, 500, 1000, 2000))
    axes.set_xlim(right=1.4 * axes.get_xlim()[1])
    axes.set_ylabel("loss, nats")
    return bool(finals)


def _explain(axes: Any) -> None:
    """Say what is what: inside the picture, or beside it where that is much."""
    beside = len(axes.get_legend_handles_labels()[0]) > 8
    where = {"loc": "upper left", "bbox_to_anchor": (1.01, 1.0)} if beside else {}
    axes.legend(frameon=False, fontsize=7, **where)


def _along(axes: Any, label: str, ticks: Sequence[int]) -> None:
    """Let the axis below be logarithmic, with whole numbers on it."""
    left, right = axes.get_xlim()
    axes.set_xscale("log")
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set(xlabel=label, xlim=(max(left, 0.6 * ticks[0]), right))


def _is_method(entry: Study | Variant) -> bool:
    return isinstance(entry, Study) or "codec" in entry.strategy


def _lines(axes: Any, records: Records, along: Callable[[Study], int], **wanted: int) -> bool:
    """Draw DiLoCo's excess over DDP along something, a line for each size of model; say whether there is any."""
    drawn = False
    for size, color in OURS.items():
        found = []
        for study in _dilocos(size=size, **wanted):
            ours, theirs = final_of(study, records), final_of(baseline_of(study), records)
            if ours is not None and theirs is not None:
                found.append((along(study), *excess(ours, theirs)))
        if len(found) > 1:
            places, excesses, errors = zip(*sorted(found), strict=True)
            axes.errorbar(places, excesses, yerr=errors, fmt="o-", color=color, capsize=3, label=f"{size}, here")
            drawn = True
    return drawn


def _dilocos(size: str | None = None, **wanted: int) -> list[Study]:
    studies = [entry for entry in QUEUE if isinstance(entry, Study) and entry.fixed.strategy["name"] == "diloco"]
    studies = [s for s in studies if size in (None, s.fixed.size) and not s.name.startswith("default task")]
    return [
        s for s in studies if all({**s.fixed.strategy, "workers": s.fixed.workers}[k] == v for k, v in wanted.items())
    ]

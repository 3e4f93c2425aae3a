"""The charts of the races, as SVG."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lab.race import plans
from lab.race.figures import Finish, Times, final_losses, link_allows, quickest, target_of, ways
from lab.race.plans import Scale
from lab.race.runner import Results, bits_a_second

__all__ = ["draw"]

OURS, THEIRS, DDP = "#c2410c", "#475569", "#94a3b8"


def draw(folder: Path, pictures: Path, scale: Scale) -> None:
    """Draw every chart whose results are there."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.hashsalt": "cadenza", "font.size": 9, "svg.fonttype": "none"})
    results = {race: Results(path) for race in plans.RACES if (path := folder / f"race_{race}.json").exists()}
    if {"training", "timing"} <= results.keys():
        titles = {link: link for link in scale.links}
        draw_finishes(results, "timing", titles, pictures / "race_to_loss.svg", scale)
    if {"training", "sites"} <= results.keys():
        titles = {link: f"{link.split()[-1]} between two sites" for link in plans.site_links(scale)}
        draw_finishes(results, "sites", titles, pictures / "race_sites.svg", scale)
    if "timing" in results:
        draw_utilisation(results, pictures / "race_utilisation.svg", scale)
    if "syncs" in results:
        draw_syncs(results["syncs"], pictures / "race_syncs.svg", scale)
        draw_memory(results["syncs"], pictures / "race_memory.svg", scale)
    if "losses" in results:
        draw_losses(results["losses"], pictures / "race_losses.svg", scale)


def colour(label: str) -> str:
    return OURS if label.startswith("Cadenza") else DDP if label.startswith("DDP") else THEIRS


def draw_finishes(results: dict[str, Results], race: str, titles: dict[str, str], path: Path, scale: Scale) -> None:
    """Draw the time to the same loss on the links of a race, each under its title."""
    times, target = Times(results[race].runs, scale), target_of(results["training"], scale)
    figure, every = panels(len(titles), height=5.2 if race == "timing" else 4.2)
    for axes, (link, title) in zip(every, titles.items(), strict=True):
        draw_bars(axes, quickest(ways(results["training"], times, scale, target, link)))
        axes.set(title=title, xlabel=f"seconds to {target:.2f} nats")
    save(figure, path)


def draw_bars(axes: Any, found: Sequence[Finish]) -> None:
    """Draw a bar for each contender: compute first, then what is above it."""
    found = sorted(found, key=lambda way: -way.seconds)
    names = [way.label for way in found]
    axes.barh(names, [way.alone_s for way in found], color="#cbd5e1")
    above = [max(0.0, way.overhead_s) for way in found]
    axes.barh(names, above, left=[way.alone_s for way in found], color=[colour(name) for name in names])
    end = 3 * min((way.seconds for way in found), default=1.0)  # what takes longer is cut off, and told
    for way in found:
        place, ink = (way.seconds, "black") if way.seconds < 0.95 * end else (0.87 * end, "white")
        axes.text(place + 0.01 * end, way.label, f"{way.seconds:.0f}", va="center", fontsize=7, color=ink)
    axes.set_xlim(0, end)


def draw_losses(results: Results, path: Path, scale: Scale) -> None:
    """Draw the loss at equal tokens above DDP's, with the spread between seeds."""
    ends = {label: values for label, values in final_losses(results, scale).items() if values}
    ddp = statistics.fmean(ends.pop("DDP"))
    figure, (axes,) = panels(1)
    names = list(reversed(ends))
    above = [100 * (statistics.fmean(ends[name]) / ddp - 1) for name in names]
    spread = [100 * statistics.stdev(ends[name]) / ddp if len(ends[name]) > 1 else 0.0 for name in names]
    axes.barh(names, above, xerr=spread, color=OURS, error_kw={"elinewidth": 1, "capsize": 3})
    axes.set(xlabel="held-out loss above DDP's, %, and its standard deviation between seeds")
    save(figure, path)


def draw_utilisation(results: dict[str, Results], path: Path, scale: Scale) -> None:
    """Draw the share of time that is compute, against the rate of the link."""
    runs = [run for race in ("timing", "utilisation") if race in results for run in results[race].runs]
    times = Times(runs, scale)
    links = sorted({*scale.links, *scale.curve_links}, key=lambda link: bits_a_second(link) or 0)
    figure, (axes,) = panels(1)
    markers = iter("osD^vPX*")
    for label in plans.UTILISATION[1:]:
        points = [
            ((bits_a_second(link) or 0) / 1e6, min(100.0, 100 * alone / step))
            for link in links
            if (step := times.step(label, link)) and (alone := times.alone(link))
        ]
        draw_line(axes, label, points, markers)
    axes.set(xlabel="Mbit/s", ylabel="compute, % of the time", xscale="log", ylim=(0, 105))
    rates = [(bits_a_second(link) or 0) / 1e6 for link in links]
    axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
    axes.legend(fontsize=7)
    save(figure, path)


def draw_syncs(results: Results, path: Path, scale: Scale) -> None:
    """Draw what one synchronisation takes as the model and the workers grow, by what the link allows in fp32."""
    times = Times(results.runs, scale)
    figure, (by_size, by_workers) = panels(2)
    sizes = {millions: (millions, plans.SYNC_LINK) for millions in scale.millions}
    workers = {count: (plans.middle(scale), plans.sync_link(count)) for count in sorted(scale.workers)}
    for axes, places in ((by_size, sizes), (by_workers, workers)):
        markers = iter("osD^vPX*+x1")
        for label in plans.SYNCS[1:]:
            costs = {at: (times.sync(label, *place), link_allows(*place)) for at, place in places.items()}
            points = [(at, cost / least) for at, (cost, least) in costs.items() if cost]
            draw_line(axes, label, points, markers)
        axes.set(yscale="log", ylabel="time ÷ what the link allows in fp32")
        axes.set_yticks([0.3, 0.5, 1, 2, 3], ["0.3", "0.5", "1", "2", "3"])
        axes.minorticks_off()
    by_size.set(xlabel="million parameters, 4 workers", xscale="log")
    by_workers.set(xlabel=f"workers, {plans.middle(scale):g} M parameters", xticks=sorted(scale.workers))
    by_workers.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    save(figure, path)


def draw_memory(results: Results, path: Path, scale: Scale) -> None:
    """Draw the peak of memory above compute alone, in copies of the largest model."""
    times, millions = Times(results.runs, scale), max(scale.millions)
    figure, (axes,) = panels(1)
    found = {label: extra for label in plans.SYNCS[1:] if (extra := times.extra_models(label, millions)) is not None}
    names = sorted(found, key=lambda label: -found[label])
    axes.barh(names, [found[name] for name in names], color=[colour(name) for name in names])
    axes.set(xlabel=f"peak memory above compute alone, in models of {millions:g} M")
    save(figure, path)


def draw_line(axes: Any, label: str, points: Sequence[tuple[float, float]], markers: Iterator[str]) -> None:
    """Draw a contender's line, if it has points, with a mark of its own."""
    if points:
        axes.plot(*zip(*points, strict=True), marker=next(markers), label=label, color=colour(label), linewidth=1.2)


def panels(count: int, height: float = 4.2) -> tuple[Any, Any]:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        1, count, figsize=(max(6.5, 4.6 * count), height), layout="constrained", squeeze=False
    )
    for one in axes[0]:
        one.grid(alpha=0.3)
        one.spines[["top", "right"]].set_visible(False)
    return figure, axes[0]


def save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})

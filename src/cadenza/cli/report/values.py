"""Numbers of the task's own: held-out metrics beside the loss, and what it logs while it trains."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

from cadenza.cli.report.charts import Chart, Figure, Key, View, axis, colour_of_run, layout, rounded
from cadenza.cli.report.data import RunData
from cadenza.cli.report.formats import loss_text
from cadenza.cli.report.tables import Cell, number_cell
from cadenza.cli.report.thinning import keep_every

__all__ = ["metric_names", "metric_rows", "value_charts"]

_POINTS = 500  # of a line
_CHARTS = 12  # of each kind
_MARKED = 60  # a line of more points has no room for symbols


def metric_names(runs: Sequence[RunData]) -> list[str]:
    """Return the names of the held-out metrics of all runs, but for the loss."""
    return list(dict.fromkeys(name for run in runs for name in _metrics(run)))


def metric_rows(run: RunData, names: Sequence[str]) -> list[tuple[str, Cell]]:
    """Return the best value of each metric, as rows of a table."""
    found = _metrics(run)
    rows = []
    for name in names:
        word, choose = ("highest", max) if name in _higher(run) else ("lowest", min)
        values = [value for _, value in found.get(name, []) if math.isfinite(value)]
        rows.append((f"held-out {name}, {word}", number_cell(choose(values, default=None), loss_text)))
    return rows


def value_charts(runs: Sequence[RunData]) -> list[Chart]:
    """Return a chart of each held-out metric, and of each value that the task has logged."""
    held_out, logged = [_metrics(run) for run in runs], [_logged(run) for run in runs]
    charts = []
    for kind, points, what in ("metric", held_out, "Held-out "), ("value", logged, ""):
        names = list(dict.fromkeys(name for found in points for name in found))
        for number, name in enumerate(names[:_CHARTS]):
            lines = [found.get(name, []) for found in points]
            charts.append(_chart(f"{kind}-{number}", f"{what}{name}", runs, lines))
    return charts


def _chart(identity: str, title: str, runs: Sequence[RunData], lines: Sequence[list[tuple[int, float]]]) -> Chart:
    several = len(runs) > 1
    traces = [
        _trace(i, run, points, several) for i, (run, points) in enumerate(zip(runs, lines, strict=True)) if points
    ]
    keys = [Key(run.name, colour_of_run(i), "line", i) for i, run in enumerate(runs)] if several else []
    ends = [f"{run.name}: {loss_text(points[-1][1])}" for run, points in zip(runs, lines, strict=True) if points]
    figure = layout(axis("Steps of each worker", rangemode="tozero"), axis(escape(title)), hovermode="closest")
    view = View("", {"data": traces, "layout": figure})
    return Chart(identity, title, f"{title} at the end: {', '.join(ends)}.", [view], keys, linked="steps")


def _trace(number: int, run: RunData, points: list[tuple[int, float]], several: bool) -> Figure:
    chosen = [points[index] for index in keep_every(len(points), _POINTS)]
    return {
        "type": "scatter",
        "mode": "lines+markers" if len(chosen) <= _MARKED else "lines",
        "x": rounded([float(step) for step, _ in chosen], 7),
        "y": rounded([value for _, value in chosen]),
        "meta": {"run": number, "name": f"{escape(run.name)}<br>" if several else ""},
        "line": {"color": f"var(--{colour_of_run(number)})", "width": 2},
        "hovertemplate": "%{meta.name}%{y:.4g}<br>step %{x:,}<extra></extra>",
    }


def _higher(run: RunData) -> Sequence[str]:
    return run.reference.starts[-1].get("higher_is_better", []) if run.reference.starts else []


def _metrics(run: RunData) -> dict[str, list[tuple[int, float]]]:
    """Return the held-out metrics beside the loss, by name: their values, with the steps."""
    lines = [(int(line["step"]), line.get("metrics", {})) for worker in run.workers for line in worker.evaluations]
    return _by_name(iter(lines))


def _logged(run: RunData) -> dict[str, list[tuple[int, float]]]:
    """Return what the task has logged, by name: the means of all workers, with the steps."""
    return _by_name((int(line["step"]), line["values"]) for worker in run.workers for line in worker.logged)


def _by_name(lines: Iterator[tuple[int, dict[str, float]]]) -> dict[str, list[tuple[int, float]]]:
    found: dict[str, dict[int, list[float]]] = {}
    for step, values in lines:
        for name, value in values.items():
            found.setdefault(name, {}).setdefault(step, []).append(float(value))
    return {
        name: [(step, sum(numbers) / len(numbers)) for step, numbers in sorted(steps.items())]
        for name, steps in found.items()
    }

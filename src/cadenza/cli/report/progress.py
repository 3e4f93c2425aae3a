"""How training went along: the learning rate, how fast it was, and the loss of each worker."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import pairwise

from cadenza.cli.report.charts import Chart, Figure, Key, View, axis, colour_of_run, layout, rounded
from cadenza.cli.report.data import Curve, RunData, WorkerData
from cadenza.cli.report.formats import count_text, loss_text
from cadenza.cli.report.thinning import keep_every, moving_mean

__all__ = ["progress_charts"]

_POINTS = 500  # of a line
_WINDOWS = 100  # into which a run is cut to see how fast it was
_WORKERS = 8  # whose losses are drawn; there are as many colours


def progress_charts(runs: Sequence[RunData]) -> list[Chart]:
    """Return the charts that there is something to draw in."""
    several = len(runs) > 1
    keys = [Key(run.name, colour_of_run(i), "line", i) for i, run in enumerate(runs)] if several else []
    rates = [trace for i, run in enumerate(runs) if (trace := _learning_rate(i, run, several))["x"]]
    speeds = [trace for i, run in enumerate(runs) if (trace := _speed(i, run, several))["x"]]
    charts = []
    if rates:
        words = f"The learning rate of {len(rates)} runs." if several else _rate_words(runs[0])
        charts.append(_chart("learning-rate", "Learning rate", words, rates, "Learning rate", keys))
    if speeds:
        unit = runs[0].unit.capitalize()
        told = ", ".join(f"{run.name}: {count_text(run.samples_per_s)}" for run in runs)
        words = f"{unit} a second of all workers, over the whole run: {told}."
        charts.append(_chart("throughput", f"{unit} a second, all workers", words, speeds, f"{unit}/s", keys))
    if not several and len(runs[0].workers) > 1 and runs[0].training.steps:
        charts.append(_losses(runs[0]))
    return charts


def _chart(name: str, title: str, words: str, traces: Sequence[Figure], y: str, keys: Sequence[Key]) -> Chart:
    figure = layout(axis("Steps of each worker", rangemode="tozero"), axis(y, rangemode="tozero"), hovermode="closest")
    return Chart(name, title, words, [View("", {"data": list(traces), "layout": figure})], keys, linked="steps")


def _line(number: int, name: str, x: Sequence[float], y: Sequence[float], what: str) -> Figure:
    return {
        "type": "scatter", "mode": "lines", "x": rounded(x, 7), "y": rounded(y), "meta": {"run": number, "name": name},
        "line": {"color": f"var(--{colour_of_run(number)})", "width": 2},
        "hovertemplate": f"%{{meta.name}}{what} %{{y:.4g}}<br>step %{{x:,}}<extra></extra>",
    }  # fmt: skip


def _learning_rate(number: int, run: RunData, several: bool) -> Figure:
    known = [line for line in run.reference.steps if line.get("lr") is not None]
    chosen = [known[index] for index in keep_every(len(known), _POINTS)]
    x, y = [line["step"] for line in chosen], [float(line["lr"]) for line in chosen]
    return _line(number, f"{escape(run.name)}<br>" if several else "", x, y, "learning rate")


def _rate_words(run: RunData) -> str:
    rates = [float(line["lr"]) for line in run.reference.steps if line.get("lr") is not None]
    return f"The learning rate begins at {rates[0]:.4g}, is {max(rates):.4g} at most, and ends at {rates[-1]:.4g}."


def _speed(number: int, run: RunData, several: bool) -> Figure:
    """Return how many samples a second the reference worker had, window by window, times the number of workers."""
    steps = run.reference.steps
    chosen = [steps[index] for index in keep_every(len(steps), _WINDOWS)]
    x, y = [], []
    for before, after in pairwise(chosen):
        seconds = float(after["elapsed"]) - float(before["elapsed"])
        if seconds > 0 and after["samples"] >= before["samples"]:
            x.append(after["step"])
            y.append(len(run.workers) * (after["samples"] - before["samples"]) / seconds)
    return _line(number, f"{escape(run.name)}<br>" if several else "", x, y, f"{escape(run.unit)} a second")


def _losses(run: RunData) -> Chart:
    """Return the training loss of each worker, smoothed."""
    drawn = [worker for worker in run.workers if worker.steps][:_WORKERS]
    traces = [_loss_of(worker, place) for place, worker in enumerate(drawn)]
    ends = [f"worker {worker.number}: {loss_text(_smooth(worker.curve)[-1])}" for worker in drawn]
    note = "Each line is the moving mean of one worker's own batches."
    if len(run.workers) > len(drawn):
        note += f" The first {len(drawn)} of {len(run.workers)} workers are drawn."
    keys = [Key(f"worker {worker.number}", colour_of_run(place), "line") for place, worker in enumerate(drawn)]
    figure = layout(axis("Steps of each worker", rangemode="tozero"), axis("Training loss"), hovermode="closest")
    words = f"The last training losses, smoothed: {', '.join(ends)}."
    view = View("", {"data": traces, "layout": figure})
    return Chart("loss-workers", "Loss of each worker", words, [view], keys, note, linked="steps")


def _loss_of(worker: WorkerData, place: int) -> Figure:
    losses = _smooth(worker.curve)
    chosen = keep_every(len(losses), _POINTS)
    x, y = [worker.curve.steps[index] for index in chosen], [losses[index] for index in chosen]
    trace = _line(place, f"worker {worker.number}<br>", x, y, "loss")
    del trace["meta"]["run"]  # it is a worker: switching runs leaves it
    return trace


def _smooth(curve: Curve) -> Sequence[float]:
    return moving_mean(curve.losses, max(5, len(curve.losses) // 40))

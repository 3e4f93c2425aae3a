"""Loss against steps, against time and against bytes sent."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from html import escape
from itertools import pairwise

from cadenza.cli.report.charts import Chart, Figure, Key, View, axis, colour_of_run, layout, rounded, time_unit
from cadenza.cli.report.data import Curve, RunData
from cadenza.cli.report.formats import bytes_text, count_text, loss_text, seconds_text
from cadenza.cli.report.tables import Cell, Table, number_cell
from cadenza.cli.report.thinning import keep_every, keep_extremes, moving_mean

__all__ = ["loss_charts", "loss_table"]

_POINTS = 2000  # of a line; a wide screen has about as many columns
_ALL_POINTS = 8000  # of the lines of all runs together, in one chart
_ROWS = 40
_SMOOTHING = 40  # the moving mean spans one part in forty of the run
_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "triangle-down", "pentagon", "star")
_MARKED = 60  # a line of more evaluations has no room for symbols
_MANY_TIMES = 20  # so far apart, values are seen only on a logarithmic axis


def loss_charts(runs: Sequence[RunData]) -> list[Chart]:
    """Return the three charts; the runs have the same colours in all of them."""
    keys = _keys(runs)
    words = [f"{run.name}: {_words(run)}" if len(runs) > 1 else _words(run).capitalize() for run in runs]
    steps, seconds, sent = (_figure(runs, by) for by in ("steps", "seconds", "bytes_sent"))
    first = f"Sent by worker {runs[0].reference.number}; training loss is the mean of the steps between two rounds."
    logarithmic = sent["layout"]["xaxis"].get("type") == "log"
    before = " The axis is logarithmic, and begins with the first bytes sent." if logarithmic else ""
    span = "; ".join(words)
    return [
        Chart("loss-steps", "Loss against steps", f"{span}.", [View("", steps)], keys, _note(runs), 400, True, "steps"),
        Chart("loss-time", "Loss against time", _ending(runs, "seconds"), [View("", seconds)], keys),
        Chart("loss-bytes", "Loss against bytes sent", _ending(runs, "bytes"), [View("", sent)], keys, first + before),
    ]


def loss_table(run: RunData) -> Table:
    """Return the points behind the three charts, few enough to read."""
    means = moving_mean(run.training.losses, _width(run.training))
    smooth = dict(zip(run.training.steps, means, strict=True))
    curve, held_out = (run.held_out, True) if run.held_out.steps else (run.training, False)
    rows: list[list[Cell]] = []
    for index in keep_every(len(curve.steps), _ROWS):
        step = curve.steps[index]
        rows.append(
            [
                number_cell(step, count_text),
                number_cell(round(curve.seconds[index], 3), seconds_text),
                number_cell(curve.bytes_sent[index], bytes_text),
                number_cell(curve.losses[index] if held_out else None, loss_text),
                number_cell(smooth.get(step), loss_text),
            ]
        )
    columns = ("step", "time (s)", "sent (bytes)", "held-out loss", "training loss (moving mean)")
    return Table(f"Loss of {run.name}", columns, rows)


def _figure(runs: Sequence[RunData], by: str) -> Figure:
    divisor, unit = time_unit(max(run.seconds for run in runs))
    if by == "seconds":
        x = axis(f"Time of training ({unit})", rangemode="tozero")
    elif by == "steps":
        x, divisor = axis("Steps of each worker", rangemode="tozero"), 1.0
    else:
        x, divisor = axis("Bytes sent by a worker", ticksuffix="B", tickformat="~s", rangemode="tozero"), 1.0
        if _far_apart([float(run.bytes_sent) for run in runs]):
            x |= {"type": "log", "dtick": 1}
    losses = [loss for run in runs for loss in (*run.training.losses, *run.held_out.losses) if math.isfinite(loss)]
    y = axis("Loss")
    if _far_apart(losses):
        ticks = _log_ticks([loss for loss in losses if loss > 0])
        y |= {"type": "log", "tickvals": ticks, "ticktext": [f"{tick:g}" for tick in ticks]}
    traces = [trace for number, run in enumerate(runs) for trace in _traces(number, run, len(runs), by, divisor, unit)]
    if x.get("type") == "log":  # which has no place for nothing sent
        for trace in traces:
            trace["x"] = [value or None for value in trace["x"]]
    return {"data": traces, "layout": layout(x, y, hovermode="closest", **_marks(runs, by, divisor))}


def _far_apart(values: Sequence[float]) -> bool:
    positive = [value for value in values if value > 0]
    return bool(positive) and min(values) >= 0 and max(positive) > _MANY_TIMES * min(positive)


def _log_ticks(values: Sequence[float]) -> list[float]:
    """Return round numbers to write beside a logarithmic axis: 1, 2 and 5 of each power of ten, or fewer.

    >>> _log_ticks([0.3, 8.0])
    [0.2, 0.5, 1.0, 2.0, 5.0, 10.0]
    """
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    factors = (1, 2, 5) if high - low <= 3 else (1,)
    ticks = [float(f"{factor}e{power}") for power in range(low, high + 1) for factor in factors]
    below = [tick for tick in ticks if tick <= min(values)]
    above = [tick for tick in ticks if tick >= max(values)]
    return [tick for tick in ticks if tick >= (below[-1:] or ticks)[0] and tick <= (above or ticks[-1:])[0]]


def _traces(number: int, run: RunData, count: int, by: str, divisor: float, unit: str) -> list[Figure]:
    colour = f"var(--{colour_of_run(number)})"
    place = {"steps": "step %{x:,}", "seconds": f"%{{x:.4~g}} {unit}", "bytes_sent": "%{x:.3~s}B"}[by]
    named = f"{escape(run.name)}<br>" if count > 1 else ""

    def trace(curve: Curve, what: str, **looks: object) -> Figure:
        x = [value / divisor for value in getattr(curve, by)]
        return {
            "type": "scatter", "x": rounded(x, 7), "y": rounded(curve.losses), "meta": {"run": number, "name": named},
            "hovertemplate": f"%{{meta.name}}{what} %{{y:.4g}}<br>{place}<extra></extra>", **looks,
        }  # fmt: skip

    limit = _limit(count)
    training = _between_rounds(run.training) if by == "bytes_sent" else run.training
    smooth = replace(training, losses=moving_mean(training.losses, _width(training)))
    raw = training.pick(keep_extremes(training.losses, limit))
    even = smooth.pick(keep_every(len(smooth.steps), limit // 4))
    held_out = run.held_out.pick(keep_extremes(run.held_out.losses, limit))
    mode = "lines+markers" if len(held_out.steps) <= _MARKED else "lines"
    marker = {"symbol": _SYMBOLS[number % len(_SYMBOLS)], "size": 7}
    thin, dotted = {"color": colour, "width": 1}, {"color": colour, "width": 1.8, "dash": "dot"}
    traces = [
        trace(raw, "training loss", mode="lines", line=thin, opacity=0.35 if count == 1 else 0.15),
        trace(even, "training loss, moving mean", mode="lines", line=dotted),
        trace(held_out, "held-out loss", mode=mode, line={"color": colour, "width": 2.6}, marker=marker),
    ]
    return [trace for trace in traces if trace["x"]]


def _between_rounds(curve: Curve) -> Curve:
    """Return the mean loss of the steps by which as much had been sent; drawn one by one they would be a wall."""
    ends = [index for index, (sent, after) in enumerate(pairwise((*curve.bytes_sent, -1))) if sent != after]
    means = []
    for start, end in pairwise((-1, *ends)):
        losses = curve.losses[start + 1 : end + 1]
        means.append(sum(losses) / len(losses))
    return replace(curve.pick(ends), losses=means)


def _limit(count: int) -> int:
    return min(_POINTS, _ALL_POINTS // (2 * count))


def _marks(runs: Sequence[RunData], by: str, divisor: float) -> Figure:
    """Return vertical lines where a run was resumed; of several runs they would only clutter."""
    if len(runs) != 1 or by == "bytes_sent":
        return {}
    resumed = [event for event in runs[0].events if event.kind == "start"][:8]
    places = [(event.step if by == "steps" else event.seconds / divisor) for event in resumed]
    line = {"color": "var(--muted)", "width": 1, "dash": "dash"}
    place = {"yref": "paper", "y": 1, "yanchor": "top", "xanchor": "left"}
    text = {"text": " resumed", "showarrow": False, "font": {"color": "var(--muted)", "size": 12}}
    return {
        "shapes": [{"type": "line", "x0": x, "x1": x, "yref": "paper", "y0": 0, "y1": 1, "line": line} for x in places],
        "annotations": [{"x": x, **place, **text} for x in places],
    }  # fmt: skip


def _keys(runs: Sequence[RunData]) -> list[Key]:
    if len(runs) == 1:
        kinds = [
            ("held-out loss", "line"),
            ("training loss, moving mean", "dotted"),
            ("training loss, each step", "thin"),
        ]
        return [Key(label, colour_of_run(0), style) for label, style in kinds]
    named = [Key(run.name, colour_of_run(number), "line", number) for number, run in enumerate(runs)]
    return [*named, Key("thick: held-out", "muted", "line"), Key("dotted: training, moving mean", "muted", "dotted")]


def _width(curve: Curve) -> int:
    return max(5, len(curve.losses) // _SMOOTHING)


def _note(runs: Sequence[RunData]) -> str:
    notes = []
    limit = _limit(len(runs))
    if any(len(run.training.steps) > limit for run in runs):
        notes.append(
            f"Each line is thinned to {limit:,} points or fewer, which keep the lowest and the highest value of every "
            "stretch; the tables and the summary are computed from all of them."
        )
    widths = sorted({_width(run.training) for run in runs if run.training.steps})
    if widths:
        spans = " to ".join(f"{width:,}" for width in dict.fromkeys((widths[0], widths[-1])))
        notes.append(f"Training loss is the mean of all workers; its moving mean spans {spans} steps.")
    for run in runs:
        bad = [step for step, loss in zip(run.training.steps, run.training.losses, strict=True) if math.isnan(loss)]
        if bad:
            notes.append(f"{run.name}: the loss was not a number at {len(bad):,} steps, first at step {bad[0]:,}.")
    return " ".join(notes)


def _words(run: RunData) -> str:
    parts = []
    for name, curve in (("held-out loss", run.held_out), ("training loss", run.training)):
        ends = curve.finite_ends()
        if ends is not None:
            first, last = ends
            verb = "falls" if last < first else "rises" if last > first else "stays"
            parts.append(f"{name} {verb} from {loss_text(first)} to {loss_text(last)}")
    return f"{', '.join(parts)} over {run.steps:,} steps" if parts else "no loss was written"


def _ending(runs: Sequence[RunData], what: str) -> str:
    parts = []
    for run in runs:
        curve = run.held_out if run.held_out.finite_ends() else run.training
        kind, ends = "held-out" if curve is run.held_out else "training", curve.finite_ends()
        spent = f"in {seconds_text(run.seconds)}" if what == "seconds" else f"with {bytes_text(run.bytes_sent)} sent"
        reached = f"{kind} loss {loss_text(ends[1])} {spent}" if ends else "no loss was written"
        parts.append(f"{run.name}: {reached}" if len(runs) > 1 else reached.capitalize())
    return f"{'; '.join(parts)}."

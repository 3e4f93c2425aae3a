"""Drift, and bytes: by level, and beside what DDP would have sent."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from cadenza.cli.report.charts import Chart, Figure, Key, View, axis, colour_of_run, layout, rounded
from cadenza.cli.report.data import Round, RunData
from cadenza.cli.report.formats import NOTHING, bytes_text, count_text, ratio_text, seconds_text
from cadenza.cli.report.tables import Cell, Table, number_cell, text_cell
from cadenza.cli.report.thinning import keep_every, keep_extremes

__all__ = ["bytes_charts", "drift_chart", "drift_table", "levels_table"]

_POINTS = 1000
_ROWS = 40
_DASHES = ("solid", "dot", "dash", "dashdot")
_LEVEL_COLOURS = 4


def drift_chart(runs: Sequence[RunData]) -> Chart | None:
    """Return how far the workers had spread at each round, or None if it was never measured."""
    traces, words, keys = [], [], []
    for number, run in enumerate(runs):
        for level, rounds in _by_level(run).items():
            named = f"{run.name}, {rounds[0].level_name}" if len(_by_level(run)) > 1 else run.name
            traces.append(_drift_trace(number, level, rounds, named))
            drifts = [round_.drift for round_ in rounds if round_.drift is not None]
            words.append(f"{named}: drift goes from {drifts[0]:.3g} to {drifts[-1]:.3g}, at most {max(drifts):.3g}")
            styles = ("dot", "ring") if _several_fragments(rounds) else ("line", "dotted")
            keys.append(Key(named, colour_of_run(number), styles[min(level, 1)], number))
    if not traces:
        return None
    y = axis("Drift", rangemode="tozero")
    figure = {"data": traces, "layout": layout(axis("Step of the launch", rangemode="tozero"), y, hovermode="closest")}
    note = (
        "Drift is how far the workers had spread when a round began, relative to the size of the model: "
        "sqrt(mean‖δᵢ‖² − ‖mean δ‖²) / ‖mean‖."
    )
    if any(len(trace["x"]) >= _POINTS - 2 for trace in traces):
        note += f" Lines are thinned to {_POINTS:,} points or fewer, which keep every low and high."
    title, shown = "How far the workers had spread at each round", keys if len(keys) > 1 else ()
    return Chart("drift", title, f"{'; '.join(words)}.", [View("", figure)], shown, note, wide=True)


def drift_table(run: RunData) -> Table:
    """Return some of the drifts that were measured."""
    rounds = [round_ for round_ in run.reference.rounds if round_.drift is not None]
    rows = [
        [
            number_cell(rounds[index].step, count_text),
            text_cell(rounds[index].level_name),
            number_cell(rounds[index].fragment, count_text),
            number_cell(rounds[index].drift, lambda drift: NOTHING if drift is None else f"{drift:.4g}"),
        ]
        for index in keep_every(len(rounds), _ROWS)
    ]
    return Table(f"Drift of {run.name}", ("step", "level", "fragment", "drift"), rows)


def bytes_charts(runs: Sequence[RunData]) -> list[Chart]:
    """Return bytes by level, and bytes beside those of DDP."""
    return [chart for chart in (_levels_chart(runs), _ddp_chart(runs)) if chart is not None]


def levels_table(runs: Sequence[RunData]) -> Table:
    """Return what each level sent, exactly."""
    rows: list[list[Cell]] = []
    for run in runs:
        for level in run.levels:
            rounds = level.rounds
            compression = level.raw_bytes / level.encoded_bytes if level.encoded_bytes else None
            error = level.codec_error
            rows.append(
                [
                    *([text_cell(run.name)] if len(runs) > 1 else []),
                    text_cell(level.name),
                    text_cell(level.codec or NOTHING),
                    number_cell(rounds, count_text),
                    number_cell(level.bytes_sent, bytes_text),
                    number_cell(level.bytes_sent / rounds if rounds else None, bytes_text),
                    number_cell(compression, lambda value: NOTHING if value is None else f"{value:.3g}×"),
                    number_cell(error, lambda value: NOTHING if value is None else f"{100 * value:.2g} %"),
                    number_cell(round(level.wire_s / rounds, 6) if rounds else None, seconds_text),
                    number_cell(round(level.stall_s, 4), seconds_text),
                ]
            )
    columns = (
        *(["run"] if len(runs) > 1 else []),
        "level", "codec", "rounds", "sent (bytes)", "sent a round (bytes)", "compression", "codec error",
        "on the wire a round (s)", "standing still (s)",
    )  # fmt: skip
    return Table("Rounds and bytes by level", columns, rows)


def _by_level(run: RunData) -> dict[int, list[Round]]:
    levels: dict[int, list[Round]] = {}
    for round_ in run.reference.rounds:
        if round_.drift is not None:
            levels.setdefault(round_.level, []).append(round_)
    return dict(sorted(levels.items()))


def _drift_trace(number: int, level: int, rounds: Sequence[Round], name: str) -> Figure:
    drifts = [round_.drift or 0.0 for round_ in rounds]
    kept = keep_extremes(drifts, _POINTS)
    colour = f"var(--{colour_of_run(number)})"
    several = _several_fragments(rounds)
    return {
        "type": "scatter", "mode": "markers" if several else "lines+markers" if len(kept) <= 60 else "lines",
        "x": [rounds[index].step for index in kept], "y": rounded(drifts[index] for index in kept),
        "line": {"color": colour, "width": 2, "dash": _DASHES[level % len(_DASHES)]},
        "marker": {"color": colour, "size": 6, "symbol": "circle-open" if several and level else "circle"},
        "meta": {"run": number, "name": escape(name)},
        "text": [f", fragment {rounds[index].fragment}" for index in kept] if several else "",
        "hovertemplate": "%{meta.name}<br>drift %{y:.3g}<br>step %{x:,}%{text}<extra></extra>",
    }  # fmt: skip


def _several_fragments(rounds: Sequence[Round]) -> bool:
    """Return whether a line through the rounds would only jump between fragments."""
    return len({round_.fragment for round_ in rounds}) > 1


def _levels_chart(runs: Sequence[RunData]) -> Chart | None:
    names = list(dict.fromkeys(level.name for run in runs for level in run.levels))
    if not names:
        return None
    traces, keys = [], []
    labels = [_label(run) for run in runs]
    for index, name in enumerate(names):
        sizes = [sum(level.bytes_sent for level in run.levels if level.name == name) for run in runs]
        colour = f"level-{index % _LEVEL_COLOURS}"
        keys.append(Key(name, colour, "box"))
        traces.append(
            _bar(labels, sizes, f"var(--{colour})", [f"{escape(name)}: {bytes_text(size)}" for size in sizes])
        )
    words = [
        f"{run.name} sent " + ", ".join(f"{bytes_text(level.bytes_sent)} at level {level.name}" for level in run.levels)
        for run in runs
        if run.levels
    ]
    note = f"Bytes that worker {runs[0].reference.number} handed to the transport."
    return Chart(
        "bytes-levels", "Bytes by level", f"{'; '.join(words)}.", [View("", _bars(traces))], keys, note, _high(runs)
    )


def _ddp_chart(runs: Sequence[RunData]) -> Chart | None:
    if not any(run.ddp_bytes for run in runs):
        return None
    labels = [_label(run) for run in runs]
    sent, ddp = [run.bytes_sent for run in runs], [run.ddp_bytes for run in runs]
    shares = [f"sent {bytes_text(own)}, {ratio_text(own, all_)} of DDP" for own, all_ in zip(sent, ddp, strict=True)]
    colours = [f"var(--{colour_of_run(number)})" for number in range(len(runs))]
    traces = [
        _bar(labels, ddp, "var(--ddp)", [f"DDP would have sent {bytes_text(size)}" for size in ddp]),
        _bar(labels, sent, colours, shares),
    ]
    for trace in traces:
        trace |= {"text": [bytes_text(size) for size in trace["x"]], "textposition": "outside", "cliponaxis": False}
    words = [f"{run.name} {share}, of {bytes_text(run.ddp_bytes)}" for run, share in zip(runs, shares, strict=True)]
    keys = [Key("DDP would have sent", "ddp", "box"), Key("sent", "run-0" if len(runs) == 1 else "muted", "box")]
    figure = _bars(traces, barmode="group")
    figure["layout"]["xaxis"]["range"] = [0, 1.25 * max(sent + ddp)]  # room for the text behind the longest bar
    view = View("", figure)
    note = "DDP for the same steps: a ring all-reduce of all gradients in every step."
    return Chart("bytes-ddp", "Bytes beside DDP’s", f"{'; '.join(words)}.", [view], keys, note, _high(runs) + 20)


def _label(run: RunData) -> str:
    return escape(run.name if len(run.name) <= 18 else f"{run.name[:17]}…")


def _high(runs: Sequence[RunData]) -> int:
    return 110 + 56 * len(runs)


def _bar(labels: Sequence[str], sizes: Sequence[int], colour: str | list[str], texts: Sequence[str]) -> Figure:
    rows = list(range(len(labels)))
    return {
        "type": "bar", "orientation": "h", "y": rows, "x": list(sizes), "marker": {"color": colour},
        "hovertext": texts, "hovertemplate": "%{hovertext}<extra></extra>", "meta": {"labels": list(labels)},
    }  # fmt: skip


def _bars(traces: list[Figure], barmode: str = "stack") -> Figure:
    labels = traces[0]["meta"]["labels"]
    x = axis("Bytes sent by a worker", ticksuffix="B", tickformat="~s", rangemode="tozero", nticks=5)
    y = axis(autorange="reversed", fixedrange=True, showgrid=False, tickvals=list(range(len(labels))), ticktext=labels)
    return {"data": traces, "layout": layout(x, y, barmode=barmode, bargap=0.35, hovermode="closest")}

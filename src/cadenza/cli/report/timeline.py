"""What each worker did when: computing, computing with a round on the wire, standing still."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cadenza.cli.report.charts import Chart, Figure, Key, View, axis, layout, rounded, time_unit
from cadenza.cli.report.data import RunData, WorkerData
from cadenza.cli.report.formats import bytes_text, count_text, seconds_text, share_text
from cadenza.cli.report.spans import Span, filled, minus, total, union, within
from cadenza.cli.report.tables import Cell, Table, number_cell

__all__ = ["Activity", "activity", "timeline_chart", "timeline_table"]

_BINS = 150
_ROWS = 12  # workers drawn; more would not be legible
_ROUNDS = 4  # in a close-up
_STATES = (
    ("standing", "standing still for a round"),
    ("wire", "a round on the wire"),
    ("computing", "computing"),
)


@dataclass(frozen=True)
class Activity:
    """A worker's time in three parts that do not overlap, and `flights`: when its rounds were on the wire at all."""

    computing: list[Span]
    wire: list[Span]
    standing: list[Span]
    flights: list[Span]
    end: float


def activity(worker: WorkerData) -> Activity:
    """Return how a worker spent its time of training.

    A round's standing still is drawn up to its landing: what part of it was in the launch is not known. Evaluations and
    checkpoints count as computing.
    """
    standing = union((max(0.0, round_.landed - round_.stall_s), round_.landed) for round_ in worker.rounds)
    flights = union((round_.launched, min(round_.launched + round_.wire_s, round_.landed)) for round_ in worker.rounds)
    wire = minus(flights, standing)
    computing = minus(union(worker.alive), union([*standing, *wire]))
    return Activity(computing, wire, standing, flights, worker.end_s)


def timeline_chart(number: int, run: RunData, several: bool) -> Chart | None:
    """Return the timeline of a run, or None if it had no rounds."""
    workers = list(run.workers)[:_ROWS]
    if not any(worker.rounds for worker in workers):
        return None
    acts = [activity(worker) for worker in workers]
    title = f"Timeline of {run.name}" if several else "Timeline"
    views = [_whole(workers, acts), *_close_ups(run, workers, acts)]
    keys = [Key(label, name, "box") for name, label in reversed(_STATES)]
    note = "Standing still is drawn up to a round's landing. Evaluations and checkpoints count as computing."
    if any(len(worker.alive) > 1 for worker in workers):
        note += " A gap is a time in which a worker was dead, or starting again."
    if len(run.workers) > _ROWS:
        note += f" The first {_ROWS} of {len(run.workers)} workers are drawn; the table has them all."
    height = 64 + 66 * len(workers)
    return Chart(f"timeline-{number}", title, _words(run, acts), views, keys, note, height, wide=True)


def timeline_table(run: RunData) -> Table:
    """Return what every worker did with its time."""
    rows: list[list[Cell]] = []
    for worker in run.workers:
        act = activity(worker)
        parts = [total(spans) for spans in (act.computing, act.wire, act.standing)]
        row = [number_cell(worker.number, count_text), number_cell(len(worker.rounds), count_text)]
        row += [number_cell(worker.bytes_sent, bytes_text), number_cell(round(act.end, 3), seconds_text)]
        for part in parts:
            row.append(Cell(f"{seconds_text(part)} ({share_text(part, act.end)})", round(part, 4)))
        row.append(number_cell(round(sum(round_.wire_s for round_ in worker.rounds), 4), seconds_text))
        rows.append(row)
    columns = (
        "worker",
        "rounds",
        "sent (bytes)",
        "time (s)",
        "computing (s)",
        "computing, a round on the wire (s)",
        "standing still (s)",
        "on the wire, all rounds (s)",
    )
    return Table(f"Time of the workers of {run.name}", columns, rows)


def _words(run: RunData, acts: Sequence[Activity]) -> str:
    end = sum(act.end for act in acts)
    parts = {"computing": "computed", "wire": "computed with a round on the wire", "standing": "stood still"}
    shares = [
        f"{verb} {share_text(sum(total(getattr(act, name)) for act in acts), end)}" for name, verb in parts.items()
    ]
    who = "The worker" if len(acts) == 1 else f"{len(acts)} workers"
    return f"{who} of {run.name} {', '.join(shares)} of the time, in {len(run.reference.rounds):,} rounds."


def _rows(workers: Sequence[WorkerData], **of_each: Any) -> Figure:
    """Return a y axis for each worker, from the top down, and its name above it."""
    share = 1 / len(workers)
    rows: Figure = {"annotations": []}
    for row, worker in enumerate(workers):
        top = 1 - row * share
        name = "yaxis" if row == 0 else f"yaxis{row + 1}"
        rows[name] = axis(domain=[top - share * 0.92, top - share * 0.3], fixedrange=True, showgrid=False, **of_each)
        rows["annotations"].append(
            {"text": f"worker {worker.number}", "xref": "paper", "x": 0, "xanchor": "left", "yref": "paper",
             "y": top - share * 0.28, "yanchor": "bottom", "showarrow": False,
             "font": {"size": 12, "color": "var(--muted)"}}
        )  # fmt: skip
    return rows


def _whole(workers: Sequence[WorkerData], acts: Sequence[Activity]) -> View:
    """Return the whole run in bins: the height of a colour is its share of the bin's time."""
    end = max(act.end for act in acts)
    bins = max(1, min(_BINS, 4 * max(len(worker.rounds) for worker in workers)))
    shares = [[filled(getattr(act, name), end, bins) for name, _ in _STATES] for act in acts]
    highest = max(still + wire for standing, wires, _ in shares for still, wire in zip(standing, wires, strict=True))
    top = next(limit for limit in (0.02, 0.05, 0.1, 0.25, 0.5, 1.0) if highest * 1.2 <= limit or limit == 1.0)
    divisor, unit = time_unit(end)
    x = [end / divisor * number / bins for number in range(bins + 1)]
    traces = []
    for row, of_worker in enumerate(shares):
        worker = workers[row].number
        for (name, label), values in zip(_STATES, of_worker, strict=True):
            traces.append(
                {"type": "scatter", "mode": "lines", "x": rounded(x), "y": rounded([*values, values[-1]], 3),
                 "stackgroup": f"worker {row}", "fillcolor": f"var(--{name})", "yaxis": f"y{row + 1}",
                 "line": {"width": 0, "shape": "hv"}, "hoveron": "points",
                 "hovertemplate": f"worker {worker}, %{{x:.4~g}} {unit}<br>{label}: %{{y:.1%}}<extra></extra>"}
            )  # fmt: skip
    ticks = {"range": [0, top], "tickvals": [0, top], "ticktext": ["0", f"{top:.0%}"]}
    note = (
        f"Whole run, in {bins} bins of {seconds_text(end / bins)}: a colour’s height is its share of the bin’s time; "
        "a round on the wire is counted where the worker computed meanwhile."
    )
    if top < 1:
        note += f" The scale ends at {top:.0%}; what is above it is computing."
    x_axis = axis(f"Time of training ({unit})", anchor=f"y{len(workers)}", range=[0, end / divisor])
    figure = layout(x_axis, {}, hovermode="closest", **_rows(workers, **ticks))
    return View("Whole run", {"data": traces, "layout": figure}, note)


def _close_ups(run: RunData, workers: Sequence[WorkerData], acts: Sequence[Activity]) -> list[View]:
    """Return a few rounds each, as they were: the first, those in the middle, the last."""
    rounds = sorted(run.reference.rounds, key=lambda round_: round_.launched)
    if not rounds:
        return []
    if len(rounds) <= _ROUNDS:
        places = [("All rounds", 0)]
    else:
        last = len(rounds) - _ROUNDS
        places = [("First rounds", 0), ("Middle", last // 2), ("Last rounds", last)]
    views = []
    for name, place in places:
        few = rounds[place : place + _ROUNDS]
        begin = rounds[place - 1].landed if place else 0.0
        end = max(round_.landed for round_ in few)
        margin = 0.02 * (end - begin)
        note = f"{name}: {len(few)} rounds, from step {few[0].step:,} to {few[-1].step:,}, drawn as they were timed."
        views.append(View(name, _exact(workers, acts, (max(0.0, begin - margin), end + margin)), note))
    return views


def _exact(workers: Sequence[WorkerData], acts: Sequence[Activity], window: Span) -> Figure:
    traces = []
    for row, act in enumerate(acts):
        lanes = [("computing", union([*act.computing, *act.wire])), ("standing", act.standing), ("wire", act.flights)]
        for name, spans in lanes:
            traces.append(_bars(name, within(spans, window), row, workers[row].number))
    x_axis = axis("Time of training (seconds)", anchor=f"y{len(workers)}", range=list(window))
    ticks = {"range": [0, 1], "tickvals": [0.68, 0.18], "ticktext": ["loop", "wire"]}
    figure = layout(x_axis, {}, hovermode="closest", barmode="overlay", **_rows(workers, **ticks))
    return {"data": traces, "layout": figure}


def _bars(name: str, spans: Sequence[Span], row: int, worker: int) -> Figure:
    middle, height = (0.18, 0.3) if name == "wire" else (0.68, 0.56)
    return {
        "type": "bar", "orientation": "h", "base": rounded([start for start, _ in spans], 9),
        "x": rounded(end - start for start, end in spans), "y": [middle] * len(spans), "width": height,
        "yaxis": f"y{row + 1}", "marker": {"color": f"var(--{name})", "line": {"width": 0}},
        "hovertemplate": f"worker {worker}, {dict(_STATES)[name]}<br>%{{base:.6~g}} to %{{x:.6~g}} s<extra></extra>",
    }  # fmt: skip

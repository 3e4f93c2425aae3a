"""The figures of a run in a few tiles and a table; of several runs, a table that compares them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from html import escape

from cadenza.cli.report.data import Event, RunData
from cadenza.cli.report.formats import (
    NOTHING,
    bytes_text,
    count_text,
    loss_text,
    ratio_text,
    seconds_text,
    share_text,
)
from cadenza.cli.report.tables import Cell, Table, named_cell, number_cell, text_cell
from cadenza.cli.report.values import metric_names, metric_rows

__all__ = ["comparison_table", "event_table", "same_loss", "summary_tables", "tiles", "verdict"]

_LOSSES, _RESULTS = 3, 10  # of the figures, how many tell of the loss and of all that came of a run
# The rows in which one run is better than another, by how their names begin or end, and what the best one is.
_BEST: dict[str, Callable[[Iterable[float]], float]] = {
    "held-out loss": min,
    "training loss": min,
    "time": min,
    "sent": min,
    "standing still": min,
}
_CHOICES: dict[str, Callable[[Iterable[float]], float]] = {"lowest": min, "highest": max, "all workers": max}
_VERDICT = {
    "time to held-out loss": "the shortest time to the loss that all reached",
    "sent to held-out loss": "the fewest bytes to it",
    "standing still, of the time": "the least standing still",
}
_STATUS = {"unfinished": "unfinished (still running, or killed)"}


def tiles(run: RunData) -> str:
    """Return the figures that one looks for first, large."""
    held_out = run.held_out.finite_ends()
    loss = ("Held-out loss", held_out[1]) if held_out else ("Training loss", run.training_loss)
    before = f"from {loss_text(held_out[0])}" if held_out else "mean of the last 5 %"
    figures = [
        (loss[0], loss_text(loss[1]), before),
        ("Sent by a worker", bytes_text(run.bytes_sent), f"{ratio_text(run.bytes_sent, run.ddp_bytes)} of DDP’s bytes"),
        ("Time", seconds_text(run.seconds), f"{count_text(run.samples_per_s)} {run.unit}/s, all workers"),
        ("Standing still", share_text(run.stall_s, run.seconds), _in_all(run.stall_s)),
    ]
    return "".join(
        f'<li><span class="tile-name">{escape(name)}</span> <strong>{escape(value)}</strong> '
        f'<span class="tile-more">{escape(more)}</span></li>\n'
        for name, value, more in figures
    )


def summary_tables(run: RunData) -> list[Table]:
    """Return everything that is summed up of a run, a figure a row: what came of it, and what it was."""
    metrics = metric_rows(run, metric_names([run]))
    figures = _figures(run)
    rows = [(named_cell(name), cell) for name, cell in [*figures[:_LOSSES], *metrics, *figures[_LOSSES:]]]
    results = _RESULTS + len(metrics)
    return [
        Table(f"Results of {run.name}", ("figure", "value"), rows[:results], "list"),
        Table(f"Set-up of {run.name}", ("figure", "value"), rows[results:], "list"),
    ]


def comparison_table(runs: Sequence[RunData]) -> Table:
    """Return the runs beside each other, a run a column; first what they are compared for."""
    columns = [_figures(run) for run in runs]
    target = same_loss(runs)
    if target is not None:
        for run, column in zip(runs, columns, strict=True):
            _, seconds, sent = run.reaching(target) or (None, None, None)
            column[_LOSSES:_LOSSES] = [
                (f"time to held-out loss {loss_text(target)} (s)", number_cell(seconds, seconds_text)),
                (f"sent to held-out loss {loss_text(target)} (bytes)", number_cell(sent, bytes_text)),
            ]
    metrics = metric_names(runs)
    for run, column in zip(runs, columns, strict=True):
        column[_LOSSES:_LOSSES] = metric_rows(run, metrics)
    rows = []
    for figures in zip(*columns, strict=True):
        name, cells = figures[0][0], [cell for _, cell in figures]
        rows.append([named_cell(name), *_with_best(name, cells)])
    return Table("The runs beside each other", ("figure", *(run.name for run in runs)), rows, "beside")


def verdict(runs: Sequence[RunData]) -> str:
    """Return in a sentence or two which run is the best at what."""
    table = comparison_table(runs)
    found: dict[str, list[str]] = {}
    for heading, *cells in table.rows:
        name = _metric(heading.text) or next((v for start, v in _VERDICT.items() if heading.text.startswith(start)), "")
        for run, cell in zip(runs, cells, strict=True):
            if cell.best and name:
                found.setdefault(run.name, []).append(f"{name} ({cell.text})")
    return " ".join(f"{name} has {_listed(best)}." for name, best in found.items())


def _metric(heading: str) -> str:
    """Return what the best run of a row has, if the row is a held-out metric's best value.

    >>> _metric("held-out loss, lowest"), _metric("time")
    ('the lowest held-out loss', '')
    """
    name, _, word = heading.rpartition(", ")
    return f"the {word} {name}" if name.startswith("held-out ") and word in ("lowest", "highest") else ""


def same_loss(runs: Sequence[RunData]) -> float | None:
    """Return the lowest held-out loss that every run reached, or None if one was never evaluated."""
    lowest = [min(filter(math.isfinite, run.held_out.losses), default=None) for run in runs]
    known = [loss for loss in lowest if loss is not None]
    return max(known) if known and len(known) == len(runs) else None


def event_table(runs: Sequence[RunData], limit: int) -> Table:
    """Return what happened, the first `limit` of it."""
    told: list[tuple[RunData, Event]] = [(run, event) for run in runs for event in run.events]
    rows = [
        [
            *([text_cell(run.name)] if len(runs) > 1 else []),
            number_cell(event.step, count_text),
            number_cell(round(event.seconds, 3), seconds_text),
            number_cell(event.worker, count_text),
            text_cell(event.level),
            text_cell(event.text),
        ]
        for run, event in told[:limit]
    ]
    columns = (*(["run"] if len(runs) > 1 else []), "step", "time (s)", "worker", "level", "what happened")
    return Table("Events", columns, rows)


def _figures(run: RunData) -> list[tuple[str, Cell]]:
    held_out = run.held_out.finite_ends()
    lowest = min(filter(math.isfinite, run.held_out.losses), default=None)
    share = run.bytes_sent / run.ddp_bytes if run.ddp_bytes else None
    stall_s = run.stall_s
    still = round(stall_s / run.seconds, 6) if run.seconds and stall_s is not None else None
    rate = run.samples_per_s
    return [
        ("held-out loss, last", number_cell(held_out[1] if held_out else None, loss_text)),
        ("held-out loss, lowest", number_cell(lowest, loss_text)),
        ("training loss, mean of the last 5 %", number_cell(run.training_loss, loss_text)),
        ("time (s)", number_cell(round(run.seconds, 3), seconds_text)),
        ("sent by a worker (bytes)", number_cell(run.bytes_sent, bytes_text)),
        ("DDP would have sent (bytes)", number_cell(run.ddp_bytes or None, bytes_text)),
        ("sent, of DDP’s bytes", Cell(ratio_text(run.bytes_sent, run.ddp_bytes), share)),
        ("standing still (s)", number_cell(None if stall_s is None else round(stall_s, 4), seconds_text)),
        ("standing still, of the time", Cell(share_text(run.stall_s, run.seconds), still)),
        (f"{run.unit} a second, all workers", number_cell(None if rate is None else round(rate, 1), count_text)),
        ("steps", Cell(f"{run.steps:,} of {run.planned_steps:,}", run.steps)),
        ("rounds", _count(len(run.reference.rounds), len(run.reference.failures), "failed")),
        ("status", Cell(_STATUS.get(run.status, run.status), run.status)),
        ("strategy", Cell(run.strategy or NOTHING, run.strategy)),
        ("codec", Cell(run.codec or NOTHING, run.codec)),
        ("workers", _count(run.worker_count, sum(worker.gone for worker in run.workers), "lost on the way")),
        ("parameters", number_cell(run.parameters, count_text)),
        ("checkpoints", number_cell(len(run.reference.checkpoints), count_text)),
    ]


def _in_all(seconds: float | None) -> str:
    return "inside backward(), not measured" if seconds is None else f"{seconds_text(seconds)} in all"


def _with_best(name: str, cells: Sequence[Cell]) -> list[Cell]:
    """Return a row with the best of its cells marked, if one is better than another."""
    ending = name.rpartition(", ")[2]
    wanted = _CHOICES.get(ending) or next((choose for start, choose in _BEST.items() if name.startswith(start)), None)
    values = [cell.value for cell in cells if isinstance(cell.value, int | float) and math.isfinite(cell.value)]
    if wanted is None or len(set(values)) < 2:
        return list(cells)
    best = wanted(values)
    return [replace(cell, best=cell.value == best) for cell in cells]


def _listed(words: Sequence[str]) -> str:
    """Return words as a list in a sentence.

    >>> _listed(["a"]), _listed(["a", "b", "c"])
    ('a', 'a, b and c')
    """
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def _count(count: int, some: int, what: str) -> Cell:
    """Return a number, and of how many there is something to be said."""
    cell = number_cell(count, count_text)
    return Cell(f"{cell.text} ({count_text(some)} {what})", cell.value) if some else cell

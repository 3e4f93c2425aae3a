"""The figures of a run in a few tiles and a table; of several runs, a table that compares them."""

from __future__ import annotations

import math
from collections.abc import Sequence
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

__all__ = ["comparison_table", "event_table", "same_loss", "summary_tables", "tiles"]

_LOSSES, _RESULTS = 3, 10  # of the figures, how many tell of the loss and of all that came of a run
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
        ("Standing still", share_text(run.stall_s, run.seconds), f"{seconds_text(run.stall_s)} in all"),
    ]
    return "".join(
        f'<li><span class="tile-name">{escape(name)}</span> <strong>{escape(value)}</strong> '
        f'<span class="tile-more">{escape(more)}</span></li>\n'
        for name, value, more in figures
    )


def summary_tables(run: RunData) -> list[Table]:
    """Return everything that is summed up of a run, a figure a row: what came of it, and what it was."""
    rows = [(named_cell(name), cell) for name, cell in _figures(run)]
    return [
        Table(f"Results of {run.name}", ("figure", "value"), rows[:_RESULTS], "list"),
        Table(f"Set-up of {run.name}", ("figure", "value"), rows[_RESULTS:], "list"),
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
    rows = [[named_cell(figures[0][0]), *(cell for _, cell in figures)] for figures in zip(*columns, strict=True)]
    return Table("The runs beside each other", ("figure", *(run.name for run in runs)), rows, "beside")


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
    still = round(run.stall_s / run.seconds, 6) if run.seconds else None
    rate = run.samples_per_s
    return [
        ("held-out loss, last", number_cell(held_out[1] if held_out else None, loss_text)),
        ("held-out loss, lowest", number_cell(lowest, loss_text)),
        ("training loss, mean of the last 5 %", number_cell(run.training_loss, loss_text)),
        ("time (s)", number_cell(round(run.seconds, 3), seconds_text)),
        ("sent by a worker (bytes)", number_cell(run.bytes_sent, bytes_text)),
        ("DDP would have sent (bytes)", number_cell(run.ddp_bytes or None, bytes_text)),
        ("sent, of DDP’s bytes", Cell(ratio_text(run.bytes_sent, run.ddp_bytes), share)),
        ("standing still (s)", number_cell(round(run.stall_s, 4), seconds_text)),
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


def _count(count: int, some: int, what: str) -> Cell:
    """Return a number, and of how many there is something to be said."""
    cell = number_cell(count, count_text)
    return Cell(f"{cell.text} ({count_text(some)} {what})", cell.value) if some else cell

"""What came of one run or of several, as a table on the terminal: the report's own figures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.table import Table

from cadenza.cli.report.data import read_runs
from cadenza.cli.report.formats import bytes_text
from cadenza.cli.report.summary import comparison_table, summary_tables
from cadenza.training.runs import Run

__all__ = ["results"]

_ENOUGH = 14  # rows of a comparison; the report has them all


def results(folders: Sequence[Path]) -> RenderableType:
    """Return the table: a run a column."""
    runs = read_runs(folders)
    shown = summary_tables(runs[0])[0] if len(runs) == 1 else comparison_table(runs)
    table = Table(box=SIMPLE_HEAD, show_header=len(runs) > 1, pad_edge=False)
    table.add_column("")
    for run in runs:
        table.add_column(run.name, justify="right")
    for name, *cells in shown.rows[:_ENOUGH]:
        table.add_row(name.text, *(f"[bold green]{cell.text}[/]" if cell.best else cell.text for cell in cells))
    links = [link for folder in folders if (link := Run(folder).environment().get("link")) is not None]
    if len(links) == len(folders):
        sent = [bytes_text(sum(link["interface_bytes"])) for link in links]
        table.add_row(f"left all interfaces ({links[0]['rate']} links)", *sent)
    return table

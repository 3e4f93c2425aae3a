"""`cadenza report`."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from cadenza.errors import UsageError

__all__ = ["report"]


def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN", help="The folders of one or more runs.", show_default=False)
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Where to write the page: if not told, RUN/report.html, and of several runs comparison.html here.",
        ),
    ] = None,
    show: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
) -> None:
    """Draw what is in a run's folder as one HTML page; several runs are compared.

    The page loads nothing from a network: it can be sent to others as it is.
    """
    from cadenza.cli.report.page import write_report

    target = output or (runs[0] / "report.html" if len(runs) == 1 else Path("comparison.html"))
    try:
        written = write_report(runs, target)
    except OSError as error:
        raise UsageError(f"The report cannot be written to {target}: {error.strerror or error}.") from error
    print(written)
    if show:
        webbrowser.open(written.resolve().as_uri())

"""The program `cadenza`: its commands, and what becomes of errors."""

from __future__ import annotations

import typer

__all__ = ["app", "main"]

app = typer.Typer(name="cadenza", no_args_is_help=True, pretty_exceptions_enable=False)


@app.callback()
def cadenza() -> None:
    """Train one model on many workers that talk seldom."""


def main() -> None:
    """Run the command line."""
    app()

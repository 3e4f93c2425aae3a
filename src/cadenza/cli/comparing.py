"""`cadenza train --compare`: the same job by several strategies, one after the other, on the same data."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import typer
from rich.console import Console

from cadenza.cli.running import carry_out, emulated, import_task, make_run, owned
from cadenza.cli.train import finish
from cadenza.cli.watching import InterruptedRunError
from cadenza.errors import UsageError
from cadenza.training.config import Config

__all__ = ["contestants", "race"]


def contestants(config: Config, names: Sequence[str]) -> dict[str, Config]:
    """Return the configuration of each strategy: the given one, with those of its strategy's keys that each takes.

    >>> found = contestants(Config(), ["ddp", "diloco"])
    >>> found["ddp"].strategy.arguments, found["diloco"].strategy.arguments["period"]
    ({}, 16)
    """
    names = [name.strip() for name in names]
    if twice := {name for name in names if names.count(name) > 1}:
        raise UsageError(f"--compare names {', '.join(sorted(twice))} twice.")
    return {name: config.with_(**{"strategy.name": name}) for name in names}


def race(
    folder: Path, config: Config, names: Sequence[str], console: Console, *, plain: bool, link: str | None, report: bool
) -> None:
    """Train by each of the strategies, into folders of their names, and compare what came of it."""
    entered = contestants(config, names)
    if config.launch.nnodes != "1":
        raise UsageError("--compare trains on one node.")
    import_task(config, console, plain=plain)
    with nullcontext() if link is None else emulated(link, config) as network:
        for name, entry in entered.items():
            run = make_run(folder / name, entry)
            try:
                with owned(run, entry, console) as lock:
                    carry_out(run, entry, console, plain=plain, network=network, lock=lock)
            except InterruptedRunError as interruption:
                console.print(f"Interrupted while {name} was trained; what there is of it is in {folder}.")
                raise typer.Exit(128 + interruption.number) from None
    finish([folder / name for name in entered], folder / "report.html", console, report=report)

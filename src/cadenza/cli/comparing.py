"""`cadenza train --compare`: the same job by several strategies, one after the other, on the same data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from cadenza.cli.running import carry_out, emulated, import_task, make_run, owned
from cadenza.cli.train import finish
from cadenza.cli.watching import InterruptedRunError
from cadenza.errors import UsageError
from cadenza.training.config import Config, read_config
from cadenza.training.strategies import STRATEGIES, keys_of, nearest

__all__ = ["contestants", "race"]

_STRATEGY = "strategy."


def contestants(file: Path | None, overrides: Mapping[str, Any], names: Sequence[str]) -> dict[str, Config]:
    """Return the configuration of each strategy: the same but for the strategy's keys, of which each takes its own.

    A key that is given beside the file counts for all that take it. What the file says of a strategy is for the one
    that it names.

    >>> found = contestants(None, {"strategy.period": 8}, ["ddp", "diloco"])
    >>> found["ddp"].strategy.arguments, found["diloco"].strategy.arguments["period"]
    ({}, 8)
    """
    names = [name.strip() for name in names]
    if twice := {name for name in names if names.count(name) > 1}:
        raise UsageError(f"--compare names {', '.join(sorted(twice))} twice.")
    keys = {name: keys_of(name) if name in STRATEGIES else () for name in names}
    entered = {name: read_config(file, {**_taken(overrides, keys[name]), "strategy.name": name}) for name in names}
    known = sorted({key for allowed in keys.values() for key in allowed})
    for key in overrides:
        if key not in _taken(overrides, known) and key != "strategy.name":
            hint = nearest(key.removeprefix(_STRATEGY), known)
            raise UsageError(f"{key}: none of {', '.join(names)} takes this key.{hint}")
    return entered


def _taken(overrides: Mapping[str, Any], allowed: Sequence[str]) -> dict[str, Any]:
    """Return the overrides without those keys of [strategy] that are not allowed."""
    return {
        key: value
        for key, value in overrides.items()
        if not key.startswith(_STRATEGY) or key.removeprefix(_STRATEGY).partition(".")[0] in allowed
    }


def race(
    folder: Path, entered: Mapping[str, Config], console: Console, *, plain: bool, link: str | None, report: bool
) -> None:
    """Train by each of the strategies, into folders of their names, and compare what came of it."""
    config = next(iter(entered.values()))
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

"""`cadenza train --compare`: the same job by several strategies, one after the other, on the same data."""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from cadenza.cli.recipes import recipe_for
from cadenza.cli.running import carry_out, emulated, import_task, make_run, owned
from cadenza.cli.train import finish
from cadenza.cli.watching import InterruptedRunError
from cadenza.errors import UsageError
from cadenza.training.config import Config

__all__ = ["Contestant", "contestants", "keys_given", "race"]

_TUNED = "options.lr"  # what decides a race before it begins


@dataclass(frozen=True)
class Contestant:
    """A strategy's configuration, whether its learning rate was tuned for it, and a line that says so."""

    config: Config
    tuned: bool
    told: str


def keys_given(path: Path | None, overrides: Mapping[str, Any]) -> set[str]:
    """Return the dotted keys that a file or a flag has set: a recipe leaves them alone.

    >>> keys_given(None, {"options.lr": 0.1})
    {'options.lr'}
    """
    tables = {} if path is None else tomllib.loads(path.read_text())
    inside = {f"{key}.{name}" for key, value in tables.items() if isinstance(value, dict) for name in value}
    return {*overrides, *inside}


def contestants(config: Config, names: Sequence[str], given: Collection[str] = ()) -> dict[str, Contestant]:
    """Return the configuration of each strategy: the given one, with what its recipe says of it.

    A strategy takes those of the configuration's strategy keys that it knows. If there is a recipe for it on this task,
    its values take the place of the defaults, not of what was `given`; a learning rate that was given leaves it out.

    >>> found = contestants(Config(), ["ddp", "diloco", "slowmo"])
    >>> found["ddp"].config.strategy.arguments, found["diloco"].config.strategy.arguments["period"]
    ({}, 16)
    >>> found["ddp"].told
    'ddp: options.lr = 0.01, from the recipe gpt-ddp'
    """
    names = [name.strip() for name in names]
    if twice := {name for name in names if names.count(name) > 1}:
        raise UsageError(f"--compare names {', '.join(sorted(twice))} twice.")
    return {name: _contestant(config.with_(**{"strategy.name": name}), given) for name in names}


def _contestant(config: Config, given: Collection[str]) -> Contestant:
    name = config.strategy.name
    if _TUNED in given:  # and what the recipe says of the outer step was found with another one
        return Contestant(config, False, f"{name}: {_TUNED} = {config.options['lr']}, as given for all")
    recipe = recipe_for(config.task, name)
    if recipe is None:
        return Contestant(config, False, f"{name}: the task's own learning rate; no recipe has one tuned for it")
    config = config.with_(**{key: value for key, value in recipe.values.items() if key not in given})
    return Contestant(config, True, f"{name}: {_TUNED} = {config.options['lr']}, from the recipe {recipe.name}")


def race(
    folder: Path,
    config: Config,
    names: Sequence[str],
    console: Console,
    *,
    given: Collection[str] = (),
    plain: bool,
    link: str | None,
    report: bool,
) -> None:
    """Train by each of the strategies, into folders of their names, and compare what came of it."""
    entered = contestants(config, names, given)
    if config.launch.nnodes != "1":
        raise UsageError("--compare trains on one node.")
    for entry in entered.values():
        console.print(entry.told)
    if not all(entry.tuned for entry in entered.values()):
        console.print("Not each of them trains at the learning rate that suits it best: that may decide the race.")
    import_task(config, console, plain=plain)
    with nullcontext() if link is None else emulated(link, config) as network:
        for name, entry in entered.items():
            run = make_run(folder / name, entry.config)
            try:
                with owned(run, entry.config, console) as lock:
                    carry_out(run, entry.config, console, plain=plain, network=network, lock=lock)
            except InterruptedRunError as interruption:
                console.print(f"Interrupted while {name} was trained; what there is of it is in {folder}.")
                raise typer.Exit(128 + interruption.number) from None
    finish([folder / name for name in entered], folder / "report.html", console, report=report)

"""`cadenza train --compare`: the same job by several strategies, one after the other, on the same data."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
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
from cadenza.training.config import Config, read_config
from cadenza.training.strategies import STRATEGIES, keys_of, nearest

__all__ = ["Contestant", "contestants", "race"]

_TUNED = "options.lr"  # what decides a race before it begins

_STRATEGY = "strategy."


@dataclass(frozen=True)
class Contestant:
    """A strategy's configuration, whether its learning rate was tuned for it, and a line that says so."""

    config: Config
    tuned: bool
    told: str


def contestants(file: Path | None, overrides: Mapping[str, Any], names: Sequence[str]) -> dict[str, Contestant]:
    """Return the configuration of each strategy: the same but for the strategy's keys, of which each takes its own.

    A key that is given beside the file counts for all that take it. What the file says of a strategy is for the one
    that it names. If there is a recipe for a strategy on this task, its values take the place of the defaults, not of
    what was given; a learning rate that was given leaves it out.

    >>> found = contestants(None, {"strategy.period": 8}, ["ddp", "diloco"])
    >>> found["ddp"].config.strategy.arguments, found["diloco"].config.strategy.arguments["period"]
    ({}, 8)
    >>> found["ddp"].told
    'ddp: options.lr = 0.008, from the recipe gpt-ddp'
    """
    names = [name.strip() for name in names]
    if twice := {name for name in names if names.count(name) > 1}:
        raise UsageError(f"--compare names {', '.join(sorted(twice))} twice.")
    keys = {name: keys_of(name) if name in STRATEGIES else () for name in names}
    entered = {name: _contestant(file, _taken(overrides, keys[name]), name) for name in names}
    known = sorted({key for allowed in keys.values() for key in allowed})
    for key in overrides:
        if key not in _taken(overrides, known) and key != "strategy.name":
            hint = nearest(key.removeprefix(_STRATEGY), known)
            raise UsageError(f"{key}: none of {', '.join(names)} takes this key.{hint}")
    return entered


def _contestant(file: Path | None, overrides: Mapping[str, Any], name: str) -> Contestant:
    config, given = read_config(file, {**overrides, "strategy.name": name}), _given(file, overrides, name)
    if _TUNED in given:  # and what the recipe says of the outer step was found with another one
        return Contestant(config, False, f"{name}: {_TUNED} = {config.options['lr']}, as given for all")
    recipe = recipe_for(config.task, name)
    if recipe is None:
        return Contestant(config, False, f"{name}: the task's own learning rate; no recipe has one tuned for it")
    values = {key: value for key, value in recipe.values.items() if key.startswith(("options.", _STRATEGY))}
    other_period = config.strategy.arguments.get("period") != values.get("strategy.period")
    if other_period or "strategy.defaults" in given:  # the recipe's outer step suits its own period
        values = {key: value for key, value in values.items() if not key.startswith(_STRATEGY)}
    config = config.with_(**{key: value for key, value in values.items() if key not in given})
    told = f"{name}: {_TUNED} = {config.options['lr']}, from the recipe {recipe.name}"
    if elsewhere := _differing(config, Config().with_(**recipe.values)):
        return Contestant(config, False, f"{told}, which was tuned for other values of {', '.join(elsewhere)}")
    return Contestant(config, True, told)


def _differing(one: Config, other: Config) -> list[str]:
    """Return in which keys that decide what learning rate is right two configurations differ."""
    here, there = _deciding(one), _deciding(other)
    return sorted(key for key in here.keys() | there.keys() if here.get(key) != there.get(key))


def _deciding(config: Config) -> dict[str, Any]:
    options = {f"options.{key}": value for key, value in config.options.items()}
    strategy = {f"{_STRATEGY}{key}": value for key, value in config.strategy.arguments.items()}
    launch = {"launch.workers": config.launch.workers, "launch.nnodes": config.launch.nnodes}
    return {"steps": config.steps, **launch, **options, **strategy}


def _given(file: Path | None, overrides: Mapping[str, Any], name: str) -> set[str]:
    """Return the dotted keys that a file or a flag has set for a strategy: a recipe leaves them alone."""
    tables = {} if file is None else tomllib.loads(file.read_text())
    if tables.get("strategy", {}).get("name", Config().strategy.name) != name:
        tables.pop("strategy", None)
    inside = {f"{key}.{one}" for key, value in tables.items() if isinstance(value, dict) for one in value}
    return {*overrides, *inside}


def _taken(overrides: Mapping[str, Any], allowed: Sequence[str]) -> dict[str, Any]:
    """Return the overrides without those keys of [strategy] that are not allowed."""
    return {
        key: value
        for key, value in overrides.items()
        if not key.startswith(_STRATEGY) or key.removeprefix(_STRATEGY).partition(".")[0] in allowed
    }


def race(
    folder: Path, entered: Mapping[str, Contestant], console: Console, *, plain: bool, link: str | None, report: bool
) -> None:
    """Train by each of the strategies, into folders of their names, and compare what came of it."""
    config = next(iter(entered.values())).config
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

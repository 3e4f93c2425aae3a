"""The selftest's verdicts as a person reads them, and as a bug report carries them."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from cadenza.cli.selftest.crew import Outcome
from cadenza.cli.selftest.parts import PARTS
from cadenza.cli.selftest.setups import Setup, accelerator
from cadenza.codecs.kernels import implementations
from cadenza.codecs.triton_launch import triton_version
from cadenza.version import __version__

__all__ = ["show", "to_plain"]

_MARKS = {"passed": "[green]✓[/]", "failed": "[bold red]✗[/]", "not here": "–"}


def show(
    parts: Sequence[str],
    setups: Sequence[Setup],
    outcomes: Mapping[tuple[str, str], Outcome],
    file: str | None,
    console: Console,
) -> None:
    """Print a row a part, a column a setup, and what was seen."""
    workers = max(setup.workers for setup in setups)
    console.print(
        f"[bold]cadenza selftest[/bold]: {workers} workers on this machine "
        f"(cadenza {__version__}, torch {torch.__version__})",
        highlight=False,
    )
    table = Table(box=SIMPLE)
    table.add_column("")
    for setup in setups:
        table.add_column(setup.name, justify="center", no_wrap=True)
    for part in parts:
        table.add_row(PARTS[part].title, *(_MARKS[outcomes[part, setup.name].verdict] for setup in setups))
    console.print(table)
    for setup in setups:
        if setup.missing:
            console.print(f"–  {setup.name}: not here, {setup.missing}", highlight=False, markup=False)
    for (part, where), outcome in outcomes.items():
        if outcome.verdict != "not here":
            line = f"{PARTS[part].title}, {where}: {outcome.text} ({outcome.seconds:.1f} s)"
            console.print(f"{_MARKS[outcome.verdict]}  ", end="")
            console.print(line, highlight=False, markup=False, soft_wrap=True)
    failed = [outcome for outcome in outcomes.values() if outcome.verdict == "failed"]
    if failed:
        told = f"attach {file}" if file else "run it again with --json selftest.json, and attach that file"
        console.print(
            f"\n{len(failed)} failed. For a bug report, {told}: it has the versions, the devices and the tracebacks.",
            highlight=False,
            soft_wrap=True,
        )


def to_plain(setups: Sequence[Setup], outcomes: Mapping[tuple[str, str], Outcome], seconds: float) -> dict[str, Any]:
    """Return everything as JSON can hold it; there is no name of a host, a user or a folder of his in what passed."""
    return {
        "passed": all(outcome.verdict != "failed" for outcome in outcomes.values()),
        "seconds": seconds,
        "versions": {
            "cadenza": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "triton": triton_version(),
            "cuda": torch.version.cuda,
            "hip": torch.version.hip,
        },
        "machine": {"system": platform.platform(), "cores": os.cpu_count(), "devices": _devices()},
        "codecs": {setup.device: implementations(setup.device_of(0)) for setup in setups if not setup.missing},
        "setups": [asdict(setup) for setup in setups],
        "results": [{"part": part, "where": where, **asdict(o)} for (part, where), o in outcomes.items()],
    }


def _devices() -> list[str]:
    kind = accelerator()
    if kind is None:
        return []
    module = torch.get_device_module(kind)
    return [str(module.get_device_name(index)) for index in range(torch.accelerator.device_count())]

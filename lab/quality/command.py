"""The program: go on with the queue, say how far it is, write the report."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import torch
from lab.quality.records import Records
from lab.quality.studies import QUEUE, Study, missing
from lab.quality.training import Setting, train

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m lab.quality", description="How well each method trains.")
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run", help="go on with the queue")
    running.add_argument("--minutes", type=float, default=60, help="start no run after so many minutes")
    running.add_argument("--only", default="", help="only what has this word in its name")
    running.add_argument("--eager", action="store_true", help="do not compile: for machines without a C++ compiler")
    commands.add_parser("status", help="how far the queue is")
    commands.add_parser("report", help="write tables and pictures")
    given = parser.parse_args(arguments)
    if given.command == "run":
        run(given.minutes, only=given.only, compiled=not given.eager)
    elif given.command == "status":
        status(Records())
    else:
        from lab.quality.report import write

        write(Records())


def run(minutes: float, *, only: str = "", compiled: bool = True) -> None:
    """Do runs, the most wanted first, until the time is up or nothing is left that nobody else is doing."""
    torch.set_num_threads(1)
    records, until = Records(), time.monotonic() + 60 * minutes
    while time.monotonic() < until:
        records.refresh()
        if not any(_do(name, setting, records, compiled) for name, setting in missing(records) if only in name):
            return


def _do(name: str, setting: Setting, records: Records, compiled: bool) -> bool:
    with records.claimed(setting) as mine:
        if not mine:
            return False
        records.refresh()  # whoever had claimed it may have ended just now
        if records.get(setting) is not None:
            return True
        result = train(setting, compiled=compiled)
        records.add(setting, result)
    told = {key: value for key, value in setting.strategy.items() if key != "name"}
    print(
        f"{name} | lr {setting.lr:g} batch {setting.batch} seed {setting.seed} {told}: validation "
        f"{result['validation']:.4f} test {result['test']:.4f}, {result['cpu_seconds']:.0f} s",
        flush=True,
    )
    return True


def status(records: Records) -> None:
    """Print a line for each entry of the queue."""
    for entry in QUEUE:
        wanted, tuned = entry.wanted(records), entry.tuned(records)
        if tuned is not None:
            print(f"{entry.name}: tuned; {len(wanted)} final runs to do")
            continue
        found = entry.found(records) if isinstance(entry, Study) else None
        if found is None or found.best is None:
            print(f"{entry.name}: {'to be begun' if wanted else 'waits for another'}")
        elif found.edges:
            print(f"{entry.name}: AT THE EDGE of {', '.join(found.edges)}: {found.best}; make the axis longer")
        else:
            print(f"{entry.name}: tuning; best so far {found.best}")

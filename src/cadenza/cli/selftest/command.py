"""The command `cadenza selftest`."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

import typer

from cadenza.errors import UsageError

__all__ = ["selftest"]

_MOST_WORKERS = 16


def selftest(
    only: Annotated[
        list[str] | None, typer.Option(help="Parts to try; may be given several times, or with commas.")
    ] = None,
    workers: Annotated[int, typer.Option(help="Worker processes on this machine.")] = 4,
    minutes: Annotated[float, typer.Option(help="How long it may take at most.")] = 5.0,
    timeout: Annotated[float, typer.Option(help="Seconds that a worker waits for the others.")] = 30.0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all of it into this file.")] = None,
) -> None:
    """Try on this machine whether all of Cadenza works: on each device, over each way between workers.

    Parts: drop-in, strategies, codecs, overlap, resume, killed-worker. Exits with 0 if nothing failed, 1 if something
    did, 2 after bad input. What is not here, such as a GPU, does not fail.
    """
    parts = _check(only, workers, minutes, timeout)
    if json_file is not None and not json_file.parent.is_dir():
        raise UsageError(f"--json: there is no folder {json_file.parent}.")
    raise typer.Exit(_run(parts, workers, 60 * minutes, timeout, json_file))


def _check(only: list[str] | None, workers: int, minutes: float, timeout_s: float) -> list[str]:
    from cadenza.cli.selftest.parts import PARTS

    given = [name for words in only or [",".join(PARTS)] for name in words.split(",")]
    for name in given:
        if name not in PARTS:
            raise UsageError(f'--only: there is no part "{name}". Allowed: {", ".join(PARTS)}.')
    if not 3 <= workers <= _MOST_WORKERS:
        raise UsageError(f"--workers is between 3 (one of them is killed) and {_MOST_WORKERS}; got {workers}.")
    if not minutes > 0 or not timeout_s > 0:
        raise UsageError(f"--minutes and --timeout are more than 0; got {minutes:g} and {timeout_s:g}.")
    return [name for name in PARTS if name in given]


def _run(parts: list[str], workers: int, seconds: float, timeout_s: float, file: Path | None) -> int:
    from rich.console import Console

    from cadenza.cli.selftest.crew import Outcome, run_all
    from cadenza.cli.selftest.parts import PARTS
    from cadenza.cli.selftest.plan import Plan
    from cadenza.cli.selftest.setups import setups_here
    from cadenza.cli.selftest.showing import show, to_plain
    from cadenza.participants.store import serve

    start = time.monotonic()
    setups = setups_here(workers)
    store = serve(host="127.0.0.1")
    plan = Plan.make(parts, setups, address=f"127.0.0.1:{store.port}", timeout_s=timeout_s)
    with Console(stderr=True).status("starting workers …") as status:
        found = run_all(
            plan,
            store,
            start + seconds,
            lambda trial: status.update(f"{PARTS[trial.part].title}, {trial.setup.name} …"),
        )
    cells = [(part, setup) for part in parts for setup in setups]
    outcomes = {
        (part, setup.name): found.get((part, setup.name)) or Outcome("not here", setup.missing or "tried elsewhere")
        for part, setup in cells
    }
    plain = to_plain(setups, outcomes, time.monotonic() - start)
    if file is not None:
        file.write_text(json.dumps(plain, indent=1) + "\n")
    show(parts, setups, outcomes, None if file is None else str(file), Console())
    return 0 if plain["passed"] else 1

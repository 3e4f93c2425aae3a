"""One worker of a run: what the launcher starts, and what torchrun can start without it.

    torchrun --nproc-per-node 4 -m cadenza.cli.worker runs/mine
    torchrun --nproc-per-node 4 -m cadenza.cli.worker runs/mine --config mine.toml

The first goes on with a run whose folder is there; the second makes the folder if it is not. It ends with 0 when the
run has finished or was interrupted, with 2 after bad input, with 3 if all workers that are there are new and must
begin together, with 4 if there is no room left on the disk, with 1 after any other error.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from cadenza.cli.exit_codes import BAD_INPUT, FAILED, FULL_DISK, NOBODY_LEFT
from cadenza.cli.parent_death import end_with_parent
from cadenza.errors import (
    CadenzaError,
    CheckpointError,
    NobodyLeftError,
    TopologyError,
    TurnedAwayError,
    UsageError,
)
from cadenza.training.config import Config, read_config
from cadenza.training.loop import run_worker
from cadenza.training.metrics import NO_ROOM
from cadenza.training.runs import Run, create, open_run

__all__ = ["main"]

_OTHERS_S = 10.0  # for another worker to finish making the folder that all share


def main(arguments: Sequence[str] | None = None) -> int:
    """Train as one worker; return the exit code."""
    parser = argparse.ArgumentParser(prog="cadenza.cli.worker", description="Train as one worker of a run.")
    parser.add_argument("folder", type=Path, help="the run's folder")
    parser.add_argument("--config", type=Path, help="a TOML file, to make a new run of")
    given = parser.parse_args(arguments)
    try:
        if given.config is None:
            run_worker(given.folder)
        else:
            _train_by(read_config(given.config), given.folder)
    except (UsageError, TopologyError, CheckpointError, TurnedAwayError) as error:  # what was asked for cannot be
        print(f"cadenza: {error}", file=sys.stderr)
        return BAD_INPUT
    except NobodyLeftError as error:
        print(f"cadenza: {error}", file=sys.stderr)
        return NOBODY_LEFT
    except Exception as error:
        full = _is_of_a_full_disk(error)
        with suppress(OSError):  # where the log is on that disk
            if full or isinstance(error, CadenzaError):
                print(f"cadenza: {error}", file=sys.stderr, flush=True)
            else:
                traceback.print_exc()
        return FULL_DISK if full else FAILED
    return 0


def _is_of_a_full_disk(error: BaseException | None) -> bool:
    """Say whether an error, or what it came from, is that there was no room."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in NO_ROOM:
            return True
        error = error.__cause__
    return False


def _train_by(config: Config, folder: Path) -> None:
    """Train in a folder that one worker makes for all, unless it is there, as when a launcher starts workers anew."""
    problem = _make(config, folder)
    if problem and _is_being_made(Run(folder)):
        problem = _make(config, folder)
    if problem:
        raise UsageError(problem)
    run_worker(folder)


def _make(config: Config, folder: Path) -> str:
    """Make a run's folder; return what is wrong, if something is."""
    try:
        if not Run(folder).config_file.exists():
            create(folder, config)
        elif open_run(folder).config().to_toml() != config.to_toml():
            return f"{folder} is a run with another configuration: give the new run another folder."
    except UsageError as error:
        return str(error)
    return ""


def _is_being_made(run: Run) -> bool:
    """Wait while another worker makes the folder; say whether it has."""
    deadline = time.monotonic() + _OTHERS_S
    while run.metrics.is_dir() and time.monotonic() < deadline:  # which is made first, and the configuration last
        if run.config_file.exists():
            return True
        time.sleep(0.1)
    return False


if __name__ == "__main__":
    end_with_parent()
    code = main()
    with suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    if code:
        os._exit(code)  # without waiting for threads that wait for workers that are no more
    sys.exit(0)

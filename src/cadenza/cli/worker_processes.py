"""What the programs that start workers have in common: their log files, and reports to the front.

The elastic agent (`cadenza.cli.agent`) and the supervisor (`cadenza.cli.supervisor`) run in processes of their own.
They report to the front, `cadenza train`, by lines of JSON on their standard output; the rest goes to a log.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import LogsSpecs, PContext, start_processes
from torch.distributed.elastic.multiprocessing.api import LogsDest

from cadenza.cli.plans import WorkerCommand

__all__ = ["WorkerLogs", "report_failures", "report_problem", "start_workers"]


class WorkerLogs(LogsSpecs):
    """One file a worker and stream, by the worker's rank, not by its place on the node."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder))
        self._folder = folder

    @property
    def root_log_dir(self) -> str:
        return str(self._folder)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        self._folder.mkdir(parents=True, exist_ok=True)
        destination = LogsDest()
        for local_rank, env in envs.items():
            attempt = int(env["TORCHELASTIC_RESTART_COUNT"])
            name = f"worker-{int(env['RANK']):05d}" + (f".attempt-{attempt}" if attempt else "")
            destination.stdouts[local_rank] = str(self._folder / f"{name}.out")
            destination.stderrs[local_rank] = str(self._folder / f"{name}.err")
            destination.error_files[local_rank] = str(self._folder / f"{name}.error.json")
            env["TORCHELASTIC_ERROR_FILE"] = destination.error_files[local_rank]
        return destination


def start_workers(name: str, commands: list[WorkerCommand], logs: Path, *, attempt: int = 0) -> PContext:
    """Start workers that are watched, and ended, as one; torch knows them by their places in the list."""
    arguments = {place: tuple(one.command[1:]) for place, one in enumerate(commands)}
    restarts = {"TORCHELASTIC_RESTART_COUNT": str(attempt)}
    envs = {place: {**one.env, "RANK": str(one.worker), **restarts} for place, one in enumerate(commands)}
    return start_processes(name, commands[0].command[0], arguments, envs, WorkerLogs(logs))


def report_failures(exit_codes: Mapping[int, int]) -> None:
    """Report the workers that ended badly, with their exit codes, below 0 if a signal ended them."""
    _report(event="failed", failures=[{"worker": worker, "exitcode": code} for worker, code in exit_codes.items()])


def report_problem(error: str) -> None:
    """Report why workers could not be started."""
    _report(event="problem", error=error)


def _report(**what: Any) -> None:
    print(json.dumps(what), flush=True)

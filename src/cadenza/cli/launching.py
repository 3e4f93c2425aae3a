"""Starting the workers of a run on this node, or on the hosts of an emulated network, and ending them again.

A program in a process of its own starts them (`cadenza.cli.programs`). What they print goes to files in the run's
folder. All end with the process that started them: a front that is killed leaves nothing running.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from cadenza.cli.programs import WORKER_MODULE, Program
from cadenza.emulation import Network

__all__ = ["Crash", "Workers", "log_folder"]


@dataclass(frozen=True)
class Crash:
    """A worker that ended badly: its number and its exit code, below 0 if a signal ended it."""

    worker: int
    exitcode: int


def log_folder(folder: Path) -> Path:
    """Return where the logs of the next launch go: each resume has its own.

    >>> log_folder(Path("runs/new")).as_posix()
    'runs/new/logs/launch-001'
    """
    names = (path.name.removeprefix("launch-") for path in (folder / "logs").glob("launch-*"))
    launches = [int(name) for name in names if name.isdecimal()]
    return folder / "logs" / f"launch-{max(launches, default=0) + 1:03d}"


class Workers:
    """The workers that a program has started.

    Args:
        program: The program.
        logs: The folder for its own log.
        network: An emulated network, if the program runs there.
        lock: The file of the run's lock, which the program holds until its last worker has ended.

    Attributes:
        leads: Whether this node is the one that shows and draws what all have done.
        crashes: The workers that have ended badly.
        problem: Why they could not be started, if so.
    """

    def __init__(self, program: Program, logs: Path, network: Network | None = None, lock: int | None = None) -> None:
        self.leads = program.leads
        self.crashes: list[Crash] = []
        self.problem = ""
        self._program = program
        self._process = _start(program, logs, network, lock)
        self._reports = _Reports(self._process)

    def poll(self) -> bool | None:
        """Return None while they run, then whether all have ended well, as far as the run needs them."""
        code = self._process.poll()
        for report in self._reports.read():
            self._take(report)
        if code is None:
            return None
        self._reports.close()
        if code < 0:
            self.problem = self.problem or f"{self._program.title} was ended by {signal.Signals(-code).name}."
        return code == 0

    def processes(self) -> list[psutil.Process]:
        """Return the processes of those that run."""
        return [child for child in _children(self._process) if _is_worker(child)]

    def ask(self, process: psutil.Process, number: int) -> None:
        """Ask one of them to stop, as a signal has asked the front."""
        interrupts = self._program.passes_interrupts and number == signal.SIGINT
        process.send_signal(signal.SIGINT if interrupts else signal.SIGTERM)

    def kill(self) -> None:
        """End them at once."""
        doomed = _children(self._process)
        self._process.kill()
        for process in doomed:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(doomed, timeout=10)
        self._process.wait()

    def _take(self, report: Any) -> None:
        match report:
            case {"event": "failed", "failures": failures}:
                self.crashes = [Crash(failure["worker"], failure["exitcode"]) for failure in failures]
            case {"event": "problem", "error": error}:
                self.problem = error


def _start(program: Program, folder: Path, network: Network | None, lock: int | None) -> subprocess.Popen[bytes]:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{program.log_name}-{socket.gethostname()}-{os.getpid()}.log").open("a") as log:
        options: dict[str, Any] = {
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": log,
            "start_new_session": True,  # Ctrl-C reaches the front alone
            "pass_fds": () if lock is None else (lock,),
        }
        if network is None:
            return subprocess.Popen(program.command, env={**os.environ, **program.env}, **options)
        # On the first host, where the store of elastic workers is, which it has to reach.
        return network.start(0, program.command, env=program.env, **options)


class _Reports:
    """What a program reports on its standard output, a line of JSON at a time; reading it never waits."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        self._pipe = process.stdout
        os.set_blocking(self._pipe.fileno(), False)
        self._rest = b""

    def read(self) -> list[Any]:
        """Return what was reported since the last time."""
        if self._pipe.closed:
            return []
        while chunk := self._pipe.read(65536):
            self._rest += chunk
        *lines, self._rest = self._rest.split(b"\n")
        found = []
        for line in lines:
            with contextlib.suppress(ValueError):  # not the program's own, but something that a library printed
                found.append(json.loads(line))
        return found

    def close(self) -> None:
        self._pipe.close()


def _children(parent: subprocess.Popen[bytes]) -> list[psutil.Process]:
    try:
        return list(psutil.Process(parent.pid).children())
    except psutil.NoSuchProcess:
        return []


def _is_worker(process: psutil.Process) -> bool:
    """Say whether a child is a worker, and not a store, or one that is only just becoming what it will be."""
    try:
        return WORKER_MODULE in process.cmdline()
    except psutil.Error:
        return False

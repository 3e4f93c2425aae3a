"""Starting the workers of a run, on this node or on hosts of an emulated network, and ending them again.

Either way the workers are ``python -m cadenza.cli.worker FOLDER`` with torchrun's environment; what they print goes to
files in the run's folder. They follow the process that started them: a front that is killed leaves nothing running.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import psutil  # type: ignore[import-untyped]

from cadenza.cli.agent import Plan
from cadenza.cli.leash import PARENT
from cadenza.cli.rendezvous import arrange, node_range
from cadenza.emulation import Network
from cadenza.training.config import LaunchSettings

__all__ = [
    "Crash",
    "ElasticWorkers",
    "LinkedWorkers",
    "Told",
    "Workers",
    "kill_with_children",
    "log_folder",
    "worker_command",
    "worker_environment",
]


@dataclass(frozen=True)
class Crash:
    """A worker that ended badly: its number and its exit code, below 0 if a signal ended it."""

    worker: int
    exitcode: int


class Workers(Protocol):
    """The workers of this node, once they were started."""

    leads: bool
    """Whether this node is the one that shows and draws what all have done."""
    crashes: list[Crash]
    """The workers that have ended badly."""
    problem: str
    """Why they could not be started, if so."""

    def poll(self) -> bool | None:
        """Return None while they run, then whether all have ended well."""

    def processes(self) -> list[psutil.Process]:
        """Return the processes of those that run."""

    def ask(self, process: psutil.Process, number: int) -> None:
        """Ask one of them to stop, as a signal has asked the front."""

    def kill(self) -> None:
        """End them at once."""


def log_folder(folder: Path) -> Path:
    """Return where the logs of the next launch go: each resume has its own.

    >>> log_folder(Path("runs/new")).as_posix()
    'runs/new/logs/launch-001'
    """
    launches = [int(path.name.rpartition("-")[2]) for path in (folder / "logs").glob("launch-*")]
    return folder / "logs" / f"launch-{max(launches, default=0) + 1:03d}"


def worker_command(folder: Path) -> list[str]:
    """Return the command of a worker."""
    return [sys.executable, "-m", "cadenza.cli.worker", str(folder)]


def worker_environment(launch: LaunchSettings) -> dict[str, str]:
    """Return what all workers, and who starts them, find in their environment."""
    return {
        PARENT: str(os.getpid()),
        "OMP_NUM_THREADS": str(launch.threads),
        "PYTHONUNBUFFERED": "1",  # what a worker printed before it was killed is in its log
        "PYTHONFAULTHANDLER": "1",
    }


class Told:
    """What a process of ours tells on its standard output, a line of JSON at a time; reading it never waits."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        self._pipe = process.stdout
        os.set_blocking(self._pipe.fileno(), False)
        self._rest = b""

    def read(self) -> list[Any]:
        """Return what was told since the last time."""
        if self._pipe.closed:
            return []
        while chunk := self._pipe.read(65536):
            self._rest += chunk
        *lines, self._rest = self._rest.split(b"\n")
        told = []
        for line in lines:
            with contextlib.suppress(ValueError):  # not the process's own, but something that a library printed
                told.append(json.loads(line))
        return told

    def close(self) -> None:
        self._pipe.close()


class ElasticWorkers:
    """The workers of one node, under torch's elastic agent in a process of its own.

    Args:
        folder: The run's folder.
        launch: How many workers on how many nodes, and where those meet.
        logs: The folder for what the workers print.
    """

    def __init__(self, folder: Path, launch: LaunchSettings, logs: Path) -> None:
        least, most = node_range(launch.nnodes)
        meeting = arrange(launch, name=folder.resolve().name)
        plan = Plan(
            command=worker_command(folder),
            logs=str(logs),
            workers=launch.workers,
            min_nodes=least,
            max_nodes=most,
            rdzv_backend=meeting.backend,
            rdzv_endpoint=meeting.endpoint,
            rdzv_id=meeting.name,
            rdzv_configs=meeting.configs,
            local_addr=meeting.local_addr,
            max_restarts=launch.max_restarts,
        )
        environment = {**os.environ, **worker_environment(launch)}
        if meeting.interface is not None:
            environment.setdefault("GLOO_SOCKET_IFNAME", meeting.interface)
        if launch.max_restarts or least != most:
            # Workers that are started anew must not find the addresses of those before them in the agent's store.
            environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        self.leads = meeting.leads
        self.crashes: list[Crash] = []
        self.problem = ""
        agents = logs.parent
        agents.mkdir(parents=True, exist_ok=True)
        with (agents / f"agent-{socket.gethostname()}-{os.getpid()}.log").open("a") as log:
            self._agent = subprocess.Popen(
                [sys.executable, "-m", "cadenza.cli.agent", plan.to_json()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                start_new_session=True,  # Ctrl-C reaches the front alone
            )
        self._told = Told(self._agent)

    def poll(self) -> bool | None:
        code = self._agent.poll()
        for told in self._told.read():
            self._take(told)
        if code is None:
            return None
        self._told.close()
        if code < 0 and not self.crashes:
            self.problem = self.problem or f"The elastic agent was ended by {signal.Signals(-code).name}."
        return code == 0

    def processes(self) -> list[psutil.Process]:
        return _children(self._agent)

    def ask(self, process: psutil.Process, number: int) -> None:
        process.terminate()

    def kill(self) -> None:
        kill_with_children(self._agent)

    def _take(self, told: Any) -> None:
        match told:
            case {"event": "failed", "failures": failures}:
                self.crashes = [Crash(failure["worker"], failure["exitcode"]) for failure in failures]
            case {"event": "apart", "error": error}:
                self.problem = error


class LinkedWorkers:
    """Workers on the hosts of an emulated network, one on each.

    Args:
        folder: The run's folder.
        launch: How many threads they have; the rest is the network's.
        logs: The folder for what the workers print.
        network: The network; its hosts are the workers.
    """

    def __init__(self, folder: Path, launch: LaunchSettings, logs: Path, network: Network) -> None:
        self.leads = True
        self.crashes: list[Crash] = []
        self.problem = ""
        logs.mkdir(parents=True)
        self._workers: list[subprocess.Popen[bytes]] = []
        for rank in range(len(network.hosts)):
            name = f"worker-{rank:05d}"
            with (logs / f"{name}.out").open("wb") as out, (logs / f"{name}.err").open("wb") as err:
                worker = network.start(
                    rank,
                    worker_command(folder),
                    env=worker_environment(launch),
                    stdout=out,
                    stderr=err,
                    start_new_session=True,
                )
            self._workers.append(worker)

    def poll(self) -> bool | None:
        codes = [worker.poll() for worker in self._workers]
        if any(codes) and not self.crashes:
            self.crashes = [Crash(rank, code) for rank, code in enumerate(codes) if code]
            self.kill()
            return False
        return None if None in codes else not any(codes)

    def processes(self) -> list[psutil.Process]:
        running = [worker.pid for worker in self._workers if worker.poll() is None]
        return [psutil.Process(pid) for pid in running]

    def ask(self, process: psutil.Process, number: int) -> None:
        process.terminate()

    def kill(self) -> None:
        for worker in self._workers:
            if worker.poll() is None:
                worker.kill()
        for worker in self._workers:
            worker.wait()


def kill_with_children(parent: subprocess.Popen[bytes]) -> None:
    """End a process and those that it has started, at once."""
    doomed = _children(parent)
    parent.kill()
    for process in doomed:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(doomed, timeout=10)
    parent.wait()


def _children(parent: subprocess.Popen[bytes]) -> list[psutil.Process]:
    try:
        return list(psutil.Process(parent.pid).children())
    except psutil.NoSuchProcess:
        return []

"""The workers of a run under `skip_round` and `shrink`: each may end and come back while the others train on.

A supervisor in a process of its own looks after them (`cadenza.cli.supervisor`), and after the store in which they
meet: on one node, on the first of several, or on the first host of an emulated network.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from cadenza.cli.launching import Crash, Told, kill_with_children, worker_command, worker_environment
from cadenza.cli.rendezvous import Place, store_place
from cadenza.cli.supervisor import Plan, Post
from cadenza.emulation import Network
from cadenza.training.config import Config
from cadenza.training.runs import Run

__all__ = ["SupervisedWorkers"]


class SupervisedWorkers:
    """The workers of one node, or of the hosts of an emulated network, under a supervisor.

    Args:
        folder: The run's folder.
        config: The run's configuration.
        logs: The folder for what the workers print.
        network: An emulated network, if its hosts are the workers.
    """

    def __init__(self, folder: Path, config: Config, logs: Path, network: Network | None) -> None:
        place = store_place(config, network)
        plan = Plan(
            posts=_posts(folder, config, place, network),
            metrics=str(Run(folder).metrics),
            logs=str(logs),
            job=os.environ.get("CADENZA_JOB") or config.launch.rdzv_id or folder.resolve().name,
            host=place.host,
            port=place.port,
            store=[sys.executable, "-m", "cadenza.cli.store"] if place.serves else [],
            restarts=config.faults.restarts,
            eager=config.faults.policy == "shrink",
        )
        self.leads = place.leads
        self.crashes: list[Crash] = []
        self.problem = ""
        self._several = config.launch.nnodes != "1"
        self._running: dict[int, int] = {}  # process by worker
        logs.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "cadenza.cli.supervisor", plan.to_json()]
        environment = worker_environment(config.launch)
        with (logs.parent / f"supervisor-{socket.gethostname()}-{os.getpid()}.log").open("a") as log:
            options: dict[str, Any] = {
                "stdin": subprocess.DEVNULL,
                "stdout": subprocess.PIPE,
                "stderr": log,
                "start_new_session": True,  # Ctrl-C reaches the front alone
            }
            if network is None:
                self._supervisor = subprocess.Popen(command, env={**os.environ, **environment}, **options)
            else:  # on the host of the store, which it has to reach
                self._supervisor = network.start(0, command, env=environment, **options)
        self._told = Told(self._supervisor)

    def poll(self) -> bool | None:
        code = self._supervisor.poll()
        for told in self._told.read():
            self._take(told)
        if code is None:
            return None
        self._told.close()
        if code < 0:
            self.problem = self.problem or f"The supervisor was ended by {signal.Signals(-code).name}."
        return code == 0

    def processes(self) -> list[psutil.Process]:
        found = []
        for pid in self._running.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                found.append(psutil.Process(pid))
        return found

    def ask(self, process: psutil.Process, number: int) -> None:
        """Ask a worker to stop: of several nodes, one that is told to end leaves, and Ctrl-C stops all of them."""
        process.send_signal(signal.SIGINT if self._several and number == signal.SIGINT else signal.SIGTERM)

    def kill(self) -> None:
        kill_with_children(self._supervisor)

    def _take(self, told: Any) -> None:
        match told:
            case {"event": "started", "worker": worker, "pid": pid}:
                self._running[worker] = pid
            case {"event": "ended", "worker": worker}:
                self._running.pop(worker, None)
            case {"event": "failed", "failures": failures}:
                self.crashes = [Crash(failure["worker"], failure["exitcode"]) for failure in failures]
            case {"event": "apart", "error": error}:
                self.problem = error


def _posts(folder: Path, config: Config, place: Place, network: Network | None) -> list[Post]:
    launch = config.launch
    command = worker_command(folder)
    if network is not None:
        return [Post(rank, host.command(command), network.environment(rank)) for rank, host in enumerate(network.hosts)]
    env = {"WORLD_SIZE": str(place.workers), "LOCAL_WORLD_SIZE": str(launch.workers)}
    if place.interface is not None and "GLOO_SOCKET_IFNAME" not in os.environ:
        env["GLOO_SOCKET_IFNAME"] = place.interface
    first = launch.node_rank * launch.workers
    return [Post(first + local, command, {**env, "LOCAL_RANK": str(local)}) for local in range(launch.workers)]

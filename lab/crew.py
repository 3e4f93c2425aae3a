"""Workers as processes that are killed and started again in milliseconds, and what the kernel says of them.

They are forked from a process that has imported everything. A worker has one process, or as many as it has ranks; it is
started, ended and counted as one.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

__all__ = ["Crew", "Usage", "slope", "start_store", "until"]

Usage = dict[str, int]


class Crew:
    """The workers of a job.

    Args:
        target: What each process runs, with its worker's number, its rank in the worker, and what it is told.
        told: What all are told.
        ranks: How many processes a worker has.
    """

    def __init__(self, target: Callable[[int, int, dict[str, Any]], None], told: dict[str, Any], *, ranks: int = 1):
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([target.__module__])
        self._target, self._told, self._ranks = target, told, ranks
        self.processes: dict[int, list[Any]] = {}

    def start(self, worker: int) -> None:
        given = [(worker, rank, self._told) for rank in range(self._ranks)]
        self.processes[worker] = [self._context.Process(target=self._target, args=one, daemon=True) for one in given]
        for process in self.processes[worker]:
            process.start()

    def send(self, worker: int, number: int) -> None:
        for process in self.processes[worker]:
            os.kill(process.pid, number)

    def kill(self, worker: int) -> None:
        self.send(worker, signal.SIGKILL)
        self.join(worker)

    def join(self, worker: int, seconds: float = 60.0) -> list[int | None]:
        """Return the exit codes of a worker that ends; None for a process that does not."""
        deadline = time.monotonic() + seconds
        for process in self.processes[worker]:
            process.join(max(0.0, deadline - time.monotonic()))
        return [process.exitcode for process in self.processes[worker]]

    def ended(self) -> dict[int, list[int | None]]:
        """Return the exit codes of workers of which a process has ended."""
        codes = {worker: [process.exitcode for process in many] for worker, many in self.processes.items()}
        return {worker: found for worker, found in codes.items() if found != [None] * len(found)}

    def usage(self, worker: int) -> Usage:
        return total(usage(process.pid) for process in self.processes[worker])

    def close(self) -> None:
        for worker, many in self.processes.items():
            for process in many:
                process.kill()
            self.join(worker)


def start_store(*options: str, secret: str | None = None) -> tuple[subprocess.Popen[str], int]:
    """Start a store in a process of its own, with a secret or without one; return it and its port."""
    command = [sys.executable, "-m", "cadenza.membership", "--host", "127.0.0.1", *options]
    environment = {key: value for key, value in os.environ.items() if key != "CADENZA_SECRET"}
    if secret is not None:
        environment["CADENZA_SECRET"] = secret
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def usage(number: int) -> Usage:
    """Return what a process holds: file descriptors, threads, memory in kB; nothing if it is over."""
    try:
        status = dict(line.split(":", 1) for line in Path(f"/proc/{number}/status").read_text().splitlines())
        descriptors = len(list(Path(f"/proc/{number}/fd").iterdir()))
        return {"descriptors": descriptors, "threads": int(status["Threads"]), "kB": int(status["VmRSS"].split()[0])}
    except (OSError, KeyError):
        return {}


def total(many: Iterable[Usage]) -> Usage:
    found = list(many)
    return {key: sum(one.get(key, 0) for one in found) for key in (found[0] if found else ())}


def slope(points: Iterable[tuple[float, float]]) -> float:
    """Return the slope of the line that fits points best.

    >>> slope([(0, 1), (1, 3), (2, 5)])
    2.0
    """
    xs, ys = zip(*points, strict=True)
    middle = sum(xs) / len(xs)
    spread = sum((x - middle) ** 2 for x in xs)
    return sum((x - middle) * y for x, y in zip(xs, ys, strict=True)) / spread if spread else 0.0


def until(seen: Callable[[], bool], seconds: float, what: str) -> None:
    """Wait until something is seen."""
    deadline = time.monotonic() + seconds
    while not seen():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} was not seen within {seconds:g} s")
        time.sleep(0.02)

"""The real command, in a process of its own: what it prints, how it ends, and whether it leaves anything running."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import socket
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

PATIENCE_S = 250  # a busy machine takes a minute for what takes ten seconds on a quiet one
TASK = "support.tiny_task:build"
QUIET = ["--set", "log.tensorboard=false"]
SLOW = ["--set", "options.slow=0", "--set", "options.slow_s=0.02"]


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "cadenza.cli", *(str(argument) for argument in arguments)]


def environment() -> dict[str, str]:
    """What finds the same modules as this process, with a terminal that wraps nothing of interest."""
    path = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, sys.path)])
    return {**os.environ, "PYTHONPATH": path, "COLUMNS": "200"}


@contextmanager
def started(*arguments: object, folder: Path, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """The command, at work; ended in any case. The variables are added to its environment."""
    front = subprocess.Popen(
        command(*arguments),
        cwd=folder,
        env={**environment(), **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield front
    finally:
        if front.poll() is None:
            front.kill()
        front.communicate()


def cadenza(*arguments: object, folder: Path, code: int = 0) -> str:
    """Run the command in a folder, and return what it printed, errors included."""
    with started(*arguments, folder=folder) as front:
        printed, _ = front.communicate(timeout=PATIENCE_S)
    assert front.returncode == code, printed
    return printed


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def processes_of(run: Path) -> list[psutil.Process]:
    """The agent and the workers of a run."""
    found = []
    for process in psutil.process_iter():
        try:
            words = " ".join(process.cmdline())
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        if "cadenza.cli" in words and str(run) in words:
            found.append(process)
    return found


def wait_until(condition: Callable[[], bool], seconds: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def has_begun(run: Path, workers: int, steps: int = 1) -> Callable[[], bool]:
    """Whether all workers of a run have taken so many steps."""
    files = [run / "metrics" / f"worker-{worker:05}.jsonl" for worker in range(workers)]
    return lambda: all(file.exists() and file.read_bytes().count(b'"kind": "step"') >= steps for file in files)


class Terminal:
    """The command on a terminal of its own, as large as one says."""

    def __init__(self, *arguments: object, folder: Path, columns: int = 100, rows: int = 30) -> None:
        self.printed = ""
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        settings = {**environment(), "TERM": "xterm-256color"}
        del settings["COLUMNS"]
        self.process = subprocess.Popen(
            command(*arguments),
            cwd=folder,
            env=settings,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            preexec_fn=_take_terminal,
        )
        os.close(theirs)
        os.set_blocking(self._ours, False)

    def press(self, keys: bytes) -> None:
        os.write(self._ours, keys)

    def read(self) -> str:
        """Return all that was printed so far, without colours and movements."""
        try:
            while chunk := os.read(self._ours, 65536):
                self.printed += re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", chunk.decode(errors="replace"))
        except OSError:  # there is no more, or the command has ended
            pass
        return self.printed

    def wait(self) -> int:
        wait_until(lambda: bool(self.read()) and self.process.poll() is not None)
        self.read()
        return self.process.wait()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)


def _take_terminal() -> None:
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)

"""Keeping the store of elastic workers running: a process of its own, started again on its port whenever it ends."""

from __future__ import annotations

import socket
import subprocess
import sys
import time

from cadenza.errors import CadenzaError

__all__ = ["StoreKeeper", "StoreNotStartedError"]

_PAUSE_S = 0.5  # between two starts


class StoreNotStartedError(CadenzaError, RuntimeError):
    """The store's process ended before it served: its port may be taken."""


class StoreKeeper:
    """Keeps the store's process running, on one port.

    Args:
        command: The command that serves a store, without its host and port.
        host: The address at which it listens.
        port: The port, 0 for a free one.
    """

    def __init__(self, command: list[str], host: str, port: int) -> None:
        self._command, self._host, self._port = command, host, port
        self._started = time.monotonic()
        self._process = self._start()
        self._port = self._read_port()

    @property
    def address(self) -> str:
        return f"{self._host}:{self._port}"

    def restart_if_ended(self) -> bool:
        """Start it again if it has ended; return whether it had."""
        code = self._process.poll()
        if code is None or time.monotonic() - self._started < _PAUSE_S:
            return False
        print(f"The store ended with code {code}, and is started again.", file=sys.stderr, flush=True)
        self._started = time.monotonic()
        self._process = self._start()
        return True

    def answers(self) -> bool:
        """Say whether it serves by now, without waiting."""
        try:
            socket.create_connection((self._host, self._port), 0.1).close()
        except OSError:
            return False
        return True

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()

    def _start(self) -> subprocess.Popen[bytes]:
        command = [*self._command, "--host", self._host, "--port", str(self._port)]
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True)

    def _read_port(self) -> int:
        """Return the port, which the process prints as soon as it serves."""
        assert self._process.stdout is not None
        printed = self._process.stdout.readline()
        if not printed.strip():
            raise StoreNotStartedError(f"The store could not be started at {self._host}:{self._port}.")
        return int(printed)

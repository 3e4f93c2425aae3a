"""Watching a run until it ends: its metrics are shown, signals are passed on, and what went wrong is found out.

Ctrl-C, SIGTERM and SIGHUP ask the workers to stop: they finish the step they are in, save, and end as if the run were
over, on all nodes alike. Who does so a second time ends them at once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import psutil  # type: ignore[import-untyped]

from cadenza.cli.display import Display
from cadenza.cli.exit_codes import BAD_INPUT, FULL_DISK
from cadenza.cli.failures import TrainingFailedError, last_lines
from cadenza.cli.following import Follower, Progress
from cadenza.cli.launching import Crash, Workers
from cadenza.errors import CadenzaError, UsageError

__all__ = ["InterruptedRunError", "watch"]

_POLL_S = 0.2
_PATIENCE_S = 60.0  # for workers that were asked to stop and give no sign of life
_SAME_REQUEST_S = 0.5
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class InterruptedRunError(CadenzaError):
    """The run was stopped by a signal, here or on another node."""

    def __init__(self, number: int, *, saved: bool, left: bool = False) -> None:
        super().__init__("The run was interrupted.")
        self.number, self.saved, self.left = number, saved, left


class _Signals:
    """Counts the signals that would end this process; several at once are one, as when a launcher passes them on."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self._last = -_SAME_REQUEST_S

    def __call__(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if now - self._last >= _SAME_REQUEST_S:
            self.received.append(number)
        self._last = now


@contextlib.contextmanager
def _caught() -> Iterator[_Signals]:
    signals = _Signals()
    # A signal that is ignored, as under nohup, stays so.
    wanted = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, signals) for number in wanted}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def watch(workers: Workers, follower: Follower, display: Display, *, folder: Path, logs: Path) -> None:
    """Return when the run has finished.

    Raises:
        InterruptedRunError: It was stopped by a signal.
        UsageError: The task or the configuration is wrong, as a worker found out.
        TrainingFailedError: A worker died or raised.
    """
    with _caught() as signals:
        stop = _Stop(workers, display, folder)
        try:
            while (well := workers.poll()) is None:
                if display.due():
                    display.show(follower.progress, follower.read())
                stop.heed(signals.received)
                time.sleep(_POLL_S)
        except BaseException:
            workers.kill()
            raise
        display.show(follower.progress, follower.read())
    _conclude(well, workers, follower.progress, signals.received, logs)


class _Stop:
    """Asks workers to stop, and ends them if they do not or if that takes too long for the one who asked."""

    def __init__(self, workers: Workers, display: Display, folder: Path) -> None:
        self._workers, self._display, self._folder = workers, display, folder
        self._asked: set[int] = set()
        self._killed = False
        self._size, self._since = -1, 0.0

    def heed(self, received: list[int]) -> None:
        """Do what the signals so far ask for."""
        if not received or self._killed:
            return
        if not self._asked:
            self._display.say("Stopping: the workers finish their step and save. Ctrl-C again ends them without that.")
        if len(received) > 1 or self._is_stuck():
            self._killed = True
            self._workers.kill()
            return
        # Again and again, since some may only now be starting.
        for process in self._workers.processes():
            if process.pid not in self._asked:
                self._asked.add(process.pid)
                with contextlib.suppress(psutil.NoSuchProcess):
                    self._workers.ask(process, received[0])
        if not self._asked:  # they wait for other nodes
            self._killed = True
            self._workers.kill()

    def _is_stuck(self) -> bool:
        """Say whether nothing has been written in the run's folder for too long."""
        size = _size_of(self._folder)
        if size != self._size:
            self._size, self._since = size, time.monotonic()
        return time.monotonic() - self._since > _PATIENCE_S


def _size_of(folder: Path) -> int:
    sizes = []
    for root, _, files in os.walk(folder):
        for name in files:
            with contextlib.suppress(OSError):
                sizes.append(os.path.getsize(os.path.join(root, name)))
    return sum(sizes)


def _conclude(well: bool, workers: Workers, progress: Progress, received: list[int], logs: Path) -> None:
    ended = [worker.status for worker in progress.workers.values()]
    if well and ended and set(ended) == {"finished"}:
        return
    if "interrupted" in ended or received:
        number = received[0] if received else signal.SIGINT
        raise InterruptedRunError(number, saved="interrupted" in ended, left="left" in ended)
    if not well:
        _fail(workers, progress, logs)


def _fail(workers: Workers, progress: Progress, logs: Path) -> None:
    """Raise what the first worker that failed has to say."""
    first = _first(workers.crashes, progress)
    if first is None:
        raise TrainingFailedError(workers.problem or f"The workers could not be started; see {logs.parent}.")
    reason = progress.workers[first.worker].error if first.worker in progress.workers else None
    log = _last_log(logs, first.worker)
    if first.exitcode == BAD_INPUT:
        raise UsageError(reason or _without_prefix(last_lines(log, 1)))
    if first.exitcode == FULL_DISK and reason is None:
        reason = f"there is no room left on the disk of {logs.parents[1]}."
    if first.exitcode < 0 and (reason is None or first.exitcode != -signal.SIGTERM):  # by which the launcher ends them
        name = signal.Signals(-first.exitcode).name
        hint = " (often the kernel's, for want of memory)" if name == "SIGKILL" else ""
        reason = f"It was ended by {name}{hint}."
    tail = last_lines(log)
    shown = f"\n\nThe end of {log}:\n{tail}" if tail and _is_traceback(tail) else f" Its log is {log}."
    code = f" (exit code {first.exitcode})" if first.exitcode > 0 else ""
    reason = f"{(reason or 'it said nothing').rstrip('.')}."
    raise TrainingFailedError(f"Worker {first.worker} failed{code}: {reason}{shown}")


def _last_log(logs: Path, worker: int) -> Path:
    """Return where a worker complained, the last time that it was started."""
    found = sorted(logs.glob(f"worker-{worker:05d}*.err"), key=lambda path: path.stat().st_mtime)
    return found[-1] if found else logs / f"worker-{worker:05d}.err"


def _first(crashes: list[Crash], progress: Progress) -> Crash | None:
    """Return the worker that failed on its own, and not because another had."""
    by_signal = [crash for crash in crashes if crash.exitcode < 0 and -crash.exitcode != signal.SIGTERM]
    failed = [w for w in progress.workers.values() if w.status == "failed" and not w.only_followed]
    failed.sort(key=lambda worker: worker.ended)
    codes = {crash.worker: crash.exitcode for crash in crashes}
    if by_signal:
        return by_signal[0]
    crashes = sorted(crashes, key=lambda crash: crash.exitcode < 0)  # those that only followed were asked to end
    if failed:
        return Crash(failed[0].worker, codes.get(failed[0].worker, 1))
    return crashes[0] if crashes else None


def _is_traceback(text: str) -> bool:
    return "Traceback" in text or 'File "' in text


def _without_prefix(line: str) -> str:
    return line.removeprefix("cadenza: ")

"""All workers stop at one agreed step, whichever of them was asked to.

A signal (SIGTERM, SIGINT) can come to any worker, at a moment at which its training waits inside a round for others.
So every worker has a thread that watches for signals and, in the store, for the word that another was asked. The thread
*freezes* its worker: no new step begins, and the step that had begun is posted. Once all have posted, the largest step
is the one at which all stop; those that are behind go on to it, so a round on the way finds everyone.

>>> import torch.distributed as dist
>>> stopper = Stopper(dist.HashStore(), worker=0, workers=1)
>>> with stopper.watching():
...     begun = [stopper.may_begin(1), stopper.may_begin(2)]
...     stopper.request()
...     begun.append(stopper.may_begin(3))
>>> begun, stopper.target
([True, True, False], 2)
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from types import FrameType
from typing import Protocol

import torch.distributed as dist

from cadenza.errors import CadenzaError

__all__ = ["SIGNALS", "Stopper", "StoreWords", "Words", "step_key"]

SIGNALS = (signal.SIGTERM, signal.SIGINT)

_POLL_S = 1.0  # how often the store is asked whether another worker was told to stop
_ANSWER_S = 10.0  # how long to wait for the others' steps
_SAME_REQUEST_S = 0.5  # launchers and terminals may both pass on one Ctrl-C
_ABORTED = 130

_logger = logging.getLogger("cadenza")


class Words(Protocol):
    """How workers tell each other that one was asked to stop, and the steps that they had begun."""

    def tell(self, key: str, text: str) -> None:
        """Let all workers know something."""

    def is_told(self, key: str) -> bool:
        """Say whether somebody has told it."""

    def largest(self, begun: int) -> int:
        """Return the largest step that any worker has begun, once all that will have told theirs."""


class StoreWords:
    """Words through the store of a process group, whose workers are always the same.

    Args:
        store: What the workers share.
        workers: How many there are.
    """

    def __init__(self, store: dist.Store, workers: int) -> None:
        self._store = dist.PrefixStore("cadenza/stop", store)
        # A connection of the thread's own: torch's stores let nobody else speak while one call waits.
        self._ear = self._store.clone() if hasattr(self._store, "clone") else self._store
        self._workers = workers

    def tell(self, key: str, text: str) -> None:
        self._ear.set(key, text)

    def is_told(self, key: str) -> bool:
        return self._ear.check([key])

    def largest(self, begun: int) -> int:
        return max(self._post_of(worker) for worker in range(self._workers))

    def _post_of(self, worker: int) -> int:
        key = step_key(worker)
        try:
            self._store.wait([key], timedelta(seconds=_ANSWER_S))
            return int(self._store.get(key))
        except RuntimeError as error:
            raise CadenzaError(
                f"Asked to stop, but worker {worker} did not answer within {_ANSWER_S:g} s; it may have ended. No "
                "checkpoint was saved: resume from the last one."
            ) from error


def step_key(worker: int) -> str:
    """Return the key under which a worker tells the step that it had begun."""
    return f"step/{worker}"


class Stopper:
    """Tells a worker's loop whether it may begin a step; what makes all workers stop at the same one.

    Args:
        store: What the workers share, or how else they tell each other.
        worker: This worker's number.
        workers: How many there are.
        leaves: Whether a worker that gets SIGTERM leaves alone, and the others go on.
    """

    def __init__(self, store: dist.Store | Words, *, worker: int, workers: int, leaves: bool = False) -> None:
        self._words: Words = StoreWords(store, workers) if isinstance(store, dist.Store) else store
        self._worker, self._leaves = worker, leaves
        self._lock = threading.Lock()
        self._begun = 0  # the last step that was begun; none yet
        self._frozen = False
        self._open = False
        self._asked_at: float | None = None
        self.target: int | None = None
        self.left = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch for signals and for the others' word inside the block."""
        wake, woken = socket.socketpair()
        wake.setblocking(False)
        restore = _catch_signals(wake)
        self._open = True
        thread = threading.Thread(target=self._watch, args=(woken,), name="cadenza-stopper", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._open = False
            restore()
            with suppress(OSError):
                wake.send(b"\0")
            thread.join()
            wake.close()
            woken.close()

    def may_begin(self, step: int) -> bool:
        """Say whether this worker takes a step; False from the same step on for all workers.

        It waits for the other workers' answers if one was asked to stop.
        """
        with self._lock:
            if not self._frozen:
                self._begun = step
                return True
        if self.target is None:
            self.target = self._words.largest(self._begun)
        return step <= self.target

    def request(self) -> None:
        """Ask all workers to stop, as a signal does."""
        self._freeze()
        self._words.tell("asked", str(self._worker))

    def leave(self) -> None:
        """Stop at the step that was begun, whatever the others do."""
        with self._lock:
            self._frozen, self.left = True, True
            self.target = self._begun

    # ---- the thread ------------------------------------------------------------------------------------------------

    def _watch(self, woken: socket.socket) -> None:
        listening = True
        while self._open:
            ready, _, _ = select.select([woken], [], [], _POLL_S)
            try:
                if ready:
                    self._hear(woken.recv(64))
                if listening and not self._frozen and self._words.is_told("asked"):
                    self._freeze()
            except Exception as error:  # the store is gone: its host has ended, or is about to
                _logger.debug("The store does not answer: %s", error)
                listening = False

    def _hear(self, numbers: bytes) -> None:
        for number in numbers:
            if number not in SIGNALS:
                continue
            now = time.monotonic()
            if self._asked_at is None:
                self._asked_at = now
                if self._leaves and number == signal.SIGTERM:
                    self.leave()
                else:
                    self.request()
            elif now - self._asked_at > _SAME_REQUEST_S:
                os._exit(_ABORTED)  # asked twice: at once, without a checkpoint

    def _freeze(self) -> None:
        with self._lock:
            if self._frozen:
                return
            self._frozen = True
            self._words.tell(step_key(self._worker), str(self._begun))


# What undoes the catching of signals, while they are caught.
_restore: Callable[[], None] | None = None


def _catch_signals(wake: socket.socket) -> Callable[[], None]:
    """Let signals write to a socket at once, whatever the main thread waits in; return what undoes it."""
    if threading.current_thread() is not threading.main_thread():
        return lambda: None  # only the main thread may; it is the one in a worker's process
    handlers = {number: signal.signal(number, _nothing) for number in SIGNALS}
    descriptor = signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)

    def restore() -> None:
        global _restore
        _restore = None
        signal.set_wakeup_fd(descriptor)
        for number, handler in handlers.items():
            signal.signal(number, handler)

    global _restore
    _restore = restore
    return restore


def _nothing(number: int, frame: FrameType | None) -> None:
    """Do nothing: the thread has been told."""


def _leave_signals_to_parent() -> None:
    if _restore is not None:
        _restore()


# A forked process, such as a DataLoader's, does not speak for this one, and ends when it is told to.
os.register_at_fork(after_in_child=_leave_signals_to_parent)

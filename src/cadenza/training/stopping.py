"""All workers stop at one agreed step, whichever of them was asked to.

A signal (SIGTERM, SIGINT) can come to any worker, at a moment at which its training waits inside a round for others.
So every worker has a thread that watches for signals and for the request of another (`StopAgreement`). The thread
*freezes* its worker: no new step begins, and the step that had begun is posted. Once all have posted, the largest step
is the one at which all stop; those that are behind go on to it, so a round in between finds everyone.

>>> import torch.distributed as dist
>>> from cadenza.training.connections import DirectConnection
>>> store = DirectConnection(dist.HashStore())
>>> agreement = StopAgreement(store, store, expected=lambda: {0}, all_must_answer=True)
>>> stopper = Stopper(agreement, worker=0)
>>> with stopper.watching():
...     begun = [stopper.may_begin(1), stopper.may_begin(2)]
...     stopper.request()
...     begun.append(stopper.may_begin(3))
>>> begun, stopper.target
([True, True, False], 2)
"""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from cadenza.training.stop_agreement import StopAgreement

__all__ = ["SIGNALS", "Stopper"]

SIGNALS = (signal.SIGTERM, signal.SIGINT)

_POLL_S = 1.0  # how often the store is asked whether another worker was asked to stop
_SAME_REQUEST_S = 0.5  # launchers and terminals may both pass on one Ctrl-C
_ABORTED = 130


class Stopper:
    """Tells a worker's loop whether it may begin a step; what makes all workers stop at the same one.

    Args:
        agreement: How the workers agree on a step.
        worker: This worker's number.
        leaves_on_sigterm: Whether a worker that gets SIGTERM leaves while the others go on.
    """

    def __init__(self, agreement: StopAgreement, *, worker: int, leaves_on_sigterm: bool = False) -> None:
        self._agreement = agreement
        self._worker, self._leaves_on_sigterm = worker, leaves_on_sigterm
        self._lock = threading.Lock()
        self._begun = 0  # the last step that was begun; none yet
        self._frozen = False
        self._open = False
        self._asked_at: float | None = None
        self.target: int | None = None
        self.left = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch for signals and for the others' requests inside the block."""
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
            self.target = self._agreement.last_step(self._begun)
        return step <= self.target

    def request(self) -> None:
        """Ask all workers to stop, as a signal does."""
        self._freeze()
        self._agreement.ask()

    def leave(self) -> None:
        """Stop at the step that was begun, whatever the others do."""
        with self._lock:
            self._frozen, self.left = True, True
            self.target = self._begun

    # ---- the thread ------------------------------------------------------------------------------------------------

    def _watch(self, woken: socket.socket) -> None:
        while self._open:
            ready, _, _ = select.select([woken], [], [], _POLL_S)
            if ready:
                self._obey(woken.recv(64))
            if not self._frozen and self._agreement.is_asked():
                self._freeze()

    def _obey(self, numbers: bytes) -> None:
        for number in numbers:
            if number not in SIGNALS:
                continue
            now = time.monotonic()
            if self._asked_at is None:
                self._asked_at = now
                if self._leaves_on_sigterm and number == signal.SIGTERM:
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
            self._agreement.post(self._worker, self._begun)


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
    """Do nothing: the thread has been woken."""


def _leave_signals_to_parent() -> None:
    if _restore is not None:
        _restore()


# A forked process, such as a DataLoader's, does not speak for this one, and ends when it is told to.
os.register_at_fork(after_in_child=_leave_signals_to_parent)

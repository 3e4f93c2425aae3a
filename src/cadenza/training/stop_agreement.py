"""How workers agree on the step at which all of them stop, through the store that they share.

A worker that is asked to stop says so. Every worker posts the last step that it had begun; the largest of them is the
one at which all stop.

>>> import torch.distributed as dist
>>> from cadenza.training.connections import DirectConnection
>>> store = DirectConnection(dist.HashStore())
>>> agreement = StopAgreement(store, store, expected=lambda: {0, 1}, all_must_answer=True)
>>> agreement.ask()
>>> agreement.post(0, 7), agreement.post(1, 5)
(None, None)
>>> agreement.is_asked(), agreement.last_step(7)
(True, 7)
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

import torch.distributed as dist

from cadenza.errors import CadenzaError, StoreLostError
from cadenza.training.connections import Connection

__all__ = ["StopAgreement"]

_ANSWER_S = 10.0  # how long to wait for the others' steps
_LOOK_S = 0.05
_ASKED = "stop/asked"


class StopAgreement:
    """How workers come to stop at one step; while the store is away, each stops where it is.

    Args:
        watching: A connection for the thread that watches for signals: its calls must not wait for the loop's.
        training: A connection for the training loop.
        expected: Says whose answers are waited for.
        all_must_answer: Whether it is an error if one does not; otherwise those that are there stop without it.
    """

    def __init__(
        self, watching: Connection, training: Connection, *, expected: Callable[[], set[int]], all_must_answer: bool
    ) -> None:
        self._watching, self._training = watching, training
        self._expected, self._all_must_answer = expected, all_must_answer

    def ask(self) -> None:
        """Ask all workers to stop."""
        self._set(_ASKED, "yes")

    def is_asked(self) -> bool:
        """Say whether a worker has asked."""
        try:
            return self._watching.call(lambda store: store.check([_ASKED]))
        except StoreLostError:
            return False

    def post(self, worker: int, step: int) -> None:
        """Let all workers know the last step that one had begun; it begins no other until all have agreed."""
        self._set(_step_key(worker), str(step))

    def last_step(self, begun: int) -> int:
        """Return the largest step that any worker has begun, this one's among them, once all that will have posted."""
        deadline = time.monotonic() + _ANSWER_S
        steps: dict[int, int] = {}
        while True:
            expected = self._expected()
            try:
                steps = self._training.call(lambda store, workers=expected: _posted(store, workers))  # type: ignore[misc]
            except StoreLostError:
                deadline = 0.0
            missing = expected - steps.keys()
            if not missing or time.monotonic() >= deadline:
                break
            time.sleep(_LOOK_S)
        if missing and self._all_must_answer:
            raise CadenzaError(
                f"Asked to stop, but worker {min(missing)} did not answer within {_ANSWER_S:g} s; it may have ended. "
                "No checkpoint was saved: resume from the last one."
            )
        return max([begun, *steps.values()])

    def _set(self, key: str, text: str) -> None:
        with suppress(StoreLostError):
            self._watching.call(lambda store: store.set(key, text))


def _posted(store: dist.Store, workers: set[int]) -> dict[int, int]:
    keys = {worker: _step_key(worker) for worker in workers}
    told = {worker: bytes(store.get(key)) for worker, key in keys.items() if store.check([key])}
    return {worker: int(text) for worker, text in told.items() if text.isdigit()}


def _step_key(worker: int) -> str:
    return f"stop/step/{worker}"

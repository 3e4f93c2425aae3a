"""How workers that come and go agree on a step to stop at: those who do not answer are not waited for long."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

import torch.distributed as dist

from cadenza.errors import StoreLostError
from cadenza.participants.membership import Membership
from cadenza.training.stopping import step_key

__all__ = ["LineWords"]

_ANSWER_S = 10.0


class LineWords:
    """Words through the store in which workers meet; while it is away, nothing is heard and all go their own way.

    Args:
        membership: This worker's place.
        members: Says who held the last round.
    """

    def __init__(self, membership: Membership, members: Callable[[], tuple[int, ...]]) -> None:
        self._roll, self._members = membership.roll, members
        self._mouth, self._ear = membership.line(), membership.line()  # for the thread, and for the training loop

    def tell(self, key: str, text: str) -> None:
        with suppress(StoreLostError):
            self._mouth.call(lambda store: store.set(f"stop/{key}", text))

    def is_told(self, key: str) -> bool:
        try:
            return self._mouth.call(lambda store: store.check([f"stop/{key}"]))
        except StoreLostError:
            return False

    def largest(self, begun: int) -> int:
        """Return the largest step that any of those has begun who held the last round and are there."""
        deadline = time.monotonic() + _ANSWER_S
        steps: dict[int, int] = {}
        while time.monotonic() < deadline:
            waited_for = set(self._members()) - self._roll.silent()
            try:
                steps = self._ear.call(lambda store, asked=frozenset(waited_for): _steps(store, asked))  # type: ignore[misc]
            except StoreLostError:
                break
            if waited_for <= steps.keys():
                break
            time.sleep(0.05)
        return max([begun, *steps.values()])


def _steps(store: dist.Store, workers: frozenset[int]) -> dict[int, int]:
    keys = {worker: f"stop/{step_key(worker)}" for worker in workers}
    return {worker: int(store.get(key)) for worker, key in keys.items() if store.check([key])}

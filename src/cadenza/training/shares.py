"""Held-out losses put together in the store: each worker posts what it found on its share, one adds the shares up.

Nobody waits: while shares are missing, training goes on, and a share that does not come is left out of the mean.

>>> from cadenza.participants.store import serve
>>> store = serve(host="127.0.0.1")
>>> held_out = HeldOut(Line(f"127.0.0.1:{store.port}", prefix="example"), worker=0, patience_s=10.0)
>>> held_out.post(100, (0,), 24.0, 8.0)
>>> held_out.collect(wait=True)
[(100, 3.0)]
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import dataclass

import torch.distributed as dist

from cadenza.errors import StoreLostError
from cadenza.participants.store import Line, append

__all__ = ["HeldOut"]

_LOOK_S = 0.5


@dataclass(frozen=True)
class _Pending:
    step: int
    members: tuple[int, ...]
    deadline: float


class HeldOut:
    """Posts this worker's shares and, if it is the first of those who evaluate, adds all of them up.

    Args:
        line: A line to the store.
        worker: This worker's number.
        patience_s: How long missing shares are waited for.
    """

    def __init__(self, line: Line, worker: int, *, patience_s: float) -> None:
        self._line, self._worker, self._patience_s = line, worker, patience_s
        self._pending: list[_Pending] = []
        self._looked = 0.0

    def post(self, step: int, members: tuple[int, ...], total: float, count: float) -> None:
        """Make this worker's share known to the first of the members."""
        text = json.dumps([self._worker, total, count])
        with suppress(StoreLostError):
            self._line.call(lambda store: append(store, _key(step), text + "\n"))
            if self._worker == min(members):
                self._pending.append(_Pending(step, members, time.monotonic() + self._patience_s))

    def collect(self, *, wait: bool = False) -> list[tuple[int, float]]:
        """Return steps and losses of evaluations that are over; `wait` until all are."""
        found: list[tuple[int, float]] = []
        while self._pending and (wait or time.monotonic() - self._looked > _LOOK_S):
            self._looked = time.monotonic()
            for pending in list(self._pending):
                shares = self._shares(pending)
                if shares.keys() >= set(pending.members) or self._looked > pending.deadline:
                    self._pending.remove(pending)
                    found += _mean(pending.step, shares)
            if self._pending and wait:
                time.sleep(0.02)
            elif not wait:
                break
        return found

    def _shares(self, pending: _Pending) -> dict[int, tuple[float, float]]:
        try:
            return self._line.call(lambda store: _read(store, pending))
        except StoreLostError:
            return {}


def _mean(step: int, shares: dict[int, tuple[float, float]]) -> list[tuple[int, float]]:
    total, count = (sum(share[i] for share in shares.values()) for i in (0, 1))
    return [(step, total / count)] if count > 0 else []


def _read(store: dist.Store, pending: _Pending) -> dict[int, tuple[float, float]]:
    key = _key(pending.step)
    if not store.check([key]):
        return {}
    found = [json.loads(line) for line in bytes(store.get(key)).decode().splitlines()]
    shares = {int(worker): (float(total), float(count)) for worker, total, count in found}
    if shares.keys() >= set(pending.members):
        store.delete_key(key)
    return shares


def _key(step: int) -> str:
    return f"held-out/{step}"

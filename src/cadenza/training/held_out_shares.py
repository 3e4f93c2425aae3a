"""Putting held-out metrics together of what each worker has measured on its share of the data.

Fixed workers add their shares in a collective. Elastic workers post them to the store, and one adds them up. There
nobody waits: while shares are missing, training goes on, and a share that does not come is left out of the mean.

>>> from cadenza.training.connections import DirectConnection
>>> shares = StoreShares(DirectConnection(dist.HashStore()), worker=0, patience_s=10.0)
>>> shares.post(100, (0,), {"loss": (24.0, 8.0), "accuracy": (6.0, 8.0)})
>>> shares.collect(wait=True)
[Evaluation(step=100, metrics={'loss': 3.0, 'accuracy': 0.75}, write=True)]
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch.distributed as dist

from cadenza.errors import StoreLostError
from cadenza.training.connections import Connection

__all__ = ["Evaluation", "Share", "Shares", "StoreShares", "means"]

_LOOK_S = 0.5

Share: TypeAlias = Mapping[str, tuple[float, float]]  # of each metric a sum, and over how many it is one


@dataclass(frozen=True)
class Evaluation:
    """The held-out metrics at a step, one of them "loss"; `write` on the one worker that writes them down for all."""

    step: int
    metrics: Mapping[str, float]
    write: bool


def means(shares: Iterable[Share]) -> dict[str, float]:
    """Return each metric's mean over the shares of all workers; one that nobody has measured is not in it.

    >>> means([{"loss": (6.0, 2.0)}, {"loss": (2.0, 2.0), "accuracy": (0.0, 0.0)}])
    {'loss': 2.0}
    """
    totals: dict[str, tuple[float, float]] = {}
    for share in shares:
        for name, (total, count) in share.items():
            before = totals.get(name, (0.0, 0.0))
            totals[name] = before[0] + total, before[1] + count
    return {name: total / count for name, (total, count) in totals.items() if count > 0}


class Shares(Protocol):
    """Puts together what the workers have measured."""

    def post(self, step: int, members: tuple[int, ...], share: Share) -> None:
        """Add this worker's share. All members of the last round post one."""

    def collect(self, *, wait: bool = False) -> list[Evaluation]:
        """Return the evaluations that have come to be known since the last call; `wait` for those that are pending."""


@dataclass(frozen=True)
class _Pending:
    step: int
    members: tuple[int, ...]
    deadline: float


class StoreShares:
    """Posts this worker's shares to a store and, if it is the first of those who evaluate, adds all of them up.

    Args:
        connection: A connection to the store.
        worker: This worker's number.
        patience_s: How long missing shares are waited for.
    """

    def __init__(self, connection: Connection, worker: int, *, patience_s: float) -> None:
        self._connection, self._worker, self._patience_s = connection, worker, patience_s
        self._pending: list[_Pending] = []
        self._looked = 0.0

    def post(self, step: int, members: tuple[int, ...], share: Share) -> None:
        """Make this worker's share known to the first of the members."""
        text = json.dumps([self._worker, share])
        with suppress(StoreLostError):
            self._connection.call(lambda store: _append(store, _key(step), text))
            if self._worker == min(members):
                self._pending.append(_Pending(step, members, time.monotonic() + self._patience_s))

    def collect(self, *, wait: bool = False) -> list[Evaluation]:
        """Return the evaluations that are over; `wait` until all are."""
        found: list[Evaluation] = []
        while self._pending and (wait or time.monotonic() - self._looked > _LOOK_S):
            self._looked = time.monotonic()
            for pending in list(self._pending):
                shares = self._shares(pending)
                if shares.keys() >= set(pending.members) or self._looked > pending.deadline:
                    self._pending.remove(pending)
                    self._forget(pending)
                    if "loss" in (metrics := means(shares.values())):
                        found.append(Evaluation(pending.step, metrics, write=True))
            if self._pending and wait:
                time.sleep(0.02)
            elif not wait:
                break
        return found

    def _forget(self, pending: _Pending) -> None:
        with suppress(StoreLostError):
            self._connection.call(lambda store: store.delete_key(_key(pending.step)))

    def _shares(self, pending: _Pending) -> dict[int, Share]:
        try:
            return self._connection.call(lambda store: _read(store, pending))
        except StoreLostError:
            return {}


def _read(store: dist.Store, pending: _Pending) -> dict[int, Share]:
    key = _key(pending.step)
    if not store.check([key]):
        return {}
    shares: dict[int, Share] = {}
    for line in bytes(store.get(key)).splitlines():
        with suppress(ValueError, TypeError, AttributeError):  # of somebody else
            worker, share = json.loads(line)
            if worker in pending.members:
                shares[worker] = {name: (float(total), float(count)) for name, (total, count) in share.items()}
    return shares


def _append(store: dist.Store, key: str, text: str) -> None:
    """Add a line to what stands under a key, at once, whoever else does so too."""
    store.append(key, f"{text}\n")  # type: ignore[attr-defined]


def _key(step: int) -> str:
    return f"held-out/{step}"

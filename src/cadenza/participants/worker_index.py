"""Which workers have an entry in the store: their numbers, under one key.

>>> import torch.distributed as dist
>>> signer = Signer("job", secret=None)
>>> store, index = SignedStore(dist.HashStore(), signer), WorkerIndex(signer)
>>> index.update(store, {0, 2}, set()), index.update(store, {1}, {0})
({0, 2}, {1, 2})
"""

from __future__ import annotations

from collections.abc import Set

from cadenza.errors import StoreLostError
from cadenza.participants.beat import beat_key
from cadenza.participants.signed_store import SignedStore
from cadenza.participants.signing import Signer

__all__ = ["WorkerIndex"]

_KEY = "workers"
_ATTEMPTS = 20


class WorkerIndex:
    """Reads and writes the numbers of the workers; what is missing there is written again by those who know it."""

    def __init__(self, signer: Signer) -> None:
        self._signer = signer

    def update(self, store: SignedStore, here: Set[int], forgotten: Set[int]) -> set[int]:
        """Return the workers that have an entry, those that are here among them; delete the entries of others."""
        for _ in range(_ATTEMPTS):
            text = store.read(_KEY)
            found = self._signer.understood(lambda t=text: _numbers(t)) if text is not None else None  # type: ignore[misc]
            wanted = (found or set()) - (forgotten - here) | here
            if wanted == found:
                return wanted
            mine = " ".join(map(str, sorted(wanted)))
            if store.compare_set(_KEY, text or "", mine) == mine.encode():
                for worker in (found or set()) - wanted:
                    store.delete_key(beat_key(worker))
                return wanted
        raise StoreLostError("somebody else writes the workers' index all the time")


def _numbers(text: str) -> set[int]:
    found = {int(word) for word in text.split(" ")}
    if min(found) < 0:
        raise ValueError(f"Workers have numbers from 0; got {text!r}.")
    return found

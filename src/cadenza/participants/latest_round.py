"""The latest round that anyone has come to, as all workers of a job find it in the store.

It only grows. It calls workers that are behind, and says when they come too late; whoever is alive writes it again when
it was lost or has grown old, so that nobody can bring back one of long ago.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from cadenza.errors import StoreLostError
from cadenza.participants.beat import CLOCKS_S
from cadenza.participants.round_id import RoundId
from cadenza.participants.signed_store import SignedStore
from cadenza.participants.signing import Signer

__all__ = ["LatestRound"]

_KEY = "latest"
_AGAIN_S = CLOCKS_S / 10  # an entry of this age is written again
_ATTEMPTS = 20


@dataclass(frozen=True)
class _Entry:
    round: RoundId
    at: float

    @classmethod
    def parse(cls, text: str) -> _Entry:
        round, at = text.split(" ")
        return cls(RoundId.parse(round), float(at))


class LatestRound:
    """Reads and writes the latest round.

    >>> import torch.distributed as dist
    >>> signer = Signer("job", secret="word")
    >>> store, latest = SignedStore(dist.HashStore(), signer), LatestRound(signer)
    >>> latest.raise_to(store, RoundId(20)), latest.raise_to(store, RoundId(10))
    (RoundId(step=20, phase=0, fragment=0), RoundId(step=20, phase=0, fragment=0))
    """

    def __init__(self, signer: Signer) -> None:
        self._signer = signer

    def read(self, store: SignedStore) -> RoundId | None:
        """Return the round that stands in the store, if one does."""
        entry = self._understood(store.read(_KEY))
        return entry.round if entry is not None else None

    def raise_to(self, store: SignedStore, round: RoundId) -> RoundId:
        """Write a round unless a later one stands in the store; return the one that does then."""
        for _ in range(_ATTEMPTS):
            text = store.read(_KEY)
            entry = self._understood(text)
            now = time.time()
            if entry is not None and entry.round >= round and abs(now - entry.at) < _AGAIN_S:
                return entry.round
            mine = f"{max(round, entry.round) if entry is not None else round} {now:.3f}"
            if store.compare_set(_KEY, text or "", mine) == mine.encode():
                return _Entry.parse(mine).round
        raise StoreLostError("somebody else writes the latest round all the time")

    def _understood(self, text: str | None) -> _Entry | None:
        entry = self._signer.understood(lambda: _Entry.parse(text)) if text is not None else None
        if entry is not None and self._signer.secret and not abs(time.time() - entry.at) <= CLOCKS_S:
            self._signer.ignored += 1
            return None
        return entry

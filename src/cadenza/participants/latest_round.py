"""How far a job has come, as all workers find it in the store: the latest round, and how many were held.

Both only grow. The latest round calls workers that are behind, and says when they come too late. The number of rounds
that were held is the high-water mark: nobody goes on from a state that has seen fewer without being told to. Whoever is
alive writes both again when they were lost or have grown old, so that nobody can bring back those of long ago.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from cadenza.errors import StoreLostError
from cadenza.participants.beat import CLOCKS_S
from cadenza.participants.round_id import RoundId
from cadenza.participants.signed_store import SignedStore
from cadenza.participants.signing import Signer

__all__ = ["Latest", "LatestRound"]

_AGAIN_S = CLOCKS_S / 10  # an entry of this age is written again
_ATTEMPTS = 20


@dataclass(frozen=True)
class Latest:
    """How far a job has come.

    Attributes:
        round: The latest round that anyone has come to.
        held: How many rounds were held.
        at: When it was written, in seconds since 1970.
    """

    round: RoundId
    held: int = 0
    at: float = 0.0

    def with_(self, other: Latest | None) -> Latest:
        """Return the further of both.

        >>> Latest(RoundId(20), held=1).with_(Latest(RoundId(10), held=2))
        Latest(round=RoundId(step=20, phase=0, fragment=0, level=0), held=2, at=0.0)
        """
        if other is None:
            return self
        return replace(self, round=max(self.round, other.round), held=max(self.held, other.held))

    def pack(self) -> str:
        return f"{self.round} {self.held} {self.at:.3f}"

    @classmethod
    def parse(cls, text: str) -> Latest:
        round, held, at = text.split(" ")
        if int(held) < 0:
            raise ValueError(f"Not less than no round was held; got {held}.")
        return cls(RoundId.parse(round), int(held), float(at))


class LatestRound:
    """Reads and writes how far a job has come, or one of its circles.

    >>> import torch.distributed as dist
    >>> signer = Signer("job", secret="word")
    >>> store, latest = SignedStore(dist.HashStore(), signer), LatestRound(signer)
    >>> latest.raise_to(store, Latest(RoundId(20), held=2)).round, latest.raise_to(store, Latest(RoundId(10))).held
    (RoundId(step=20, phase=0, fragment=0, level=0), 2)

    Args:
        signer: The job's signer.
        place: What the circle's keys begin with.
    """

    def __init__(self, signer: Signer, place: str = "") -> None:
        self._signer, self._key = signer, f"{place}latest"

    def read(self, store: SignedStore) -> Latest | None:
        """Return what stands in the store, if anything does."""
        return self._understood(store.read(self._key))

    def raise_to(self, store: SignedStore, mine: Latest) -> Latest:
        """Write how far the job has come, as far as it is known here or in the store; return what stands there then."""
        for _ in range(_ATTEMPTS):
            text = store.read(self._key)
            entry = self._understood(text)
            now = time.time()
            wanted = replace(mine.with_(entry), at=now)
            if entry is not None and replace(wanted, at=entry.at) == entry and abs(now - entry.at) < _AGAIN_S:
                return entry
            if store.compare_set(self._key, text or "", wanted.pack()) == wanted.pack().encode():
                return wanted
        raise StoreLostError("somebody else writes the latest round all the time")

    def _understood(self, text: str | None) -> Latest | None:
        entry = self._signer.understood(lambda: Latest.parse(text)) if text is not None else None
        if entry is not None and self._signer.secret and not abs(time.time() - entry.at) <= CLOCKS_S:
            self._signer.ignored += 1
            return None
        return entry

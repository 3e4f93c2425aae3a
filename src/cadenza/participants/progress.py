"""How far the rounds of a circle have come, as one worker knows it."""

from __future__ import annotations

from cadenza.participants.latest_round import Latest, LatestRound
from cadenza.participants.round_id import RoundId
from cadenza.participants.signed_store import SignedStore
from cadenza.participants.signing import Signer

__all__ = ["Progress"]


class Progress:
    """How far the rounds of a circle have come, as one worker knows it.

    Args:
        signer: The job's signer.
        place: What the circle's keys begin with.

    Attributes:
        latest: The latest round that anyone has come to, as of the last look.
        held: How many rounds were held, as far as is known.
        forgetful: Whether the store was found to have forgotten it.
    """

    def __init__(self, signer: Signer, place: str = "") -> None:
        self.latest: RoundId | None = None
        self.held = 0
        self.forgetful = False
        self._stood = 0  # rounds held, as they were seen to stand in the store
        self._entry = LatestRound(signer, place)

    def look(self, store: SignedStore) -> None:
        """See what stands in the store."""
        self.note(self._entry.read(store))

    def keep(self, store: SignedStore) -> None:
        """See what stands in the store, and write what is known if that is more."""
        self.look(store)
        if self.latest is not None:
            self.note(self._entry.raise_to(store, Latest(self.latest, self.held)))

    def announce(self, store: SignedStore, round: RoundId) -> RoundId:
        """Make known that this worker comes to a round; return the latest one that anyone has come to."""
        self.look(store)
        latest = self._entry.raise_to(store, Latest(round, self.held))
        self.note(latest)
        return latest.round

    def note(self, latest: Latest | None) -> None:
        """Know of what stands in the store; more may be known already."""
        self.forgetful = self.forgetful or self._stood > (latest.held if latest is not None else 0)
        if latest is not None:
            self.latest = latest.round if self.latest is None else max(self.latest, latest.round)
            self._stood = latest.held
            self.held = max(self.held, latest.held)

    def note_held(self, rounds: int) -> None:
        """Know that so many rounds were held, by having been in the last one."""
        self.held, self.forgetful = max(self.held, rounds), False

"""Which rounds have keys in the store: their names, under one key, so that anyone can delete what the dead have left.

>>> from torch.distributed import HashStore
>>> from cadenza.participants.signing import Signer
>>> store = SignedStore(HashStore(), Signer("job", secret=None))
>>> for step in range(10):
...     store.set(f"round/{step}.0.0/roster", "...")
...     note_round(store, RoundId(step), members=2)
>>> [step for step in range(10) if store.check([f"round/{step}.0.0/roster"])]
[6, 7, 8, 9]
"""

from __future__ import annotations

from cadenza.participants.round_id import RoundId
from cadenza.participants.signed_store import SignedStore
from cadenza.participants.vote import VOTE_KEYS

__all__ = ["note_round"]

_KEY = "rounds"
_KEPT = 4  # rounds whose keys stay, for those who come late
_ATTEMPTS = 20
_VOTES = ("vote", "assembled", "joining/assembled")


def note_round(store: SignedStore, round: RoundId, *, members: int) -> None:
    """Note that a round has keys, and delete those of old rounds.

    Args:
        store: The store.
        round: The round, before anything of it is written.
        members: How many workers may have been in an old round.
    """
    for _ in range(_ATTEMPTS):
        text = store.read(_KEY) or ""
        names = text.split(" ") if text else []
        if str(round) in names:
            return
        mine = " ".join([*names, str(round)][-_KEPT:])
        if store.compare_set(_KEY, text, mine) == mine.encode():
            for name in [*names, str(round)][:-_KEPT]:
                _delete(store, f"round/{name}", members)
            return


def _delete(store: SignedStore, base: str, members: int) -> None:
    votes = [f"{vote}/{key}" for vote in _VOTES for key in VOTE_KEYS]
    groups = [f"{group}/0/{position}" for group in ("group", "joining/group") for position in range(members)]
    for key in ("arrivals", "roster", *votes, *groups):
        store.delete_key(f"{base}/{key}")

"""Which rounds have keys in the store: their names, under one key, so that anyone can delete what the dead have left.

>>> import torch.distributed as dist
>>> from cadenza.participants.signing import Signer
>>> store = SignedStore(dist.HashStore(), Signer("job", secret=None))
>>> for step in range(10):
...     store.set(f"round/{step}.0.0/roster", "...")
...     note_round(store, RoundId(step), members=2)
>>> [step for step in range(10) if store.check([f"round/{step}.0.0/roster"])]
[6, 7, 8, 9]
"""

from __future__ import annotations

from collections.abc import Sequence

from cadenza.participants.roster import Roster, stage_place
from cadenza.participants.round_id import RoundId
from cadenza.participants.signed_store import SignedStore
from cadenza.participants.vote import VOTE_KEYS

__all__ = ["column_key", "note_round"]

_KEY = "rounds"  # after the place of the circle
_KEPT = 4  # rounds whose keys stay, for those who come late
_ATTEMPTS = 20
_GROUPS = ("", "joining/")


def note_round(store: SignedStore, round: RoundId, *, members: int, columns: int = 1, place: str = "") -> None:
    """Note that a round has keys, and delete those of old rounds.

    Args:
        store: The store.
        round: The round, before anything of it is written.
        members: How many workers may have been in an old round.
        columns: How many ranks each of them has.
        place: What the keys of the circle begin with.
    """
    key = f"{place}{_KEY}"
    for _ in range(_ATTEMPTS):
        text = store.read(key) or ""
        names = text.split(" ") if text else []
        if str(round) in names:
            return
        mine = " ".join([*names, str(round)][-_KEPT:])
        if store.compare_set(key, text, mine) == mine.encode():
            for name in [*names, str(round)][:-_KEPT]:
                stages = _stages(store.read(f"{place}{column_key(name, 0)}/roster"))
                for column in range(columns):
                    _delete(store, f"{place}{column_key(name, column)}", members, stages)
            return


def column_key(round: RoundId | str, column: int) -> str:
    """Return where the keys of a round are, of the ranks that have one place in all replicas.

    >>> column_key(RoundId(20), 0), column_key(RoundId(20), 3)
    ('round/20.0.0', 'round/20.0.0/column/3')
    """
    return f"round/{round}/column/{column}" if column else f"round/{round}"


def _delete(store: SignedStore, base: str, members: int, stages: Sequence[tuple[str, int]]) -> None:
    groups = [*((group, members) for group in _GROUPS), *stages]
    votes = [f"{group}{vote}" for group, _ in groups for vote in ("assembled", "connected")]
    addresses = [f"{group}group/0/{position}" for group, size in groups for position in range(size)]
    for key in ("arrivals", "roster", *(f"{vote}/{key}" for vote in ("vote", *votes) for key in VOTE_KEYS), *addresses):
        store.delete_key(f"{base}/{key}")


def _stages(text: str | None) -> list[tuple[str, int]]:
    """Return the groups inside and across of a staged round, with their sizes."""
    try:
        inside = Roster.unpack(text or "").inside
    except (ValueError, TypeError, KeyError, AttributeError):
        return []
    across = list(zip(*inside, strict=True))
    return [(f"{stage_place('inside', group)}/", len(group)) for group in inside] + [
        (f"{stage_place('across', group)}/", len(group)) for group in across
    ]

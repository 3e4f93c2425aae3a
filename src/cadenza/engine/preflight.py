"""The check before anything is sent: ranks compare what they are about to train, through the store.

Tensors of different sizes abort the process inside a collective, and different models of equal size average to
garbage. So every rank writes down what it holds, reads what the others hold, and all raise the same error if there is
a difference.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from itertools import zip_longest

from cadenza.engine.header import Stance, disagreement
from cadenza.errors import DisagreementError
from cadenza.transports.group import Group

__all__ = ["compare"]


def compare(group: Group, *, terms: Sequence[str], model: Sequence[str], mend: str) -> None:
    """Compare the terms (strategy, version) and the model's description over a group; raise on every rank alike.

    `mend` is how to mend a difference.
    """
    store, rank = group.store, group.rank
    key = f"cadenza/preflight/{store.add(f'cadenza/visits/{rank}', 1)}"  # counted by rank and group, so all agree
    mine = json.dumps([list(terms), list(model)])
    store.set(f"{key}/text/{rank}", mine)
    store.set(f"{key}/hash/{rank}", hashlib.blake2b(mine.encode(), digest_size=16).hexdigest())
    hashes = {other: bytes(store.get(f"{key}/hash/{other}")) for other in group.ranks}
    if len(set(hashes.values())) == 1:
        return
    texts = {other: json.loads(bytes(store.get(f"{key}/text/{other}"))) for other in group.ranks}
    if len({tuple(text[0]) for text in texts.values()}) > 1:
        parts = {other: text[0] for other, text in texts.items()}
        first = next(i for i, row in enumerate(zip_longest(*parts.values())) if len(set(row)) > 1)
        stances = {other: Stance(0, None, part[first : first + 1] or ["no more"]) for other, part in parts.items()}
    else:
        stances = {other: Stance(0, None, text[1]) for other, text in texts.items()}
    told = disagreement(stances, what="what to train", mend=mend)
    raise DisagreementError(f"{told} No parameter was changed.")

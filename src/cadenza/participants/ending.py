"""The end of a run, as the store tells it: who comes later hears of it, and who is in another run does not.

A store knows nothing of runs, and the key is the same in all of them. So the entry names the run that has ended, by the
roster from which it began.

>>> import torch.distributed as dist
>>> signer = Signer("job", secret="word")
>>> store = SignedStore(dist.HashStore(), signer)
>>> note_end(store, origin="a7", chain="c4")
>>> has_ended(store, signer, "a7"), has_ended(store, signer, ""), has_ended(store, signer, "b8"), signer.ignored
(True, True, False, 1)
"""

from __future__ import annotations

from cadenza.participants.signed_store import SignedStore
from cadenza.participants.signing import Signer

__all__ = ["FINISHED", "has_ended", "note_end"]

FINISHED = "finished"


def note_end(store: SignedStore, *, origin: str, chain: str) -> None:
    """Write that a run has ended, and with which history."""
    store.set(FINISHED, f"{origin} {chain}")


def has_ended(store: SignedStore, signer: Signer, origin: str) -> bool:
    """Tell whether a run has ended; without an origin, as of one who was in no round, whether any has.

    What is told of another run, as by somebody who writes an old entry again, is ignored and counted.
    """
    text = store.read(FINISHED)
    if text is None:
        return False
    ended = not origin or text.partition(" ")[0] == origin
    signer.ignored += not ended
    return ended

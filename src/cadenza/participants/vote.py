"""A vote before anything changes: commit or abort, the same on every member of a round.

It goes through the store, not through a collective, because a collective can succeed on one rank and fail on another:
each member marks that its data is in, the one that completes the count writes "commit", whoever gives up writes
"abort", and all obey what was written first. Among many members one counts for all: a count of everyone by everyone
would be read as often as there are pairs of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from cadenza.errors import StoreLostError

__all__ = ["VOTE_KEYS", "Vote"]

_LOOK_S = 0.002
_MANY = 16  # members; more of them look less often
VOTE_KEYS = ("ready", "verdict", "read")  # what a vote writes, below its own key


class Vote:
    """One decision, commit or abort, that all members of a round reach alike through the store.

    Args:
        store: The store.
        key: A name that no other vote has.
        members: How many vote.
        timeout_s: How long they are waited for.
        counts: Whether this member, and no other, counts for all, in a store that knows its clients and whose old keys
            are swept; None if all count, and the last one deletes the keys.

    >>> store = dist.HashStore()
    >>> Vote(store, "round/0", members=1, timeout_s=1.0).ready()
    True
    >>> Vote(store, "round/1", members=2, timeout_s=0.01).ready()  # the other member never comes
    False
    """

    def __init__(
        self, store: dist.Store, key: str, *, members: int, timeout_s: float, counts: bool | None = None
    ) -> None:
        self._store = store
        self._counts = counts
        self._look_s = _LOOK_S * max(1.0, members / _MANY)
        self._ready_key, self._verdict_key, self._read_key = (f"{key}/{name}" for name in VOTE_KEYS)
        self._members = members
        self._timeout = timedelta(seconds=timeout_s)

    def ready(self, hopeless: Callable[[], bool] | None = None) -> bool:
        """Mark this member ready and return the verdict: True to commit, False to leave everything as it is.

        `hopeless` says, while this member waits, whether another one will certainly not come any more.
        """
        try:
            committed = self._verdict(hopeless) == "commit"
            if self._counts is None:
                self._leave()
        except RuntimeError as error:
            raise StoreLostError(
                "The store was lost during the vote. This rank's parameters are as they were, but another rank may "
                f"have seen the vote pass before. {error}"
            ) from error
        return committed

    def abort(self) -> None:
        """Say, as far as it can still be said, that this member does not go on."""
        with suppress(RuntimeError):
            self._decide("abort")

    @property
    def decided(self) -> bool:
        """Whether a verdict stands."""
        return self._store.check([self._verdict_key])

    def ready_members(self) -> list[str]:
        """Return who has marked ready, in a store that knows its clients."""
        return [who for who in bytes(self._store.get(self._ready_key)).decode().split("\n") if who]

    def settle(self) -> bool:
        """Ask for an end, now: abort unless the others have committed already; return whether they have."""
        return self._decide("abort") == "commit"

    def _verdict(self, hopeless: Callable[[], bool] | None) -> str:
        if self._counts is not None:
            self._store.mark(self._ready_key)  # type: ignore[attr-defined]
            return self._watch(hopeless or (lambda: False))
        if self._store.add(self._ready_key, 1) == self._members:
            return self._decide("commit")
        if hopeless is not None:
            return self._watch(hopeless)
        try:
            self._store.wait([self._verdict_key], self._timeout)
        except RuntimeError:  # time ran out, or the store is gone and says so again below
            return self._decide("abort")
        return bytes(self._store.get(self._verdict_key)).decode()

    def _watch(self, hopeless: Callable[[], bool]) -> str:
        deadline = time.monotonic() + self._timeout.total_seconds()
        while not self._store.check([self._verdict_key]):
            if self._counts and len(set(self.ready_members())) >= self._members:
                return self._decide("commit")
            if time.monotonic() >= deadline or hopeless():
                return self._decide("abort")
            time.sleep(self._look_s)
        return bytes(self._store.get(self._verdict_key)).decode()

    def _decide(self, verdict: str) -> str:
        """Write the verdict unless one stands already; return the one that stands."""
        return bytes(self._store.compare_set(self._verdict_key, "", verdict)).decode()

    def _leave(self) -> None:
        """Remove the keys, if every other member has read the verdict."""
        if self._store.add(self._read_key, 1) == self._members:
            for key in (self._ready_key, self._verdict_key, self._read_key):
                self._store.delete_key(key)

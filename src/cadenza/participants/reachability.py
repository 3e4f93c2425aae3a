"""Whom this worker could not reach, as it tells the others when it comes to a round.

A worker with whom no group could be made is left out for a while, twice as long after every further attempt, and until
it has been reached again: an attempt stops all for seconds.

>>> known = Reachability()
>>> known.note({3: "a7"}, now=100.0)
>>> known.unreached({3: "a7"}, now=129.0), known.unreached({3: "a7"}, now=131.0)
((3,), ())
>>> known.unreached({3: "another process"}, now=101.0)
()
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

__all__ = ["Reachability"]

_FIRST_S = 30.0
_LONGEST_S = 3600.0


class Reachability:
    """Remembers processes, by worker and incarnation, with which no group could be made."""

    def __init__(self) -> None:
        self._until: dict[tuple[int, str], float] = {}
        self._pause_s: dict[tuple[int, str], float] = {}

    def note(self, workers: Mapping[int, str], *, now: float) -> None:
        """Remember workers that could not be reached."""
        for peer in workers.items():
            pause_s = self._pause_s[peer] = min(_LONGEST_S, 2 * self._pause_s.get(peer, _FIRST_S / 2))
            self._until[peer] = now + pause_s

    def forget(self, workers: Iterable[int]) -> None:
        """Forget workers with which a group works."""
        for peer in [peer for peer in self._until if peer[0] in set(workers)]:
            del self._until[peer], self._pause_s[peer]

    def unreached(self, alive: Mapping[int, str], *, now: float) -> tuple[int, ...]:
        """Return which of the processes that are alive are not to be tried now."""
        return tuple(sorted(peer[0] for peer in alive.items() if self._until.get(peer, 0.0) > now))

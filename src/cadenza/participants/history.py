"""What a worker has seen of the rounds of a circle, and with whom: what tells whether two workers have one state.

With several levels a worker is in a circle of each. A round of a larger level sets what the smaller ones start from,
so it stands in their chains too, and counts for more there than any number of their own rounds.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

from cadenza.participants.level_group import LevelGroup
from cadenza.participants.progress import Progress
from cadenza.participants.roster import Roster
from cadenza.participants.round_id import RoundId
from cadenza.participants.sites import Scope

__all__ = ["History"]

_OUTER = 1 << 32  # rounds of its own for which a round of a larger level counts in a circle


class History:
    """The rounds of a circle, as one of its workers has seen them.

    Args:
        worker: That worker.
        scope: Who may be in the circle.
        level: Its level, which is told who is expected.
        progress: What all are told of how far it is.

    Attributes:
        last: The workers that held the last round together, ascending; empty for a worker that was in none.
        rounds: How many rounds this worker has seen land, those of larger levels among them.
        weights: What each worker counted in the last one that has landed; empty where all counted alike.
        chain: A hash over them: equal on two workers that have seen the same.
        fresh: Whether it has its state from a larger level's round, and was in none of this circle yet.
    """

    def __init__(self, worker: int, scope: Scope, level: LevelGroup, progress: Progress) -> None:
        self.last: tuple[int, ...] = ()
        self.rounds = 0
        self.weights: dict[int, float] = {}
        self.chain = ""
        self.fresh = False
        self._worker, self._scope, self._level, self._progress = worker, scope, level, progress

    @property
    def new(self) -> bool:
        """Whether this worker was in no round yet."""
        return not self.last

    def meet(self, roster: Roster) -> None:
        """Note who comes together now, with one state."""
        self.last, self.fresh = roster.members, False

    def land(self, round: RoundId, roster: Roster, shares: Sequence[float] = ()) -> None:
        """Note that a round of the circle has landed, in which the members counted so much; alike without shares."""
        tell = len(set(shares)) > 1 and all(math.isfinite(share) and share >= 0 for share in shares)
        self.weights = dict(zip(roster.members, shares, strict=True)) if tell else {}
        self.rounds = max(self.rounds, roster.given_up) + 1
        self._progress.note_held(self.rounds)
        self.chain = _link(self.chain, round, roster)

    def last_weights(self) -> tuple[float, ...]:
        """Return what each of `last` counted; those who have come since then as much as the others on average."""
        if not self.weights:
            return ()
        usual = math.fsum(self.weights.values()) / len(self.weights)
        return tuple(self.weights.get(worker, usual) for worker in self.last)

    def facts(self) -> dict[str, Any]:
        """Return all of it, as JSON can hold it."""
        return {
            "rounds": self.rounds,
            "chain": self.chain,
            "last": self.last,
            "weights": [[worker, weight] for worker, weight in self.weights.items()],
        }

    def take(self, facts: Mapping[str, Any]) -> None:
        """Know what another worker knows, whose state was taken."""
        self.rounds, self.chain = facts["rounds"], facts["chain"]
        self.last, self.weights = tuple(facts["last"]), dict(facts["weights"])
        self._level.expect(self.last, self._worker)

    def start_from(self, roster: Roster, chain: str, outer_rounds: int) -> None:
        """Begin with a state that was taken in a larger level's round, whose leader is in a circle with that chain."""
        self.fresh = True
        self.chain = _hash("fresh", chain)
        self._follow(roster, outer_rounds)

    def move_along(self, chain: str, outer_rounds: int) -> None:
        """Go on from where the larger level is now: the anchors were moved by as much as that one's has."""
        self.chain = _hash(self.chain, chain)
        self.rounds = outer_rounds * _OUTER
        self._progress.note_held(self.rounds)

    def land_under(self, round: RoundId, roster: Roster, outer_rounds: int) -> None:
        """Note that a round of a larger level has landed: those of this circle who were in it go on together."""
        self.chain = _link(self.chain, round, roster)
        self._follow(roster, outer_rounds)

    def begin(self, roster: Roster) -> None:
        """Note that all have started from one state."""
        self.fresh, self.chain = False, _link("", RoundId(0), roster)
        self._follow(roster, 0)

    def resume(self, rounds: int, mark: str) -> None:
        """Go on from a saved state that has seen so many rounds of the outermost level; a mark tells it from others.

        Without a mark it begins anew at the outermost anchor. Whatever was known before is over: who loads an older
        state than the others have is behind them.
        """
        self.rounds = rounds * _OUTER ** len(self._scope.path) + bool(mark and not self._scope.outermost)
        self._progress.held = max(self._progress.held, self.rounds)
        if self._scope.outermost:
            self.chain = _hash("resumed", rounds, mark)
        else:
            self.chain, self.fresh = _hash(self.chain, mark), not mark

    def _follow(self, roster: Roster, outer_rounds: int) -> None:
        if not self._scope.outermost:
            self.rounds = outer_rounds * _OUTER + (not self.fresh and outer_rounds > 0)
            self._progress.note_held(self.rounds)
            here = zip(roster.members, roster.sites, strict=True)
            self.last = tuple(worker for worker, site in here if self._scope.holds(site))
            self._level.expect(self.last, self._worker)


def _link(chain: str, round: RoundId, roster: Roster) -> str:
    """Return the hash chain after one more round."""
    return _hash(chain, round, roster.members)


def _hash(*told: object) -> str:
    return hashlib.blake2b(" ".join(map(str, told)).encode(), digest_size=16).hexdigest()

"""Workers that come and go, under `skip_round` and `shrink`: every round finds out anew who is in it.

A worker is in a circle for each level: the outermost is for all, those inside it are for the workers of its site. Here
is what the circles of one worker have to do with each other: which round to come to, and what a round of one level
means for the others.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from cadenza.errors import StoreLostError, TransportError, TurnedAwayError
from cadenza.faults import FaultPolicy, for_inner_level
from cadenza.participants.base import Admission, FailedRound, SharedState
from cadenza.participants.circle import Circle
from cadenza.participants.ending import note_end
from cadenza.participants.follower import Follower
from cadenza.participants.latecomer import Latecomer
from cadenza.participants.level_group import LevelGroup
from cadenza.participants.membership import Membership
from cadenza.participants.round_id import RoundId
from cadenza.participants.sites import scopes_of
from cadenza.strategy import LevelPlan

__all__ = ["ElasticParticipants"]

_logger = logging.getLogger("cadenza")

Result = TypeVar("Result")

_ATTEMPTS = 3  # to start together, and to end together
_SELDOM = 8  # steps, after which the ranks of a replica tell each other what is not urgent


class ElasticParticipants:
    """Who holds the rounds together now, and what is known of them.

    Args:
        membership: This worker's place in the job.
        policy: Who is enough for a round, and how long it waits.
        plans: The choices of each level, from the innermost.
        terms: What must be the same on all workers: strategy, version, model.
        sharded: Whether the ranks of a replica hold parts of the model; else all of them hold the whole.
    """

    always_together = False
    atomic = True
    last_phases = tuple(range(1, _ATTEMPTS + 1))

    def __init__(
        self,
        membership: Membership,
        policy: FaultPolicy,
        plans: Sequence[LevelPlan],
        terms: str,
        *,
        sharded: bool = False,
    ) -> None:
        membership.heartbeat.site, scopes = scopes_of(plans, membership.site)
        self.membership = membership
        membership.taken = True
        self.policy = policy
        self._island = membership.island
        self._island.sharded = sharded
        self.levels: Sequence[LevelGroup] = [
            LevelGroup(plan, plan.name or f"level {number}", None, island=self._island)
            for number, plan in enumerate(plans)
        ]
        self._connections = (membership.connection(), membership.connection())
        # Where all ranks of a replica hold the whole model, each sends a part of it, and gets the others' inside.
        whole = self._island.size > 1 and not sharded
        self._circles = [
            Circle(
                membership,
                policy if scope.outermost else for_inner_level(policy),
                self.levels[scope.level],
                terms,
                self._connections,
                scope,
                self._island.inside() if whole and not plans[scope.level].codec.shaped else None,
            )
            for scope in scopes
        ]
        self._outermost = self._current = self._circles[-1]
        self._island.on_break(self._part)  # nobody is to wait for this rank in a transfer
        self._latecomer = Latecomer(membership, policy.patience, self._connections[0])
        self._follower = Follower(membership, policy.patience, self._circles, self._connections[0])
        self._tried: set[RoundId] = set()
        self._origin = ""  # what names the run that this worker is in

    @property
    def worker(self) -> int:
        """This worker's number."""
        return self.membership.worker

    @property
    def members(self) -> tuple[int, ...]:
        return self._outermost.history.last

    @property
    def behind(self) -> bool:
        return any(circle.behind for circle in self._circles)

    def missed(self, round: RoundId) -> bool:
        circle = self._circles[round.level]
        return circle.behind or circle.history.new

    @property
    def idle(self) -> bool:
        return self._current.idle

    @property
    def over(self) -> bool:
        return any(circle.over for circle in self._circles)

    @property
    def held(self) -> int:
        return self._outermost.history.rounds

    def resume(self, held: int, marks: Sequence[str]) -> None:
        for circle, mark in zip(self._circles, marks, strict=True):
            circle.history.resume(held, mark)

    @property
    def history(self) -> str:
        """A hash over the rounds that this worker has seen land: equal on workers of a site that have seen the same."""
        return self._circles[0].history.chain

    def group(self, level: int, round: int) -> LevelGroup:
        return self.levels[level]

    # ---- coming together -------------------------------------------------------------------------------------------

    def start(self, state: SharedState) -> None:
        self.membership.heartbeat.preparing = False
        phase, reason = 0, ""
        mates = self._island.loop
        for _ in range(_ATTEMPTS):
            phase = max(phase, mates.tell(self._start_phase))
            failed = self._meet(RoundId(0, phase, level=len(self.levels) - 1), state)
            if failed is None:
                self._origin = self._outermost.roster.mark
                for circle in self._circles:
                    circle.history.begin(self._outermost.roster)
                return
            if mates.tell(lambda reached=phase: self._has_begun(reached)):  # type: ignore[misc]
                return  # the others have begun
            self._outermost.behind = False
            phase, reason = phase + 1, failed.reason
        raise TransportError(f"The workers did not come together: {reason}.")

    def _meet(self, round: RoundId, state: SharedState) -> FailedRound | None:
        """Come to a first round and take the leader's state."""
        admitted = self._outermost.admit(round, "start", patience_s=self.policy.patience.first_s)
        return admitted if isinstance(admitted, FailedRound) else self.catch_up(state)

    def _has_begun(self, phase: int) -> bool:
        """Tell whether the others train already: ask at once if they are beyond this attempt, else after a pause."""
        if not self.behind:
            time.sleep(2 * self.membership.heartbeat.tick_s)
        with suppress(StoreLostError):
            self.membership.heartbeat.glance()
        return self.behind and self._start_phase() <= phase

    def _start_phase(self) -> int:
        """Return which attempt to start together is under way; -1 if there is none, or training has begun."""
        latest = self._outermost.progress.latest
        return latest.phase if latest is not None and latest.step == 0 else -1

    def summons(self, step: int) -> RoundId | None:
        self._island.check()
        self._notice_overtaken(step)
        heartbeat = self.membership.heartbeat
        heartbeat.eager = self.behind or any(circle.history.new for circle in self._circles)
        if not heartbeat.eager:
            self._refuse_replaced()
            return None
        return self._obey(self._island.loop.tell(lambda: self._calls(step), _pack_rounds, _unpack_rounds))

    def _notice_overtaken(self, step: int) -> None:
        """Know it at once if rounds are held without this worker, and not only when it comes to its own next one."""
        if self._island.size > 1 and step % _SELDOM:
            return  # what one rank of a replica notices, all have to be told
        told = self._island.loop.tell(lambda: [circle.is_overtaken(step) for circle in self._circles])
        for circle, overtaken in zip(self._circles, told, strict=True):
            if overtaken:
                circle.be_overtaken()

    def _calls(self, step: int) -> list[RoundId | None]:
        """Return the round to which each circle calls this worker."""
        self._refuse_replaced()
        return [self._call(circle, step) for circle in self._circles]

    def _call(self, circle: Circle, step: int) -> RoundId | None:
        """Return the round to which a circle calls this worker: it is behind there, and the others are further."""
        latest = circle.progress.latest
        if not (circle.behind or circle.history.new) or latest is None or latest.step == 0 or latest in self._tried:
            return None
        return latest if latest.step > step or circle.history.new else None

    def _obey(self, calls: Sequence[RoundId | None]) -> RoundId | None:
        """Return the latest of the rounds to which circles call."""
        latest = _latest(calls)
        for circle, called in zip(self._circles, calls, strict=True):
            circle.called = latest if called == latest else None
        return latest

    def _refuse_replaced(self) -> None:
        if self.membership.heartbeat.replaced:
            raise TurnedAwayError(f"Another process has taken the place of worker {self.worker}; this one ends.")

    def awaited(self) -> RoundId | None:
        if not self._outermost.history.new:
            self._tried.clear()
            return None
        self.membership.heartbeat.eager = True
        found = self._obey(self._island.loop.tell(self._awaited, _pack_rounds, _unpack_rounds))
        assert found is not None
        self._tried.add(found)
        return found

    def _awaited(self) -> list[RoundId | None]:
        """Wait until the others hold a round, and return to which one each circle calls."""
        self._latecomer.await_round(lambda: _latest(self._calls(-1)))
        return self._calls(-1)

    def follow(self, own: RoundId, *, after: RoundId) -> RoundId | None:
        self.membership.heartbeat.exhausted = self.membership.heartbeat.eager = True
        told = self._island.loop.tell(
            lambda: self._follower.await_round(own, after, self._origin), _pack_sending, _unpack_sending
        )
        if told is None:
            self._outermost.over = self._island.loop.tell(lambda: self._follower.over)
            return None
        round, called = told
        for circle in self._circles:
            circle.called = round if called and circle is self._circles[round.level] else None
        return round

    def admit(
        self, round: RoundId, digest: str, *, settled: bool = False, last: bool = False
    ) -> Admission | FailedRound:
        self._current = circle = self._circles[round.level]
        larger = self._circles[round.level + 1 :]
        # Who has no data has nothing else to do; a round inside it must not keep it from one of all.
        endless = self.membership.heartbeat.exhausted and circle.called is not None and not larger and not last
        return circle.admit(
            round,
            digest,
            settled=settled,
            last=last,
            patience_s=math.inf if endless else None,
            elsewhere=lambda: any(self._call(other, round.step) is not None for other in larger),
            origin=self._origin,
        )

    def catch_up(self, state: SharedState) -> FailedRound | None:
        circle, new = self._current, self._current.history.new
        heard = circle.catch_up(state, [{**other.facts(), "origin": self._origin} for other in self._circles])
        if isinstance(heard, FailedRound):
            return heard
        if heard:
            self._origin = str(heard[-1]["origin"])
            self._follow(circle, heard, new=new)
        return None

    def _follow(self, circle: Circle, heard: Sequence[Mapping[str, Any]], *, new: bool) -> None:
        """Let the other circles follow one in which this worker has taken the leader's state."""
        level = circle.scope.level
        for larger, told in zip(self._circles[level + 1 :], heard[level + 1 :], strict=True):
            larger.take(told)
        for number in reversed(range(level)):
            smaller, outer_rounds = self._circles[number], self._circles[number + 1].history.rounds
            if new:
                smaller.history.start_from(circle.roster, heard[number]["chain"], outer_rounds)
            else:
                smaller.history.move_along(circle.history.chain, outer_rounds)

    # ---- going together --------------------------------------------------------------------------------------------

    def agree(self, round: RoundId, exchange: Callable[[], Result]) -> Result | FailedRound:
        return self._circles[round.level].agree(round, exchange)

    def commit(self, round: RoundId, wire_s: float, shares: Sequence[float] = ()) -> None:
        roster = self._circles[round.level].commit(round, wire_s, shares)
        for number in reversed(range(round.level)):
            self._circles[number].history.land_under(round, roster, self._circles[number + 1].history.rounds)

    # ---- the end ---------------------------------------------------------------------------------------------------

    def prepare_last_round(self) -> None:
        """Wait for a store that is away, as long as for a worker that is late."""
        deadline = time.monotonic() + self.policy.patience.grace_s
        while not self.membership.heartbeat.connected and time.monotonic() < deadline:
            time.sleep(self.membership.heartbeat.tick_s)

    def end(self, *, together: bool) -> None:
        self._island.leave()
        if not together:
            text = "The last round failed; this worker ends with what was agreed on before it."
            _logger.warning("Worker %d: %s", self.worker, text)
            return
        with suppress(StoreLostError):  # workers that come after the end are told that it has come
            told = {"origin": self._origin, "chain": self._outermost.history.chain}
            self._connections[0].call(lambda store: note_end(store, **told))

    def close(self) -> None:
        self._part()
        self.membership.close()
        for connection in self._connections:
            connection.close()

    def _part(self) -> None:
        for circle in self._circles:
            circle.part()


def _latest(rounds: Sequence[RoundId | None]) -> RoundId | None:
    return max((round for round in rounds if round is not None), default=None)


def _pack_rounds(rounds: Sequence[RoundId | None]) -> str:
    return " ".join(str(round or "-") for round in rounds)


def _unpack_rounds(text: str) -> list[RoundId | None]:
    return [None if word == "-" else RoundId.parse(word) for word in text.split(" ")]


def _pack_sending(sending: tuple[RoundId, bool] | None) -> str:
    return "" if sending is None else f"{sending[0]} {'called' if sending[1] else 'unasked'}"


def _unpack_sending(text: str) -> tuple[RoundId, bool] | None:
    round, _, how = text.partition(" ")
    return (RoundId.parse(round), how == "called") if text else None

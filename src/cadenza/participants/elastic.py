"""Workers that come and go, under `skip_round` and `shrink`: every round finds out anew who is in it.

`admit` agrees on a roster and connects its members, `catch_up` gives those who are behind the leader's state, `agree`
sends the values and votes, `commit` counts what has landed. Whatever fails on the way is a `FailedRound`: nothing has
changed, and the next round starts from a new process group.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

from cadenza.errors import (
    CadenzaError,
    ContributionRefusedError,
    NobodyLeftError,
    StoreLostError,
    TransportError,
    TurnedAwayError,
)
from cadenza.faults import FaultPolicy
from cadenza.participants.assembly import Assembly
from cadenza.participants.base import Admission, FailedRound, SharedState
from cadenza.participants.group_keeper import GroupKeeper
from cadenza.participants.latecomer import Latecomer
from cadenza.participants.level_group import LevelGroup
from cadenza.participants.membership import Membership
from cadenza.participants.roster import Arrival, RollbackError, Roster, RoundNotHeldError
from cadenza.participants.roster_log import RosterLog
from cadenza.participants.round_id import RoundId
from cadenza.participants.signed_store import SignedStore
from cadenza.participants.state_transfer import transfer_state
from cadenza.participants.vote import Vote
from cadenza.strategy import LevelPlan

__all__ = ["ElasticParticipants"]

_logger = logging.getLogger("cadenza")

Result = TypeVar("Result")

_ATTEMPTS = 3  # to start together, and to end together
_STATE = 12  # times the bytes of a round may be in a state: anchor, two moments in fp32, where rounds are in 8 bits
_REMEMBERED = 32  # rounds from which it is known how late workers are
_MEMORY = 0.7  # how much of the estimate of a transfer's duration stays when another one is measured


class ElasticParticipants:
    """Who holds the rounds together now, and what is known of them.

    Args:
        membership: This worker's place in the job.
        policy: Who is enough for a round, and how long it waits.
        plan: The choices of the one level.
        terms: What must be the same on all workers: strategy, version, model.

    Attributes:
        behind: Whether rounds were, or may have been, held without this worker.
        idle: Whether it has only just joined, and has nothing yet to contribute.
        over: Whether the others were seen to have finished.
    """

    always_together = False
    atomic = True
    last_phases = tuple(range(1, _ATTEMPTS + 1))

    def __init__(self, membership: Membership, policy: FaultPolicy, plan: LevelPlan, terms: str) -> None:
        self.membership = membership
        self.policy = policy
        self.levels: Sequence[LevelGroup] = [LevelGroup(plan, plan.name or "level 0", None)]
        self.behind = self.idle = self.over = False
        self._terms = terms
        # One for the training loop, one for rounds in flight.
        self._connections = [membership.connection(), membership.connection()]
        self._latecomer = Latecomer(membership, policy.patience, self._connections[0])
        self._group = GroupKeeper(membership, self._connections[0])
        self._roster = Roster(())
        self._last: tuple[int, ...] = ()
        self._rounds = 0
        self._chain = ""
        self._late_s = 0.0
        self._usual_s: float | None = None
        self._losses = 0
        self._waits: deque[float] = deque(maxlen=_REMEMBERED)  # for the last one to come, where all came
        self._log = RosterLog(membership.worker)
        self._tried: RoundId | None = None
        self._refused_at: float | None = None  # since when there was nobody who has seen the last rounds
        self._called: RoundId | None = None

    @property
    def worker(self) -> int:
        """This worker's number."""
        return self.membership.worker

    @property
    def members(self) -> tuple[int, ...]:
        return self._last

    @property
    def held(self) -> int:
        return self._rounds

    def resume(self, held: int) -> None:
        self._rounds = self.membership.heartbeat.held = max(self._rounds, held)

    @property
    def history(self) -> str:
        """A hash over the rounds that this worker has seen land: equal on two workers that have seen the same."""
        return self._chain

    @property
    def _new(self) -> bool:
        return not self._last

    def group(self, level: int, round: int) -> LevelGroup:
        return self.levels[level]

    # ---- coming together -------------------------------------------------------------------------------------------

    def start(self, state: SharedState) -> None:
        self.membership.heartbeat.preparing = False
        phase, reason = 0, ""
        for _ in range(_ATTEMPTS):
            phase = max(phase, self._start_phase())
            failed = self._meet(RoundId(0, phase), state)
            if failed is None:
                self._chain = _link("", RoundId(0), self._roster)
                return
            self._look()
            if self.behind and self._start_phase() <= phase:
                return  # the others have begun
            self.behind = False
            phase, reason = phase + 1, failed.reason
        raise TransportError(f"The workers did not come together: {reason}.")

    def _meet(self, round: RoundId, state: SharedState) -> FailedRound | None:
        """Come to a first round and take the leader's state."""
        admitted = self._admit(round, "start", settled=False, patience_s=self.policy.patience.first_s)
        return admitted if isinstance(admitted, FailedRound) else self.catch_up(state)

    def _look(self) -> None:
        """Know the latest round: at once if the others are beyond this one, else after a pause."""
        if not self.behind:
            time.sleep(2 * self.membership.heartbeat.tick_s)
        with suppress(StoreLostError):
            self.membership.heartbeat.glance()

    def _start_phase(self) -> int:
        """Return which attempt to start together is under way; -1 if there is none, or training has begun."""
        latest = self.membership.heartbeat.latest
        return latest.phase if latest is not None and latest.step == 0 else -1

    def summons(self, step: int) -> RoundId | None:
        heartbeat = self.membership.heartbeat
        if heartbeat.replaced:
            raise TurnedAwayError(f"Another process has taken the place of worker {self.worker}; this one ends.")
        latest, heartbeat.eager = heartbeat.latest, self.behind or self._new
        if not (self.behind or self._new) or latest is None or latest.step == 0:
            return None
        self._called = latest if latest.step > step or self._new else None
        return self._called

    def awaited(self) -> RoundId | None:
        if not self._new:
            return None
        self._tried = self._latecomer.await_round(lambda: self.summons(-1), after=self._tried)
        return self._tried

    def admit(self, round: RoundId, digest: str, *, settled: bool) -> Admission | FailedRound:
        patience_s = self.policy.patience.grace_after(self._waits)
        return self._admit(round, digest, settled=settled, patience_s=patience_s)

    def _admit(self, round: RoundId, digest: str, *, settled: bool, patience_s: float) -> Admission | FailedRound:
        if not self.membership.heartbeat.connected:
            self.behind = True
            return FailedRound("the store cannot be reached")
        self._renew_connections()
        began = time.time()
        try:
            roster = self._roster_of(round, self._arrival(round, digest, settled), patience_s)
        except RoundNotHeldError as error:
            self.over = self.over or error.over
            self._refuse_for_long(error)
            if error.behind and not self.behind:
                self.behind, self._late_s = True, 0.0 if self._new else max(0.001, time.time() - began)
            return FailedRound(str(error), error.absent)
        except StoreLostError as error:
            self.behind = True
            return FailedRound(str(error))
        self._refused_at = None
        if not roster.absent:
            self._waits.append(time.time() - began)
        self._log.write(roster, round, last=self._last)
        self.membership.heartbeat.note_prepared(dict(zip(roster.members, roster.incarnations, strict=True)))
        try:
            self._form(roster, round)
        except CadenzaError as error:
            return FailedRound(str(error), self._group.part(error))
        return Admission(catching_up=bool(roster.behind), settled=roster.settled)

    def _roster_of(self, round: RoundId, me: Arrival, patience_s: float) -> Roster:
        membership, connection = self.membership, self._connections[0]
        accepts = membership.accepts_rollback
        assembly = Assembly(connection, membership.heartbeat, membership.signer, round, me, accepts_rollback=accepts)
        return assembly.hold(self.policy, workers=self.membership.workers, patience_s=patience_s)

    def _refuse_for_long(self, error: RoundNotHeldError) -> None:
        """End the training if those who have seen the last rounds do not come back."""
        if not isinstance(error, RollbackError):
            return
        now = time.monotonic()
        if self._refused_at is None:
            self._refused_at = now
            _logger.warning("Worker %d: %s. They are waited for.", self.worker, error)
        elif now - self._refused_at > self.policy.patience.first_s:
            raise NobodyLeftError(
                f"{str(error).capitalize()}; they did not come back for {self.policy.patience.first_s:g} s. Start all "
                "workers from a checkpoint, under another name (CADENZA_JOB, or join(job=…)); or let them go on from "
                "the older state (CADENZA_ACCEPT_ROLLBACK=1, join(accept_rollback=True), or cadenza train "
                "--accept-rollback)."
            )

    def _renew_connections(self) -> None:
        """Let go of connections to a store that was lost since."""
        if self._losses != self.membership.heartbeat.losses:
            self._losses = self.membership.heartbeat.losses
            for connection in self._connections:
                connection.close()

    def _arrival(self, round: RoundId, digest: str, settled: bool) -> Arrival:
        terms = hashlib.blake2b(f"{self._terms} {digest}".encode(), digest_size=16).hexdigest()
        return Arrival(
            self.worker,
            self.membership.heartbeat.incarnation,
            self._rounds,
            self._chain,
            terms,
            last=self._last,
            late_s=0.0 if self._new else self._late_s,
            generation=self._group.name,
            settled=settled,
            called=self._called is not None and round.step == self._called.step,
            unreached=self._group.unreached(),
            unsure=self.membership.heartbeat.forgetful,
        )

    def _form(self, roster: Roster, round: RoundId) -> None:
        """Have a process group of the roster's members."""
        self._roster = roster
        if (transport := self._group.form(roster, round, timeout_s=self._limit_s(roster))) is not None:
            self.levels[0].transport = transport

    def catch_up(self, state: SharedState) -> FailedRound | None:
        roster = self._roster
        receives = self.worker in roster.behind
        try:
            if roster.members != self._last:
                state.refit()
            self.idle = receives and self._new
            self._transfer(state, roster, receives=receives)
        except CadenzaError as error:
            return FailedRound(str(error), self._group.part(error))
        self._last = roster.members
        self.behind, self._late_s, self._called = False, 0.0, None
        return None

    def _transfer(self, state: SharedState, roster: Roster, *, receives: bool) -> None:
        """Let those who are behind take the leader's state; the others have nothing to do with it."""
        concerned = tuple(sorted({roster.leader, *roster.behind}))
        if not roster.behind or self.worker not in concerned:
            return
        facts = {"rounds": self._rounds, "chain": self._chain}
        with self._group.among(concerned, timeout_s=self._limit_s(roster)) as generation:
            heard = transfer_state(state, generation, roster.leader, facts, receives=receives, new=self._new)
        self._rounds, self._chain = heard["rounds"], heard["chain"]

    # ---- going together --------------------------------------------------------------------------------------------

    def agree(self, round: RoundId, exchange: Callable[[], Result]) -> Result | FailedRound:
        roster = self._roster
        try:
            result = exchange()
        except CadenzaError as error:
            self._abort(round, roster)
            own = isinstance(error, ContributionRefusedError) and self.worker in error.workers
            return self._failed(str(error), roster, own_fault=own)
        except BaseException:
            self._abort(round, roster)
            raise
        limit_s = self._limit_s(roster)
        try:
            committed = self._connections[1].call(
                lambda store: self._vote(store, round, roster).ready(lambda: bool(self._group.missing(roster))),
                timeout_s=limit_s + 5,
            )
        except StoreLostError as error:
            self.behind = True  # the others may have seen it pass
            return FailedRound(f"the vote could not be ended: {error}")
        return result if committed else self._failed("another worker failed, or did not come to the vote", roster)

    def _vote(self, store: SignedStore, round: RoundId, roster: Roster) -> Vote:
        limit_s, counts = self._limit_s(roster), self.worker == roster.leader
        return Vote(store, f"round/{round}/vote", members=len(roster.members), timeout_s=limit_s, counts=counts)

    def _abort(self, round: RoundId, roster: Roster) -> None:
        with suppress(StoreLostError):
            self._connections[1].call(lambda store: self._vote(store, round, roster).abort())

    def _failed(self, reason: str, roster: Roster, *, own_fault: bool = False) -> FailedRound:
        """Let the group go: after one failure it is of no use."""
        self._group.part()
        return FailedRound(reason, tuple(sorted(self._group.missing(roster))), own_fault)

    def commit(self, round: RoundId, wire_s: float) -> None:
        heartbeat = self.membership.heartbeat
        self._rounds = max(self._rounds, self._roster.given_up) + 1
        heartbeat.held, heartbeat.forgetful = max(heartbeat.held, self._rounds), False
        self._chain = _link(self._chain, round, self._roster)
        known = self._usual_s
        self._usual_s = wire_s if known is None else _MEMORY * known + (1 - _MEMORY) * wire_s

    # ---- the end ---------------------------------------------------------------------------------------------------

    def prepare_last_round(self) -> None:
        """Wait for a store that is away, as long as for a worker that is late."""
        deadline = time.monotonic() + self.policy.patience.grace_s
        while not self.membership.heartbeat.connected and time.monotonic() < deadline:
            time.sleep(self.membership.heartbeat.tick_s)

    def end(self, *, together: bool) -> None:
        if not together:
            text = "The last round failed; this worker ends with what was agreed on before it."
            _logger.warning("Worker %d: %s", self.worker, text)
            return
        with suppress(StoreLostError):  # workers that come after the end are told that it has come
            self._connections[0].call(lambda store: store.set("finished", self._chain))

    def close(self) -> None:
        self._group.part()
        self.membership.close()
        for connection in self._connections:
            connection.close()

    def _limit_s(self, roster: Roster) -> float:
        """Return after how long without progress a transfer has failed."""
        patience = self.policy.patience
        if self._usual_s is None:
            return patience.first_s
        usual_s = self._usual_s * (_STATE if roster.behind else 1)
        return patience.grace_s + patience.factor * usual_s


def _link(chain: str, round: RoundId, roster: Roster) -> str:
    """Return the hash chain after one more round."""
    return hashlib.blake2b(f"{chain} {round} {roster.members}".encode(), digest_size=16).hexdigest()

"""Those who hold rounds together, as one of them knows them: who they were last, what they have seen, what works.

`admit` agrees on a roster and connects its members, `catch_up` gives those who are behind the leader's state, `agree`
sends the values and votes, `commit` counts what has landed. Whatever fails on the way is a `FailedRound`: nothing has
changed, and the next round starts from a new process group.
"""

from __future__ import annotations

import hashlib
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import torch

from cadenza.errors import (
    CadenzaError,
    ContributionRefusedError,
    NobodyLeftError,
    ReplicaBrokenError,
    StoreLostError,
)
from cadenza.faults import FaultPolicy, to_wait_for_all
from cadenza.participants.assembly import Assembly
from cadenza.participants.base import Admission, FailedRound, SharedState
from cadenza.participants.group_keeper import GroupKeeper
from cadenza.participants.history import History
from cadenza.participants.level_group import LevelGroup, Stage
from cadenza.participants.membership import Membership
from cadenza.participants.roster import Arrival, RollbackError, Roster, RoundNotHeldError
from cadenza.participants.roster_log import RosterLog
from cadenza.participants.round_id import RoundId
from cadenza.participants.signed_store import SignedStore
from cadenza.participants.sites import Scope
from cadenza.participants.state_transfer import check_received, gather_parts, transfer_state
from cadenza.participants.store import StoreConnection
from cadenza.participants.vote import Vote
from cadenza.transports import Transport

__all__ = ["Circle"]

_logger = logging.getLogger("cadenza")

Result = TypeVar("Result")

_STATE = 12  # times the bytes of a round may be in a state: anchor, two moments in fp32, where rounds are in 8 bits
_REMEMBERED = 32  # rounds from which it is known how late workers are
_LINGER = 0.02  # of the time since the last round
_MEMORY = 0.7  # how much of the estimate of a transfer's duration stays when another one is measured


class Circle:
    """The workers that hold the rounds of a level together.

    Args:
        membership: This worker's place in the job.
        policy: Who is enough for a round, and how long it waits.
        level: The level; its transport is the way to the last round's members.
        terms: What must be the same on all workers: strategy, version, model.
        connections: To the store: one for the training loop, one for rounds in flight.
        scope: Who may be in it.
        inside: The way to the other ranks of this worker, if all of them hold the whole model.

    Attributes:
        history: Which rounds this worker has seen, and with whom it held the last one.
        called: The round that this worker comes to because others hold it, and not by steps of its own.
        behind: Whether rounds were, or may have been, held without this worker.
        idle: Whether it has only just joined, and has nothing yet to contribute.
        over: Whether the others were seen to have finished.
    """

    def __init__(
        self,
        membership: Membership,
        policy: FaultPolicy,
        level: LevelGroup,
        terms: str,
        connections: tuple[StoreConnection, StoreConnection],
        scope: Scope,
        inside: Transport | None = None,
    ) -> None:
        self.membership, self.policy, self.scope = membership, policy, scope
        self.progress = membership.heartbeat.progress(scope.place)
        self.history = History(membership.worker, scope, level, self.progress)
        self.called: RoundId | None = None
        self.behind = self.idle = self.over = False
        self._level, self._terms, self._connections = level, terms, connections
        self._island, self._inside = membership.island, inside
        self._group = GroupKeeper(membership, connections[0], scope.place)
        self._fitted: object = None  # the members for which what is kept between rounds was made
        self._roster = Roster(())
        self._agreed: dict[RoundId, Roster] = {}  # of rounds that count, and have not landed yet
        self._late_s, self._losses = 0.0, 0
        self._usual_s: float | None = None
        self._waits: deque[float] = deque(maxlen=_REMEMBERED)  # for the last one to come, where all came
        self._log = RosterLog(
            membership.worker if not self._island.rank else -1, leaves_out=policy != to_wait_for_all(policy)
        )
        self._met_at: float | None = None  # when it last came together with others
        self._refused_at: float | None = None  # since when there was nobody who has seen the last rounds

    @property
    def worker(self) -> int:
        """This worker's number."""
        return self.membership.worker

    @property
    def roster(self) -> Roster:
        """The roster of the last round to which it was admitted."""
        return self._roster

    def part(self) -> None:
        """Let the process group go."""
        self._group.part()

    # ---- coming together -------------------------------------------------------------------------------------------

    def admit(
        self,
        round: RoundId,
        digest: str,
        *,
        settled: bool = False,
        last: bool = False,
        patience_s: float | None = None,
        elsewhere: Callable[[], bool] = lambda: False,
        origin: str = "",
    ) -> Admission | FailedRound:
        """Find out who is in a round, and connect them; wait for who is late as long as usual, or for `patience_s`.

        For the `last` one all are waited for, also where fewer would be enough. `elsewhere` says whether this worker is
        called to another level's round meanwhile; `origin` names the run that it is in.
        """
        policy = to_wait_for_all(self.policy) if last else self.policy
        if patience_s is None:
            patience = policy.patience
            patience_s = patience.grace_s if last else patience.grace_after(self._waits)
        self._renew_connections()
        arrival, began = self._arrival(round, digest, settled), time.time()
        try:
            roster = self._island.loop.tell(
                lambda: self._roster_of(round, arrival, policy, patience_s, elsewhere, last=last, origin=origin),
                Roster.pack,
                lambda text: Roster.unpack(text, self._roster),
            )
        except RoundNotHeldError as error:
            self.over = self.over or error.over
            if error.behind and not self.behind:
                self.behind, self._late_s = True, 0.0 if self.history.new else max(0.001, error.late_s)
            return FailedRound(str(error), error.absent)
        except StoreLostError as error:
            self.behind = True
            return FailedRound(str(error))
        self._refused_at, self._met_at = None, time.monotonic()
        if not roster.absent:
            self._waits.append(time.time() - began)
        self._log.write(roster, round, last=self.history.last)
        processes = zip(roster.incarnations, roster.sites, strict=True)
        self.membership.heartbeat.note_met(dict(zip(roster.members, processes, strict=True)))
        try:
            self._island.loop.agree(lambda: self._form(roster, round))
        except CadenzaError as error:
            return self._given_up(error)
        return Admission(catching_up=bool(roster.behind), settled=roster.settled)

    def _roster_of(
        self,
        round: RoundId,
        me: Arrival,
        policy: FaultPolicy,
        patience_s: float,
        elsewhere: Callable[[], bool],
        *,
        last: bool,
        origin: str,
    ) -> Roster:
        membership = self.membership
        if not membership.heartbeat.connected:
            raise StoreLostError("the store cannot be reached")
        assembly = Assembly(
            self._connections[0],
            membership.heartbeat,
            membership.signer,
            round,
            me,
            scope=self.scope,
            accepts_rollback=membership.accepts_rollback,
            elsewhere=elsewhere,
            origin=origin,
            columns=self._island.size,
            known=self._roster,
        )
        workers = membership.workers if self.scope.outermost else 0  # all start together
        try:
            linger_s = math.inf if last else self._linger_s()  # whatever a policy of one's own says of who suffices
            return assembly.hold(policy, workers=workers, patience_s=patience_s, linger_s=linger_s)
        except RoundNotHeldError as error:
            self._refuse_for_long(error)
            raise

    def _linger_s(self) -> float:
        """Return how long a round waits for who is a moment late, where the others are enough."""
        return 0.0 if self._met_at is None else _LINGER * (time.monotonic() - self._met_at)

    def is_overtaken(self, step: int) -> bool:
        """Tell whether a round was held without this worker, and the others have come to the one after it."""
        latest, cycle = self.progress.latest, self._level.plan.schedule.cycle
        missed = not self.history.new and self.progress.held > self.history.rounds
        return missed and latest is not None and cycle is not None and latest.step > step + cycle[0]

    def be_overtaken(self) -> None:
        """Know that a round was held without this worker."""
        self.behind, self._late_s = True, max(0.001, self._late_s)

    def _given_up(self, error: CadenzaError) -> FailedRound:
        """Let the group go after a failure; where this replica has lost a rank, there is no going on."""
        absent = self._group.part(error)
        if isinstance(error, ReplicaBrokenError):
            raise error
        return FailedRound(str(error), absent)

    def _refuse_for_long(self, error: RoundNotHeldError) -> None:
        """End the training if those who have seen the last rounds do not come back; a site gets a state from others."""
        if not isinstance(error, RollbackError) or not self.scope.outermost:
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
            self.history.rounds,
            self.history.chain,
            terms,
            last=self.history.last,
            weights=self.history.last_weights(),
            late_s=0.0 if self.history.new else self._late_s,
            groups=self._group.names(),
            settled=settled,
            called=self.called is not None and round.step == self.called.step,
            unreached=self._group.unreached(),
            unsure=self.progress.forgetful,
            site=self.membership.heartbeat.site,
        )

    def _form(self, roster: Roster, round: RoundId) -> None:
        """Have a process group of the roster's members."""
        self._roster = roster
        staged, limit_s = self._inside is None, self._limit_s(roster)
        if (ways := self._group.form(roster, round, timeout_s=limit_s, staged=staged)) is not None:
            self._level.transport, self._level.stage = ways
            if self._inside is not None:
                self._level.stage = Stage(self._inside, self._level.transport, alike=True)

    def catch_up(self, state: SharedState, told: Sequence[Mapping[str, Any]]) -> Sequence[Any] | FailedRound:
        """Let those who are behind take the leader's state; return what the leader told of its circles, if any.

        `told` is what this worker has to tell of its own.
        """
        roster, heard = self._roster, list[Any]()
        receives = self.worker in roster.behind
        try:
            if self._fitted != (roster.members, roster.inside):
                self._island.loop.agree(lambda: state.refit(self.scope.level))
                self._fitted = (roster.members, roster.inside)
            self.idle = receives and self.history.new
            heard = self._transfer(state, roster, told, receives=receives)
        except CadenzaError as error:
            return self._given_up(error)
        if receives:
            self.history.take(heard[self.scope.level])
        self.history.meet(roster)
        self.behind, self._late_s, self.called = False, 0.0, None
        return heard if receives else ()

    def _transfer(
        self, state: SharedState, roster: Roster, told: Sequence[Mapping[str, Any]], *, receives: bool
    ) -> list[Any]:
        """Let those who are behind take the leader's state; return what the leader told of its circles."""
        if not roster.behind or self.worker not in roster.concerned:
            return []

        def transfer() -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
            generation = self._group.among_concerned(timeout_s=self._limit_s(roster))
            return transfer_state(state, generation, roster.leader, {"circles": told}, receives=receives, part=part)

        mates, inside = self._island.loop, self._inside
        part = (0, 1) if inside is None else (self._island.rank, self._island.size)
        heard, tensors = mates.agree(transfer)
        if receives:
            if inside is not None:
                mates.agree(lambda: gather_parts(tensors, inside))
            mates.agree(lambda: check_received(heard, tensors))  # on all ranks, before one of them changes anything
            state.adopt(heard["state"], tensors, new=self.history.new, level=self.scope.level)
        return list(heard["circles"])

    def facts(self) -> dict[str, Any]:
        """Return what a worker that takes this one's state has to know of the circle."""
        return {**self.history.facts(), "behind": self.behind}

    def take(self, facts: Mapping[str, Any]) -> None:
        """Know what the leader of a smaller circle knows of this one."""
        self.history.take(facts)
        self.behind = facts["behind"]

    # ---- going together --------------------------------------------------------------------------------------------

    def agree(self, round: RoundId, exchange: Callable[[], Result]) -> Result | FailedRound:
        roster, mates = self._roster, self._island.rounds
        mates.begin()
        try:
            result = exchange()
            verdict = self._verdict(round, roster)
        except ReplicaBrokenError:
            self._abort(round, roster)
            self._group.part()
            raise
        except CadenzaError as error:
            self._abort(round, roster)
            if not mates.failed:  # else it was one of them who told this one
                mates.fail(error)
            own = isinstance(error, ContributionRefusedError) and self.worker in error.workers
            return self._failed(str(error), roster, own_fault=own)
        except BaseException:
            self._abort(round, roster)
            mates.close()
            raise
        if verdict == "commit":
            self._agreed[round] = roster
            return result
        if verdict == "abort":
            return self._failed("another worker failed, or did not come to the vote", roster)
        self.behind = True  # the others may have seen it pass
        return FailedRound(f"the vote could not be ended: {verdict}")

    def _verdict(self, round: RoundId, roster: Roster) -> str:
        """Return "commit" or "abort", or why neither is known; what one rank of this worker knows, all do."""
        try:
            committed = self._connections[1].call(
                lambda store: self._vote(store, round, roster).ready(lambda: bool(self._group.missing(roster))),
                timeout_s=self._limit_s(roster) + 5,
            )
            own = "commit" if committed else "abort"
        except StoreLostError as error:
            own = str(error)
        known = self._island.rounds.exchange(own)
        return next((verdict for verdict in ("commit", "abort") if verdict in known), known[0])

    def _vote(self, store: SignedStore, round: RoundId, roster: Roster) -> Vote:
        limit_s, counts = self._limit_s(roster), self.worker == roster.leader and not self._island.rank
        voters, key = len(roster.members) * self._island.size, f"{self.scope.place}round/{round}/vote"
        return Vote(store.bound(roster.mark), key, members=voters, timeout_s=limit_s, counts=counts)

    def _abort(self, round: RoundId, roster: Roster) -> None:
        with suppress(StoreLostError):
            self._connections[1].call(lambda store: self._vote(store, round, roster).abort())

    def _failed(self, reason: str, roster: Roster, *, own_fault: bool = False) -> FailedRound:
        """Let the group go: after one failure it is of no use."""
        self._group.part()
        return FailedRound(reason, tuple(sorted(self._group.missing(roster))), own_fault)

    def commit(self, round: RoundId, wire_s: float, shares: Sequence[float] = ()) -> Roster:
        """Count a round that has landed, and return who held it; others may have come together since."""
        roster = self._agreed.pop(round, self._roster)
        self.history.land(round, roster, shares)
        known = self._usual_s
        self._usual_s = wire_s if known is None else _MEMORY * known + (1 - _MEMORY) * wire_s
        return roster

    def _limit_s(self, roster: Roster) -> float:
        """Return after how long without progress a transfer has failed."""
        patience = self.policy.patience
        if self._usual_s is None:
            return patience.first_s
        usual_s = self._usual_s * (_STATE if roster.behind else 1)
        return patience.grace_s + patience.factor * usual_s

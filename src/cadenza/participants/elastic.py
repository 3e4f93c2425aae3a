"""The workers that hold a synchronizer's rounds together under `skip_round` and `shrink`.

A round goes through three doors here: `gather` agrees on who is in it, makes their group, and lets those who are behind
catch up; `carry` sends the values and votes; `landed` counts what became of it. Whatever fails on the way is a `Lost`
round: nothing has changed, and the next one starts from a new group.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import torch.distributed as dist

from cadenza.engine.header import Header
from cadenza.engine.in_place_mean import Passage
from cadenza.engine.level_group import LevelGroup
from cadenza.engine.run_state import Held
from cadenza.errors import (
    CadenzaError,
    NobodyLeftError,
    RoundAbortedError,
    StoreLostError,
    TransportError,
    TurnedAwayError,
)
from cadenza.faults import Shrink, SkipRound
from cadenza.participants.generation import Generation, assemble
from cadenza.participants.membership import Call, Membership
from cadenza.participants.roster import KEPT, Guest, MeetingFailedError, Roster, clean_up, hold, told
from cadenza.participants.state_transfer import hand_over
from cadenza.participants.vote import Vote
from cadenza.strategy import LevelPlan
from cadenza.weighting.outliers import judge

__all__ = ["START", "Company", "Lost"]

_logger = logging.getLogger("cadenza")

START = Call(0)
_LOOK_S = 0.02  # between two looks for a meeting
_ATTEMPTS = 3  # to start together
_STATE = 12  # times the bytes of a round may be in a state: anchor, two moments in fp32, where rounds are in 8 bits
_MEMORY = 0.7  # how much of the estimate of a transfer's duration stays when another one is measured


@dataclass(frozen=True)
class Lost:
    """A round that failed and changed nothing: why, who was missing, and whether our own values were at fault."""

    reason: str
    absent: tuple[int, ...] = ()
    poisoned: bool = False


class _PoisonError(RoundAbortedError):
    """Contributions for which the policy skips the round."""

    def __init__(self, workers: list[int]) -> None:
        super().__init__(f"the contribution of {told(workers)} is not finite, or far larger than the others'")
        self.workers = workers


class Company:
    """Who holds the rounds together, now; and what is known of them.

    Attributes:
        level: The one level at which they meet, with the transport of the present generation.
        new: Whether this worker has not been in any meeting yet.
        behind: Whether rounds were, or may have been, held without this worker.
        idle: Whether it has only just joined, and has nothing yet to contribute.
    """

    def __init__(self, membership: Membership, policy: SkipRound | Shrink, plan: LevelPlan, terms: str) -> None:
        self.membership = membership
        self.policy = policy
        self.level = LevelGroup(plan, plan.name or "level 0", transport=None)  # type: ignore[arg-type]
        self.behind = self.idle = False
        self._terms = terms
        self._lines = [membership.line(), membership.line()]  # for the training loop, and for rounds in flight
        self._generation: Generation | None = None
        self._place = ""
        self._roster = Roster(())
        self._last: tuple[int, ...] = ()
        self._rounds = 0
        self._chain = ""
        self._late_s = 0.0
        self._usual_s: float | None = None
        self._held: list[tuple[str, int]] = []
        self._losses = 0

    @property
    def new(self) -> bool:
        return not self._last

    @property
    def worker(self) -> int:
        return self.membership.worker

    @property
    def last(self) -> tuple[int, ...]:
        """The members of the last meeting."""
        return self._last

    # ---- coming together -------------------------------------------------------------------------------------------

    def start(self, sync: Held) -> bool:
        """Come to the first meeting, and start from its leader's values; False if it was held before."""
        phase, reason = 0, ""
        for _ in range(_ATTEMPTS):
            phase = max(phase, self._start_phase())
            found = self.gather(sync, Call(0, phase), "start", patience_s=self.policy.patience.first_s)
            if isinstance(found, Roster):
                self._chain = _link("", START, found)
                return True
            self._look()
            if self.behind and self._start_phase() <= phase:
                return False
            self.behind = False
            phase, reason = phase + 1, found.reason
        raise TransportError(f"The workers did not come together: {reason}.")

    def _look(self) -> None:
        """Know the latest meeting: at once if the others are beyond this one, else after a pause."""
        if not self.behind:
            time.sleep(2 * self.membership.roll.tick_s)
        with suppress(StoreLostError):
            self.membership.roll.glance()

    def _start_phase(self) -> int:
        """Return which attempt to start together is under way; -1 if there is none, or training has begun."""
        latest = self.membership.roll.latest
        return latest.phase if latest is not None and latest.step == 0 else -1

    def summons(self, step: int) -> Call | None:
        """Return the meeting that the others are at, if this worker is behind and should come to it now."""
        roll = self.membership.roll
        if roll.replaced:
            raise TurnedAwayError(f"Another process has taken the place of worker {self.worker}; this one ends.")
        latest, roll.eager = roll.latest, self.behind or self.new
        if not (self.behind or self.new) or latest is None or latest.step == 0:
            return None
        return latest if latest.step > step or self.new else None

    def await_call(self, *, after: Call | None) -> Call:
        """Wait until the others hold a meeting, later than the one before, and return it."""
        roll, patience_s = self.membership.roll, self.policy.patience.first_s
        alone_since = known_since = look_at = time.monotonic()
        while True:
            call = self.summons(-1)
            if call is not None and (after is None or call > after):
                self._wait_no_more()
                return call
            time.sleep(_LOOK_S)
            if time.monotonic() < look_at:
                continue
            look_at = time.monotonic() + roll.tick_s  # what follows asks the store of every worker
            if self._is_known_to_someone():
                known_since = time.monotonic()
            elif time.monotonic() - known_since > self.policy.patience.grace_s:
                raise NobodyLeftError(
                    f"Of {told(roll.alive())}, who are there, none has trained yet, and those who have are gone. Start "
                    "all of them anew, from a checkpoint."
                )
            if self._is_over():
                raise TransportError(f"Worker {self.worker} came too late: the others have finished.")
            if roll.known() - roll.silent() != {self.worker}:
                alone_since = time.monotonic()
            elif time.monotonic() - alone_since > patience_s:
                raise TransportError(f"Worker {self.worker} found nobody to train with within {patience_s:g} s.")

    def _is_known_to_someone(self) -> bool:
        """Say whether anyone who is there may have the state; this worker makes known that it has not."""
        mine = self.membership.roll.incarnation

        def look(store: dist.Store) -> bool:
            store.set(f"waiting/{self.worker}", mine)
            alive = self.membership.roll.alive()
            keys = {worker: f"waiting/{worker}" for worker in alive}
            return any(
                not store.check([key]) or bytes(store.get(key)).decode() != alive[worker]
                for worker, key in keys.items()
            )

        try:
            return self._lines[0].call(look)
        except StoreLostError:
            return True

    def _wait_no_more(self) -> None:
        with suppress(StoreLostError):
            self._lines[0].call(lambda store: store.set(f"waiting/{self.worker}", ""))

    def _is_over(self) -> bool:
        try:
            return self._lines[0].call(lambda store: store.check(["finished"]))
        except StoreLostError:
            return False

    def await_store(self) -> None:
        """Wait for a store that is away, as long as for a worker that is late."""
        deadline = time.monotonic() + self.policy.patience.grace_s
        while not self.membership.roll.connected and time.monotonic() < deadline:
            time.sleep(self.membership.roll.tick_s)

    def gather(
        self, sync: Held, call: Call, digest: str, *, level: bool = False, patience_s: float | None = None
    ) -> Roster | Lost:
        """Agree on who holds a round, make their group if need be, and catch up with them."""
        if not self.membership.roll.connected:
            self.behind = True
            return Lost("the store cannot be reached")
        if self._losses != self.membership.roll.losses:
            self._losses = self.membership.roll.losses
            for line in self._lines:
                line.close()
        began = time.time()
        try:
            roster = hold(
                self._lines[0],
                self.membership.roll,
                self.membership.seal,
                call,
                self._guest(digest, level),
                self.policy,
                workers=self.membership.workers,
                patience_s=patience_s or self.policy.patience.grace_s,
            )
        except MeetingFailedError as error:
            if error.behind and not self.behind:
                self.behind, self._late_s = True, 0.0 if self.new else max(0.001, time.time() - began)
            return Lost(str(error), error.absent)
        except StoreLostError as error:
            self.behind = True
            return Lost(str(error))
        self._tell(roster, call)
        try:
            self._form(roster, call)
            self._catch_up(sync, roster)
        except CadenzaError as error:
            reason = str(error)
        else:
            self.behind, self._late_s = False, 0.0
            return roster
        self._part()
        return Lost(reason)

    def _guest(self, digest: str, level: bool) -> Guest:
        terms = hashlib.blake2b(f"{self._terms} {digest}".encode(), digest_size=16).hexdigest()
        usable = self._generation is not None and self._generation.usable
        return Guest(
            self.worker,
            self.membership.roll.incarnation,
            self._rounds,
            self._chain,
            terms,
            last=self._last,
            late_s=0.0 if self.new else self._late_s,
            generation=self._place if usable else "",
            level=level,
        )

    def _form(self, roster: Roster, call: Call) -> None:
        """Have a group of the roster's members."""
        self._held.append((f"meeting/{call}", len(roster.members)))
        if self.worker == roster.leader:
            self._lines[0].call(lambda store: clean_up(store, self._held))
        self._held = self._held[-KEPT:]
        self._roster = roster
        if not roster.keep or self._generation is None:
            self._part()
            self._place = f"meeting/{call}"
            self._generation = self._assemble(self._place, roster)
            self.level.transport = self._generation.transport
        self._generation.set_timeout(self._limit_s(roster))

    def _assemble(self, place: str, roster: Roster, members: tuple[int, ...] | None = None) -> Generation:
        members = members or roster.members
        return assemble(
            self._lines[0],
            self.membership.seal,
            place=place,
            members=members,
            worker=self.worker,
            timeout_s=self._limit_s(roster),
            missing=lambda: self._missing(roster).intersection(members),
        )

    def _catch_up(self, sync: Held, roster: Roster) -> None:
        """Let those who are behind take the leader's state."""
        assert self._generation is not None
        receives = self.worker in roster.behind
        if roster.behind:
            sync._land_all()  # so that there is one state to give, and one place from which to count progress
        if roster.members != self._last:
            sync._reseat()
        self.idle = receives and self.new
        concerned = tuple(sorted({roster.leader, *roster.behind}))
        if roster.behind and self.worker in concerned:
            apart = concerned != roster.members
            through = self._assemble(f"{self._place}/joining", roster, concerned) if apart else self._generation
            try:
                facts = {"rounds": self._rounds, "chain": self._chain}
                heard = hand_over(sync, through, roster.leader, facts, receives=receives, new=self.new)
                self._rounds, self._chain = heard["rounds"], heard["chain"]
            finally:
                if apart:
                    through.close()
        self._last = roster.members

    def _tell(self, roster: Roster, call: Call) -> None:
        """Log what others than the members should know of a meeting."""
        if self.worker != roster.leader:
            return
        if roster.absent and set(roster.absent) & set(self._last):
            _logger.warning("Step %d: the round is held without %s.", call.step, told(roster.absent))
        for worker, seconds in (roster.late or {}).items():
            _logger.warning("Step %d: worker %d is back; it was %.2f s late for a round.", call.step, worker, seconds)
        for worker, reason in (roster.turned_away or {}).items():
            _logger.warning("Step %d: worker %d was turned away: %s.", call.step, worker, reason)
        if roster.behind and call.step:
            _logger.warning("Step %d: %s caught up with the others.", call.step, told(roster.behind))

    # ---- going together --------------------------------------------------------------------------------------------

    def carry(self, call: Call, fly: Callable[[], Passage]) -> Passage | Lost:
        """Send the values of a round, and vote on it."""
        roster = self._roster
        limit_s = self._limit_s(roster)

        def vote(store: dist.Store) -> Vote:
            return Vote(store, f"meeting/{call}/vote", members=len(roster.members), timeout_s=limit_s)

        def abort() -> None:
            with suppress(StoreLostError):
                self._lines[1].call(lambda store: vote(store).abort())

        try:
            passage = fly()
        except CadenzaError as error:
            poisoned = isinstance(error, _PoisonError) and self.worker in error.workers
            reason = str(error)
        except BaseException:
            abort()
            raise
        else:
            try:
                committed = self._lines[1].call(
                    lambda store: vote(store).ready(lambda: bool(self._missing(roster))), timeout_s=limit_s + 5
                )
            except StoreLostError as error:
                self.behind = True  # the others may have seen it pass
                return Lost(f"the vote could not be ended: {error}")
            if committed:
                return passage
            reason = "another worker failed, or did not come to the vote"
            self._part()
            return Lost(reason, tuple(sorted(self._missing(roster))))
        abort()
        self._part()
        return Lost(reason, tuple(sorted(self._missing(roster))), poisoned)

    def judge(self, headers: list[Header]) -> list[Header]:
        """Take the weight from contributions that would do harm, or refuse the round for them."""
        poison = self.policy.poison
        judged = judge(headers, explosion=poison.explosion)
        workers = [w for w, header in zip(self._roster.members, judged, strict=True) if header.poisoned]
        if workers and not poison.leave_out:
            raise _PoisonError(workers)
        return judged

    def left_out(self, passage: Passage) -> str:
        """Say whose contribution to a round was left out."""
        workers = [w for w, header in zip(passage.members, passage.headers, strict=True) if header.poisoned]
        if not workers:
            return ""
        reason = f"the contribution of {told(workers)} was left out: not finite, or far larger than the others'"
        self.warn(reason)
        return reason

    def warn(self, text: str) -> None:
        """Log something that the people who run this worker should know."""
        _logger.warning("Worker %d: %s", self.worker, text)

    def finished(self) -> None:
        """Tell workers that come after the end that it has come."""
        with suppress(StoreLostError):
            self._lines[0].call(lambda store: store.set("finished", self._chain))

    def landed(self, call: Call, passage: Passage) -> None:
        """Count a round that has landed, and learn how long such rounds take."""
        self._rounds += 1
        self._chain = _link(self._chain, call, self._roster)
        known = self._usual_s
        self._usual_s = passage.wire_s if known is None else _MEMORY * known + (1 - _MEMORY) * passage.wire_s

    def close(self) -> None:
        """Leave the others."""
        self._part()
        self.membership.close()
        for line in self._lines:
            line.close()

    def _part(self) -> None:
        """Let the group go."""
        if self._generation is not None:
            self._generation.close()
            self._generation = None

    def _missing(self, roster: Roster) -> set[int]:
        """Return members of the round that will not come any more, or whose place another process has taken."""
        roll = self.membership.roll
        told = zip(roster.members, roster.incarnations, strict=True)
        return roll.silent().intersection(roster.members) | {w for w, one in told if not roll.is_current(w, one)}

    def _limit_s(self, roster: Roster) -> float:
        """Return after how long without progress a transfer has failed."""
        patience = self.policy.patience
        if self._usual_s is None:
            return patience.first_s
        usual_s = self._usual_s * (_STATE if roster.behind else 1)
        return patience.grace_s + patience.factor * usual_s


def _link(chain: str, call: Call, roster: Roster) -> str:
    """Return the hash chain after one more round."""
    return hashlib.blake2b(f"{chain} {call} {roster.members}".encode(), digest_size=16).hexdigest()

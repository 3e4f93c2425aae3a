"""How a worker without data waits for the others' rounds: it answers them, and never leads.

It takes no steps, so it has no pace of its own: it comes to a round once somebody who trains has come to it. Only where
nobody is left who trains, it comes to its own next round unasked, with the others like it: in that round all learn that
all are done.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import suppress

from cadenza.errors import StoreLostError, TurnedAwayError
from cadenza.faults import Patience
from cadenza.participants.circle import Circle
from cadenza.participants.ending import has_ended
from cadenza.participants.membership import Membership
from cadenza.participants.round_id import RoundId
from cadenza.participants.store import StoreConnection

__all__ = ["Follower"]

_logger = logging.getLogger("cadenza")

_LOOK_S = 0.02  # between two looks for a round


class Follower:
    """Waits for the next round to answer, as long as anybody may hold one.

    Args:
        membership: This worker's place in the job.
        patience: How long it waits where there is nobody to wait for.
        circles: The circles that it is in, from the innermost.
        connection: A connection to the store.

    Attributes:
        over: Whether the others were seen to have finished.
    """

    def __init__(
        self, membership: Membership, patience: Patience, circles: Sequence[Circle], connection: StoreConnection
    ) -> None:
        self._membership, self._patience, self._circles, self._connection = membership, patience, circles, connection
        self.over = False
        self._answered = RoundId(0)  # the last round to which it was sent
        self._led_at: float | None = None  # when it last came to a round unasked, if that was not held
        self._chain = ""  # as it was at the last look
        self._met = self._circles[-1].roster  # as it was when this worker last came unasked
        self._hopeful_at = 0.0  # when there last was somebody who trains, or a round of all

    def await_round(self, own: RoundId, after: RoundId, origin: str) -> tuple[RoundId, bool] | None:
        """Return the round to come to, and whether others call to it; None if nobody will hold one.

        Args:
            own: The next round that is due.
            after: The last one that this worker was, or could have been, at.
            origin: What names the run that it is in.
        """
        self._begin()
        look_at = time.monotonic()
        while True:
            self._check()
            if (call := self._call(own, max(after, self._answered))) is not None:
                return self._sent_to(call, called=True)
            if self._trainers(self._circles[-1]):
                self._hopeful_at = time.monotonic()
            if self._may_lead(own):
                return None if self._is_over(origin) else self._sent_to(own, called=False)
            if time.monotonic() - self._hopeful_at > self._patience.first_s:
                self._tell_alone()
                return None
            if time.monotonic() >= look_at:
                look_at = time.monotonic() + self._membership.heartbeat.tick_s  # what follows asks the store
                if self._is_over(origin):
                    return None
            time.sleep(_LOOK_S)

    def _begin(self) -> None:
        outermost = self._circles[-1]
        if self._led_at is None or outermost.history.chain != self._chain:
            self._hopeful_at = time.monotonic()
        self._chain = outermost.history.chain
        if outermost.roster is not self._met:
            self._led_at = None

    def _sent_to(self, round: RoundId, *, called: bool) -> tuple[RoundId, bool]:
        self._answered, self._met = max(round, self._answered), self._circles[-1].roster
        self._led_at = None if called else time.monotonic()
        return round, called

    def _check(self) -> None:
        self._membership.island.check()
        if self._membership.heartbeat.replaced:
            worker = self._membership.worker
            raise TurnedAwayError(f"Another process has taken the place of worker {worker}; this one ends.")

    # ---- whose round it is -----------------------------------------------------------------------------------------

    def _call(self, own: RoundId, after: RoundId) -> RoundId | None:
        """Return the round to which others have come: the first one up to the own next, else where they are now."""
        latest = [circle.progress.latest for circle in self._circles]
        calls = [round for round in latest if round is not None and round > after]
        if due := [round for round in calls if round.step <= own.step]:
            return min(due)
        coming = self._trainers(self._circles[own.level])  # other sites may be ahead of those here
        return max((round for round in calls if round.level <= own.level or not coming), default=None)

    def _may_lead(self, own: RoundId) -> bool:
        """Tell whether to come to a round unasked: nobody is there who trains, nor can be expected back."""
        circle, heartbeat, now = self._circles[own.level], self._membership.heartbeat, time.monotonic()
        if not heartbeat.connected or self._trainers(circle):
            return False
        alive, last = heartbeat.alive(), set(circle.history.last) - heartbeat.gone()
        here = {self._membership.worker, *alive}
        away = last - here - heartbeat.without_data()  # cut off, stopped or dead: each may be back in a moment
        if not circle.scope.outermost:  # where they are too few it fails at once, and is behind them
            return not away or not self._trainers(self._circles[-1])
        if self._led_at is not None and now - self._led_at < self._patience.grace_s:
            return False
        newcomers = any(beat.waiting for beat in alive.values())  # they wait for a round to begin
        awaited = away and not newcomers and now - self._hopeful_at < self._patience.first_s
        return not awaited and circle.policy.enough(here, last)

    def _trainers(self, circle: Circle) -> set[int]:
        """Return who is alive in a circle and takes steps, or is about to."""
        alive = self._membership.heartbeat.alive().items()
        return {w for w, beat in alive if circle.scope.holds(beat.site) and not (beat.exhausted or beat.waiting)}

    # ---- the end ---------------------------------------------------------------------------------------------------

    def _is_over(self, origin: str) -> bool:
        signer = self._membership.signer
        with suppress(StoreLostError):
            self.over = self._connection.call(lambda store: has_ended(store, signer, origin))
        return self.over

    def _tell_alone(self) -> None:
        _logger.warning(
            "Worker %d has run out of data, and for %g s there was nobody who trains or with whom to hold a round: it "
            "waits no longer.",
            self._membership.worker,
            self._patience.first_s,
        )

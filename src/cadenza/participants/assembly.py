"""How a roster is agreed on: workers write their arrival into the store, one list of members stands, and all obey it.

Whoever sees that all expected workers are there, or that the time is up, proposes a roster; the first one written
stands.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from cadenza.common.wording import name_workers
from cadenza.errors import TurnedAwayError
from cadenza.faults import FaultPolicy
from cadenza.participants.beat import CLOCKS_S
from cadenza.participants.ending import has_ended
from cadenza.participants.heartbeat import Heartbeat
from cadenza.participants.roster import Arrival, Roster, RoundNotHeldError, propose
from cadenza.participants.round_id import RoundId
from cadenza.participants.round_index import note_round
from cadenza.participants.signed_store import SignedStore
from cadenza.participants.signing import Signer
from cadenza.participants.sites import Scope
from cadenza.participants.store import StoreConnection, wait_for

__all__ = ["Assembly", "obeyed"]


_FIRST = 8  # workers that look all the time who has come
_PAUSE_S = 0.05  # between two looks at what was decided
_LOOK_S = 0.05  # between two looks of others, times how many more there are


class Assembly:
    """A worker's way to the roster of one round.

    Args:
        connection: A connection to the store.
        heartbeat: Who is alive.
        signer: What signs what is written.
        round: The round.
        me: What this worker writes when it arrives.
        scope: Who may be in the round.
        accepts_rollback: Whether a state that has seen fewer rounds than were held may be gone on from.
        elsewhere: Says whether this worker is called to another level's round, to which it had better go.
        origin: What names the run that this worker is in; empty for one that was in no round yet.
        columns: How many ranks a worker has.
        known: The last roster on which this worker was.
    """

    def __init__(
        self,
        connection: StoreConnection,
        heartbeat: Heartbeat,
        signer: Signer,
        round: RoundId,
        me: Arrival,
        *,
        scope: Scope,
        accepts_rollback: bool = False,
        elsewhere: Callable[[], bool] = lambda: False,
        origin: str = "",
        columns: int = 1,
        known: Roster | None = None,
    ) -> None:
        self._origin, self._columns, self._known = origin, columns, known
        self._connection, self._heartbeat, self._signer = connection, heartbeat, signer
        self._round, self._me = round, me
        self._scope, self._progress = scope, heartbeat.progress(scope.place)
        self._accepts_rollback, self._elsewhere = accepts_rollback, elsewhere
        self._look_at = 0.0 if self._looks_first() else self._pause_s()
        self._base = f"{scope.place}round/{round}"

    def hold(self, policy: FaultPolicy, *, workers: int, patience_s: float, linger_s: float = 0.0) -> Roster:
        """Come to the round and return its roster, on which this worker stands.

        Args:
            policy: What is enough.
            workers: How many are expected at the very first round.
            patience_s: How long those who are late are waited for.
            linger_s: How long those who are a moment late are, where the others are enough.

        Raises:
            RoundNotHeldError: No round is held, or it is held without this worker, which is behind then.
            TurnedAwayError: The others do not want this worker.
            StoreLostError: The store cannot be reached.
        """
        started = time.monotonic()
        self._announce()
        standing = self._connection.call(self._standing) if self._me.new else None
        self._connection.call(lambda store: self.sign(store, self._me))
        found: Roster | None = None
        while found is None:
            found = self._advance(policy, workers, time.monotonic() - started, patience_s, linger_s)
        roster = obeyed(found, self._me)
        if standing is not None:
            raise RoundNotHeldError(
                f"the round was held with an earlier process of worker {self._me.worker}", behind=True
            )
        return roster

    def _advance(
        self, policy: FaultPolicy, workers: int, waited_s: float, patience_s: float, linger_s: float
    ) -> Roster | None:
        """Look who is there, propose a roster if that is enough, and return the one that stands, if one does."""
        heartbeat = self._heartbeat
        if heartbeat.replaced:
            raise TurnedAwayError(f"Another process has taken the place of worker {self._me.worker}; this one ends.")
        if waited_s < self._look_at:
            return self._wait()
        self._look_at = waited_s + self._pause_s()
        current = self._connection.call(self._arrivals)
        if self._me.worker not in current:  # somebody else has written over it, or the store has forgotten it
            self._connection.call(lambda store: self.sign(store, self._me))
            current[self._me.worker] = self._me
        current[self._me.worker] = self._informed(current)
        mates = self._mates()
        hopeful = heartbeat.doubted() & mates  # asked before the others' deaths are, which may be told in between
        proposal = None
        try:
            proposal = propose(
                current,
                policy,
                known=mates,
                silent=self._not_awaited() - current.keys() | heartbeat.silent(),
                gone=heartbeat.gone(),
                workers=workers,
                time_is_up=waited_s >= patience_s,
                lingered=waited_s >= linger_s,
                held=self._progress.held,
                accept_rollback=self._accepts_rollback,
            )
        except RoundNotHeldError:
            if not hopeful:
                found = self._connection.call(self._leave)
                if found is None:
                    self._refuse_strangers()
                    raise
                return found
        led = self._me.new and proposal is not None and not all(current[w].new for w in proposal.members)
        if proposal is not None and (proposal.members or not hopeful) and not led:  # who leads knows the others better
            inside = self._scope.cut(dict(zip(proposal.members, proposal.sites, strict=True)))
            return self._decide(replace(proposal, decided_at=time.time(), inside=inside))
        if waited_s >= 3 * patience_s:
            self._connection.call(self._leave)
            raise RoundNotHeldError(f"{name_workers(current)} came, but nothing was decided in {waited_s:.1f} s")
        return self._wait(linger_s - waited_s if waited_s < linger_s else _PAUSE_S)

    def _not_awaited(self) -> set[int]:
        """Return those for whom the round does not wait; the first one waits also for those who are still preparing."""
        elsewhere = self._heartbeat.known() - self._mates()
        return elsewhere | (self._heartbeat.not_expected() if self._round.step else set())

    def _mates(self) -> set[int]:
        """Return who has signed on and may be in the round."""
        return {worker for worker, site in self._heartbeat.sites().items() if self._scope.holds(site)}

    def _looks_first(self) -> bool:
        """Tell whether this worker is one of the few who look at once who has come; others wait for a roster of theirs.

        All would read what all have written, and that would be as many entries as there are pairs of workers.
        """
        expected = set(self._me.last) - self._heartbeat.silent() or self._mates()
        return self._me.worker in sorted(expected)[:_FIRST] or len(expected) <= _FIRST

    def _pause_s(self) -> float:
        """Return how long to wait between two looks."""
        return 0.0 if self._looks_first() else _LOOK_S * len(self._mates()) / _FIRST

    def _informed(self, current: Mapping[int, Arrival]) -> Arrival:
        """Return this worker's arrival with what it knows by now of newcomers that it cannot reach."""
        newcomers = {worker for worker, arrival in current.items() if arrival.new}
        unreached = self._heartbeat.unreached() & newcomers | set(self._me.unreached)
        return replace(self._me, unreached=tuple(sorted(unreached)))

    def _refuse_strangers(self) -> None:
        """Say why nobody came, if it is that the others have another secret."""
        alone = self._heartbeat.known() == {self._me.worker}
        if alone and self._connection.call(lambda store: store.has_strangers()):
            raise TurnedAwayError(
                f"Nobody came who knows the secret of worker {self._me.worker}, and others use the job's name with "
                "another secret. Start it with theirs (CADENZA_JOB, CADENZA_SECRET)."
            )

    def sign(self, store: SignedStore, arrival: Arrival) -> None:
        """Write an arrival into the store, signed."""
        store.append(f"{self._base}/arrivals", replace(arrival, at=time.time()).pack())

    def _announce(self) -> None:
        """Make the round known to those who are behind; refuse one that lies before the latest."""

        def announce(store: SignedStore) -> RoundId:
            if has_ended(store, self._signer, self._origin):
                raise RoundNotHeldError("the others have finished", behind=True, over=True)
            latest = self._progress.announce(store, self._round)
            if latest == self._round:
                note_round(
                    store,
                    self._round,
                    members=len(self._mates()),
                    columns=self._columns,
                    place=self._scope.place,
                )
            return latest

        latest = self._connection.call(announce)
        if self._round < latest:
            raise RoundNotHeldError(
                f"the others are at step {latest.step} and this worker at {self._round.step}",
                behind=True,
            )

    def _decide(self, roster: Roster) -> Roster | None:
        """Write a roster unless one stands already; return the one that stands."""

        def decide(store: SignedStore) -> Roster | None:
            key = f"{self._base}/roster"
            text = store.read(key) or ""
            unread = text if self._understood(text) is None else ""  # of nobody who knows how: write over it
            return self._understood(store.compare_set(key, unread, roster.pack()).decode())

        return self._connection.call(decide)

    def _wait(self, most_s: float = _PAUSE_S) -> Roster | None:
        """Wait a moment for a roster."""
        latest, elsewhere = self._progress.latest, self._elsewhere()  # asked before the roster is looked for
        pause_s = min(most_s, _PAUSE_S, self._heartbeat.tick_s)
        text = self._connection.call(lambda store: wait_for(store, f"{self._base}/roster", pause_s))
        if text is None and latest is not None and latest > self._round:
            raise RoundNotHeldError("the others have gone on to a later round", behind=True)
        if text is not None or not elsewhere:
            return self._understood(text)
        if (found := self._connection.call(self._leave)) is None:
            raise RoundNotHeldError("this worker is called to a round of a larger level")
        return found

    def _standing(self, store: SignedStore) -> Roster | None:
        """Return the roster, if one was decided on."""
        return self._understood(store.read(f"{self._base}/roster"))

    def _leave(self, store: SignedStore) -> Roster | None:
        """Give up waiting, unless a roster stands by now."""
        self.sign(store, replace(self._me, here=False))
        return self._standing(store)

    def _arrivals(self, store: SignedStore) -> dict[int, Arrival]:
        """Return who is there, as far as their entries can be read, and are of now."""
        found: dict[int, Arrival] = {}
        for line in store.lines(f"{self._base}/arrivals"):
            arrival = self._signer.understood(lambda text=line: Arrival.unpack(text))  # type: ignore[misc]
            if arrival is not None and self._is_of_now(arrival):
                found[arrival.worker] = arrival
        return {worker: arrival for worker, arrival in found.items() if arrival.here}

    def _is_of_now(self, arrival: Arrival) -> bool:
        """Tell whether an entry is of the process in its worker's place, and was not written again long after."""
        if self._signer.secret and not abs(time.time() - arrival.at) <= CLOCKS_S:
            self._signer.ignored += 1
            return False
        return self._heartbeat.is_current(arrival.worker, arrival.incarnation)

    def _understood(self, text: str | None) -> Roster | None:
        return self._signer.understood(lambda: Roster.unpack(text, self._known)) if text else None


def obeyed(roster: Roster, me: Arrival) -> Roster:
    """Return the roster if this worker stands on it, or raise what it says instead."""
    if me.worker in (roster.turned_away or {}):
        raise TurnedAwayError(
            f"Worker {me.worker} was turned away from the round: {(roster.turned_away or {})[me.worker]}. Give every "
            "worker the same model, strategy and version."
        )
    if me.worker in roster.members:
        if roster.incarnations[roster.members.index(me.worker)] == me.incarnation:
            return roster
        raise RoundNotHeldError("the round is held with an earlier process in this worker's place", behind=True)
    if others := (roster.unreached or {}).get(me.worker):
        raise RoundNotHeldError(
            f"worker {me.worker} was left out, as no connection can be made between it and {name_workers(others)}; "
            "open the ports between their machines, and name the network that leads there (GLOO_SOCKET_IFNAME)",
            behind=True,
        )
    if not roster.members:
        raise RoundNotHeldError(f"{name_workers(roster.absent)} did not come", absent=roster.absent)
    late_s = max(0.0, time.time() - roster.decided_at)
    raise RoundNotHeldError(
        f"the round was held by {name_workers(roster.members)} without worker {me.worker}, which came {late_s:.2f} s "
        "too late",
        behind=True,
        late_s=late_s,
    )

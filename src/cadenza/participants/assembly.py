"""How a roster is agreed on: workers write their arrival into the store, one list of members stands, and all obey it.

Whoever sees that all expected workers are there, or that the time is up, proposes a roster; the first one written
stands.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import torch.distributed as dist

from cadenza.common.wording import name_workers
from cadenza.errors import TurnedAwayError
from cadenza.faults import FaultPolicy
from cadenza.participants.heartbeat import Heartbeat
from cadenza.participants.roster import Arrival, Roster, RoundNotHeldError, propose
from cadenza.participants.round_id import RoundId
from cadenza.participants.signing import Signer
from cadenza.participants.store import StoreConnection, append, wait_for
from cadenza.participants.vote import VOTE_KEYS

__all__ = ["KEPT", "Assembly", "clean_up", "obeyed"]

KEPT = 4  # rounds whose keys stay, for those who come late


class Assembly:
    """A worker's way to the roster of one round.

    Args:
        connection: A connection to the store.
        heartbeat: Who is alive.
        signer: What signs what is written.
        round: The round.
        me: What this worker writes when it arrives.
    """

    def __init__(
        self, connection: StoreConnection, heartbeat: Heartbeat, signer: Signer, round: RoundId, me: Arrival
    ) -> None:
        self._connection, self._heartbeat, self._signer = connection, heartbeat, signer
        self._round, self._me = round, me
        self._base = f"round/{round}"

    def hold(self, policy: FaultPolicy, *, workers: int, patience_s: float) -> Roster:
        """Come to the round and return its roster, on which this worker stands.

        Args:
            policy: What is enough.
            workers: How many are expected at the very first round.
            patience_s: How long those who are late are waited for.

        Raises:
            RoundNotHeldError: No round is held, or it is held without this worker, which is behind then.
            TurnedAwayError: The others do not want this worker.
            StoreLostError: The store cannot be reached.
        """
        started = time.monotonic()
        self._announce()
        standing = self._connection.call(self._standing) if self._me.new else None
        self._connection.call(lambda store: self.sign(store, self._me))
        text: bytes | None = None
        while text is None:
            text = self._advance(policy, workers, time.monotonic() - started, patience_s)
        roster = obeyed(self._opened(text), self._me)
        if standing is not None:
            raise RoundNotHeldError(
                f"the round was held with an earlier process of worker {self._me.worker}", behind=True
            )
        return roster

    def _advance(self, policy: FaultPolicy, workers: int, waited_s: float, patience_s: float) -> bytes | None:
        """Look who is there, propose a roster if that is enough, and return the one that stands, if one does."""
        heartbeat = self._heartbeat
        if heartbeat.replaced:
            raise TurnedAwayError(f"Another process has taken the place of worker {self._me.worker}; this one ends.")
        arrivals = self._connection.call(self._arrivals)
        current = {w: arrival for w, arrival in arrivals.items() if heartbeat.is_current(w, arrival.incarnation)}
        hopeful = heartbeat.doubted()  # asked before the others' deaths are, which may be told in between
        proposal = None
        try:
            proposal = propose(
                current,
                policy,
                known=heartbeat.known(),
                silent=heartbeat.silent(),
                gone=heartbeat.gone(),
                workers=workers,
                time_is_up=waited_s >= patience_s,
            )
        except RoundNotHeldError:
            if not hopeful:
                text = self._connection.call(self._leave)
                if text is None:
                    raise
                return text
        if proposal is not None and (proposal.members or not hopeful):
            return self._decide(replace(proposal, decided_at=time.time()))
        if waited_s >= 3 * patience_s:
            self._connection.call(self._leave)
            raise RoundNotHeldError(f"{name_workers(arrivals)} came, but nothing was decided in {waited_s:.1f} s")
        return self._wait()

    def sign(self, store: dist.Store, arrival: Arrival) -> None:
        """Write an arrival into the store, signed."""
        append(store, f"{self._base}/arrivals", self._signer.sign_text(arrival.pack(), str(self._round)) + "\n")

    def _announce(self) -> None:
        """Make the round known to those who are behind; refuse one that lies before the latest."""

        def announce(store: dist.Store) -> bytes:
            if store.check(["finished"]):
                raise RoundNotHeldError("the others have finished", behind=True)
            latest = bytes(store.get("latest")).decode() if store.check(["latest"]) else ""
            if not latest or RoundId.parse(latest) < self._round:
                store.set("latest", str(self._round))
            return latest.encode()

        latest = self._connection.call(announce).decode()
        if latest and self._round < RoundId.parse(latest):
            raise RoundNotHeldError(
                f"the others are at step {RoundId.parse(latest).step} and this worker at {self._round.step}",
                behind=True,
            )

    def _decide(self, roster: Roster) -> bytes:
        """Write a roster unless one stands already; return the one that stands."""
        sealed = self._signer.sign_text(roster.pack(), f"roster {self._round}")
        return self._connection.call(lambda store: bytes(store.compare_set(f"{self._base}/roster", "", sealed)))

    def _wait(self) -> bytes | None:
        """Wait a moment for a roster."""
        heartbeat = self._heartbeat
        overtaken = (
            heartbeat.latest is not None and heartbeat.latest > self._round
        )  # asked before the roster is looked for
        text = self._connection.call(lambda store: wait_for(store, f"{self._base}/roster", min(0.05, heartbeat.tick_s)))
        if text is None and overtaken:
            raise RoundNotHeldError("the others have gone on to a later round", behind=True)
        return text

    def _standing(self, store: dist.Store) -> bytes | None:
        """Return the roster, if one was decided on."""
        return bytes(store.get(f"{self._base}/roster")) if store.check([f"{self._base}/roster"]) else None

    def _leave(self, store: dist.Store) -> bytes | None:
        """Give up waiting, unless a roster stands by now."""
        self.sign(store, replace(self._me, here=False))
        return self._standing(store)

    def _arrivals(self, store: dist.Store) -> dict[int, Arrival]:
        """Return who is there, as far as their entries bear this job's signature."""
        found: dict[int, Arrival] = {}
        for line in bytes(store.get(f"{self._base}/arrivals")).decode().splitlines():
            text = self._signer.verified_text(line, str(self._round))
            if text is not None:
                arrival = Arrival.unpack(text)
                found[arrival.worker] = arrival
        return {worker: arrival for worker, arrival in found.items() if arrival.here}

    def _opened(self, text: bytes) -> Roster:
        opened = self._signer.verified_text(text.decode(), f"roster {self._round}")
        if opened is None:
            raise TurnedAwayError(
                f"The list of members does not bear the signer that worker {self._me.worker} knows: its job or its "
                "secret is not that of the others. Start it with theirs (CADENZA_JOB, CADENZA_SECRET)."
            )
        return Roster.unpack(opened)


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
    if not roster.members:
        raise RoundNotHeldError(f"{name_workers(roster.absent)} did not come", absent=roster.absent)
    raise RoundNotHeldError(
        f"the round was held by {name_workers(roster.members)} without worker {me.worker}, which came "
        f"{max(0.0, time.time() - roster.decided_at):.2f} s too late",
        behind=True,
    )


def clean_up(store: dist.Store, held: Sequence[tuple[str, int]]) -> None:
    """Delete what old rounds, each with so many members, and their groups have left in the store."""
    for base, members in held[:-KEPT]:
        votes = [f"{vote}/{key}" for vote in ("vote", "assembled", "joining/assembled") for key in VOTE_KEYS]
        for key in ("arrivals", "roster", *votes):
            store.delete_key(f"{base}/{key}")
        for position in range(members):
            store.delete_key(f"{base}/group/0/{position}")
            store.delete_key(f"{base}/joining/group/0/{position}")

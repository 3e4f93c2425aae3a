"""The process group that elastic members hold rounds over: kept while it works, let go after one failure."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from cadenza.errors import CadenzaError, TransportError
from cadenza.participants.forming import UnreachedError
from cadenza.participants.generation import Generation, assemble
from cadenza.participants.membership import Membership
from cadenza.participants.reachability import Reachability
from cadenza.participants.roster import Roster
from cadenza.participants.round_id import RoundId
from cadenza.participants.store import StoreConnection
from cadenza.transports import Transport

__all__ = ["GroupKeeper"]

_REACH_S = 1.0  # for a connection to a worker, where it is asked whether it can be reached


class GroupKeeper:
    """Has the group of a roster, and knows with whom none can be made.

    Args:
        membership: This worker's place in the job.
        connection: A connection to the store.
    """

    def __init__(self, membership: Membership, connection: StoreConnection) -> None:
        self._membership, self._connection = membership, connection
        self._reachability = Reachability()
        self._generation: Generation | None = None
        self._roster = Roster(())
        self._place = ""

    @property
    def name(self) -> str:
        """A name for the group that no other one has; empty if none works."""
        return self._place if self._generation is not None and self._generation.usable else ""

    def form(self, roster: Roster, round: RoundId, *, timeout_s: float) -> Transport | None:
        """Have a group of the roster's members; return the way to them if it is a new one."""
        self._roster = roster
        if roster.keep and self._generation is not None:
            self._generation.set_timeout(timeout_s)
            return None
        self.part()
        self._place = f"round/{round}"
        self._generation = self._assemble(self._place, roster.members, timeout_s)
        self._reachability.forget(roster.members)
        return self._generation.transport

    @contextmanager
    def among(self, members: Sequence[int], *, timeout_s: float) -> Iterator[Generation]:
        """Have, inside the block, a group of some of the members."""
        if self._generation is None:
            raise TransportError("The group was let go.")
        if tuple(members) == self._roster.members:
            yield self._generation
            return
        apart = self._assemble(f"{self._place}/joining", members, timeout_s)
        try:
            yield apart
        finally:
            apart.close()

    def part(self, error: CadenzaError | None = None) -> tuple[int, ...]:
        """Let the group go; remember, and return, whom it could not reach if that was the reason."""
        if self._generation is not None:
            self._generation.close()
            self._generation = None
        if not isinstance(error, UnreachedError):
            return ()
        incarnations = dict(zip(self._roster.members, self._roster.incarnations, strict=True))
        self._reachability.note({worker: incarnations[worker] for worker in error.workers}, now=time.monotonic())
        return tuple(sorted(error.workers))

    def missing(self, roster: Roster) -> set[int]:
        """Return members of a round that will not come any more, or whose place another process has taken."""
        heartbeat = self._membership.heartbeat
        known = zip(roster.members, roster.incarnations, strict=True)
        return heartbeat.silent().intersection(roster.members) | {
            worker for worker, one in known if not heartbeat.is_current(worker, one)
        }

    def unreached(self) -> tuple[int, ...]:
        """Return those with whom no group is to be tried now."""
        heartbeat = self._membership.heartbeat
        alive = {worker: beat.incarnation for worker, beat in heartbeat.alive().items()}
        connected = set(self._generation.members) if self._generation is not None else set()
        noted = self._reachability.unreached(alive, now=time.monotonic())
        return tuple(sorted(heartbeat.unreached().intersection(alive).union(noted) - connected))

    def _assemble(self, place: str, members: Sequence[int], timeout_s: float) -> Generation:
        roster = self._roster
        return assemble(
            self._connection,
            self._membership.signer,
            place=place,
            members=members,
            worker=self._membership.worker,
            timeout_s=timeout_s,
            missing=lambda: self.missing(roster).intersection(members),
            reach=lambda workers: self._membership.heartbeat.try_to_reach(workers, _REACH_S),
        )

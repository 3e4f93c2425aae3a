"""The process group that elastic members hold rounds over: kept while it works, let go after one failure."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from cadenza.errors import CadenzaError, TransportError
from cadenza.participants.forming import UnreachedError
from cadenza.participants.generation import Generation, assemble
from cadenza.participants.level_group import Stage
from cadenza.participants.membership import Membership
from cadenza.participants.reachability import Reachability
from cadenza.participants.roster import Roster, group_name, stage_place
from cadenza.participants.round_id import RoundId
from cadenza.participants.round_index import column_key
from cadenza.participants.store import StoreConnection
from cadenza.transports import Transport

__all__ = ["GroupKeeper"]

_MOST = 4  # groups that are kept
_IDLE_S = 300.0  # after which a group is not taken again: routers forget connections that are not used
_REACH_S = 1.0  # for a connection to a worker, where it is asked whether it can be reached


@dataclass
class _Group:
    """A group that was made for a roster.

    Attributes:
        generation: The group of all members.
        stages: The groups inside a site and across, where values go by stages.
        some: A group of some of the members, over which those who are behind take the leader's state.
    """

    roster: Roster
    generation: Generation
    stages: tuple[Generation, ...] = ()
    some: Generation | None = None
    used_at: float = field(default_factory=time.monotonic)

    @property
    def generations(self) -> list[Generation]:
        return [*filter(None, [self.some]), *self.stages, self.generation]

    @property
    def ways(self) -> tuple[Transport, Stage | None]:
        """The way to the members, and that through sites."""
        if not self.stages:
            return self.generation.transport, None
        inside, across = self.stages
        return self.generation.transport, Stage(inside.transport, across.transport)

    def fits(self, roster: Roster) -> bool:
        """Tell whether none of its processes has had to make way for another one."""
        now = dict(zip(roster.members, roster.incarnations, strict=True))
        made_of = zip(self.roster.members, self.roster.incarnations, strict=True)
        return all(now.get(worker, one) == one for worker, one in made_of)


class GroupKeeper:
    """Has the group of a roster, and knows with whom none can be made.

    The groups of some earlier rosters are kept as well: where a slow worker is in every second round, the same two take
    turns. What is kept depends on the rosters alone, so that all ranks of a replica keep the same.

    Args:
        membership: This worker's place in the job.
        connection: A connection to the store.
        root: What the keys of the circle begin with.
    """

    def __init__(self, membership: Membership, connection: StoreConnection, root: str = "") -> None:
        self._membership, self._connection, self._root = membership, connection, root
        self._reachability = Reachability()
        self._groups: dict[str, _Group] = {}  # by name; the one that was used last is the last one
        self._roster = Roster(())
        self._place = ""  # of the last round's keys

    def names(self) -> tuple[str, ...]:
        """Return the names of the groups that work; connections that nobody has used for long may be gone by now."""
        last, now = next(reversed(self._groups), ""), time.monotonic()
        return tuple(
            name
            for name, group in self._groups.items()
            if all(one.usable for one in group.generations) and (name == last or now < group.used_at + _IDLE_S)
        )

    def form(
        self, roster: Roster, round: RoundId, *, timeout_s: float, staged: bool = True
    ) -> tuple[Transport, Stage | None] | None:
        """Have a group of the roster's members; return the way to them, and through sites, if it is another one."""
        self._roster = roster
        self._place = place = f"{self._root}{column_key(round, self._membership.island.rank)}"
        if roster.keep:
            return self._take_again(roster, timeout_s)
        self._make_room(roster)
        group = _Group(roster, self._assemble(place, roster.members, timeout_s))
        self._groups[group_name(f"{self._root}{round}", roster.members)] = group
        for kind, members in self._stages_of(roster) if staged else ():
            group.stages += (self._assemble(f"{place}/{stage_place(kind, members)}", members, timeout_s),)
        self._reachability.forget(roster.members)
        return group.ways

    def _take_again(self, roster: Roster, timeout_s: float) -> tuple[Transport, Stage | None] | None:
        """Go back to a group that all of the roster's members have; return the way to them, if it is another one."""
        groups = self._groups
        if (group := groups.pop(roster.keep, None)) is None:
            raise TransportError("The group was let go.")
        same = all(other.used_at < group.used_at for other in groups.values())
        self._rest()
        groups[roster.keep] = group
        group.used_at = time.monotonic()
        # All of its members come here with the same rosters, so that they let it go, or use it again, together.
        if group.some is not None and group.some.members != roster.concerned:
            group.some.close()
            group.some = None
        for generation in group.generations:
            generation.set_timeout(timeout_s)
        return None if same else group.ways

    def _make_room(self, roster: Roster) -> None:
        """Let groups go of which a process has made way for another one, and the oldest of too many."""
        for name in [name for name, group in self._groups.items() if not group.fits(roster)]:
            self._let_go(self._groups.pop(name))
        while len(self._groups) >= _MOST:
            self._let_go(self._groups.pop(next(iter(self._groups))))
        self._rest()

    def _rest(self) -> None:
        """Let the groups that are there do without memory."""
        for group in self._groups.values():
            for generation in group.generations:
                generation.rest()

    def _stages_of(self, roster: Roster) -> list[tuple[str, tuple[int, ...]]]:
        """Return with whom this worker reduces inside its site, and exchanges across, if values go by stages."""
        for group in roster.inside:
            if (worker := self._membership.worker) in group:
                position = group.index(worker)
                return [("inside", group), ("across", tuple(other[position] for other in roster.inside))]
        return []

    def among_concerned(self, *, timeout_s: float) -> Generation:
        """Return a group of the last roster's leader and those who are behind; only they call this."""
        group, members = next(reversed(self._groups.values()), None), self._roster.concerned
        if group is None:
            raise TransportError("The group was let go.")
        if members == self._roster.members:
            return group.generation
        if group.some is None:
            group.some = self._assemble(f"{self._place}/joining", members, timeout_s)
        return group.some

    def part(self, error: CadenzaError | None = None) -> tuple[int, ...]:
        """Let all groups go; remember, and return, whom the last could not reach if that was the reason."""
        groups, self._groups = [*self._groups.values()], {}
        for group in groups:
            self._let_go(group)
        if not isinstance(error, UnreachedError):
            return ()
        incarnations = dict(zip(self._roster.members, self._roster.incarnations, strict=True))
        self._reachability.note({worker: incarnations[worker] for worker in error.workers}, now=time.monotonic())
        return tuple(sorted(error.workers))

    def _let_go(self, group: _Group) -> None:
        for generation in group.generations:
            generation.close()

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
        made_of = [zip(one.roster.members, one.roster.incarnations, strict=True) for one in self._groups.values()]
        connected = {worker for pairs in made_of for worker, one in pairs if heartbeat.is_current(worker, one)}
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
            mark=roster.mark,
            missing=lambda: self.missing(roster).intersection(members),
            reach=lambda workers: self._membership.heartbeat.try_to_reach(workers, _REACH_S),
        )

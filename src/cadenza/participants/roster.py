"""A meeting: workers come to it, one list of members is agreed on, and all obey it.

Everyone who comes signs the meeting's guest book. Whoever sees that all expected workers are there, or that the time is
up, proposes a roster; the first one written stands. A pure function, `propose`, makes it of the guest book.
"""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch.distributed as dist

from cadenza.errors import CadenzaError, TurnedAwayError
from cadenza.faults import FaultPolicy
from cadenza.participants.heartbeat import Call, Roll
from cadenza.participants.signing import Seal
from cadenza.participants.store import Line, append, wait_for
from cadenza.participants.vote import VOTE_KEYS

__all__ = ["Guest", "MeetingFailedError", "Roster", "hold", "propose"]

_logger = logging.getLogger("cadenza")

KEPT = 4  # meetings whose keys stay, for those who come late


class MeetingFailedError(CadenzaError):
    """No round can be held; says why. Nothing was changed."""

    def __init__(self, reason: str, *, absent: Sequence[int] = (), behind: bool = False) -> None:
        super().__init__(reason)
        self.absent = tuple(absent)
        self.behind = behind


@dataclass(frozen=True)
class Guest:
    """What a worker writes into the guest book.

    Attributes:
        incarnation: What tells its process from an earlier one in the same place.
        rounds: How many rounds it has seen land.
        chain: A hash over them: equal on two workers that have seen the same.
        terms: A fingerprint of model, strategy, version and of what it is about to send.
        last: The members of the last roster that it has seen; empty for a worker that was in none.
        late_s: How late it came to a meeting that was held without it, if it was.
        generation: The process group that works for it; empty if none does.
        level: Whether it holds the result of this very step's round, so that none is needed at the end of a run.
        here: False if it has given up waiting.
    """

    worker: int
    incarnation: str
    rounds: int
    chain: str
    terms: str
    last: tuple[int, ...] = ()
    late_s: float = 0.0
    generation: str = ""
    level: bool = False
    here: bool = True

    @property
    def new(self) -> bool:
        """Whether it was in no meeting yet."""
        return not self.last


@dataclass(frozen=True)
class Roster:
    """Who holds a round together; without members the round is skipped.

    Attributes:
        incarnations: Which processes of theirs, in the same order: one that has taken a dead one's place since is not
            meant, and knows nothing of what the dead one knew.
        leader: The one whose state the others must have.
        behind: Members that must take the leader's state first.
        absent: Who was expected and did not come.
        turned_away: Who came and may not take part, by number, and why.
        late: Who comes back after a round that was held without it, and how late it was for that one.
        keep: Whether the process group of the last round works for all of them.
        level: Whether the leader holds the result of this step's round already.
        decided_at: When that was decided, in seconds since 1970 by the clock of the one who proposed it.
    """

    members: tuple[int, ...]
    incarnations: tuple[str, ...] = ()
    leader: int = -1
    behind: tuple[int, ...] = ()
    absent: tuple[int, ...] = ()
    turned_away: Mapping[int, str] | None = None
    late: Mapping[int, float] | None = None
    keep: bool = False
    level: bool = False
    decided_at: float = 0.0

    def pack(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def unpack(cls, text: str) -> Roster:
        told = json.loads(text)
        for name in ("members", "incarnations", "behind", "absent"):
            told[name] = tuple(told[name])
        for name in ("turned_away", "late"):
            told[name] = {int(key): value for key, value in (told[name] or {}).items()}
        return cls(**told)


def propose(
    guests: Mapping[int, Guest],
    policy: FaultPolicy,
    *,
    known: Set[int],
    silent: Set[int],
    gone: Set[int],
    workers: int,
    time_is_up: bool,
) -> Roster | None:
    """Return the roster that these guests allow, or None as long as waiting may help.

    Args:
        guests: Who is there now.
        policy: What is enough.
        known: Who has signed on.
        silent: Who of them does not beat any more.
        gone: Who has signed off.
        workers: How many are expected at the very first meeting, numbered from 0.
        time_is_up: Whether those who are late have been waited for.

    Raises:
        MeetingFailedError: There is no use in waiting.
    """
    agreed = _agreed(guests)
    members = {worker for worker, guest in guests.items() if guest.terms == agreed and worker not in silent}
    turned_away = {
        worker: "its model, strategy or version is not that of the others" for worker in guests.keys() - members
        if guests[worker].terms != agreed
    }  # fmt: skip
    veterans = [guests[worker] for worker in sorted(members) if not guests[worker].new]
    leader = _leader(veterans) if veterans else None
    if leader is not None:
        last = set(leader.last) - gone
        missing = (last | known) - silent - members - turned_away.keys()
    else:
        last = set(range(workers))
        missing = last - members
    if missing and not time_is_up:
        return None
    absent = tuple(sorted((missing | last) - members))
    if not members or not policy.enough(members, last):
        reason = f"only {told(members)} came, of {told(last)}"
        if leader is not None and policy.enough(last, last) and 2 * len(members & last) > len(last):
            return Roster((), absent=absent, turned_away=turned_away)  # a majority may decide to skip
        if leader is None and not time_is_up:
            return None
        raise MeetingFailedError(reason, absent=absent)
    first = leader.worker if leader is not None else min(members)
    chain = guests[first].chain
    behind = [w for w in sorted(members) if w != first and (guests[w].new or guests[w].chain != chain)]
    late = {worker: guests[worker].late_s for worker in sorted(members) if guests[worker].late_s}
    groups = {guests[worker].generation for worker in members}
    keep = len(groups) == 1 and "" not in groups and leader is not None and set(leader.last) == members
    return Roster(
        tuple(sorted(members)),
        tuple(guests[worker].incarnation for worker in sorted(members)),
        first,
        tuple(behind),
        absent,
        turned_away,
        late,
        keep,
        guests[first].level,
    )


def hold(
    line: Line,
    roll: Roll,
    seal: Seal,
    call: Call,
    me: Guest,
    policy: FaultPolicy,
    *,
    workers: int,
    patience_s: float,
) -> Roster:
    """Come to a meeting and return its roster, on which this worker stands.

    Raises:
        MeetingFailedError: No round is held, or it is held without this worker, which is behind then.
        TurnedAwayError: The others do not want this worker.
        StoreLostError: The store cannot be reached.
    """
    base = f"meeting/{call}"
    started = time.monotonic()
    _announce(line, call)
    standing = line.call(lambda store: _standing(store, base)) if me.new else None
    line.call(lambda store: _sign(store, base, me, seal, call))
    text: bytes | None = None
    while text is None:
        if roll.replaced:
            raise TurnedAwayError(f"Another process has taken the place of worker {me.worker}; this one ends.")
        guests = line.call(lambda store: _guests(store, base, seal, call))
        current = {w: guest for w, guest in guests.items() if roll.is_current(w, guest.incarnation)}
        waited_s = time.monotonic() - started
        hopeful = roll.doubted()  # asked before the others' deaths are, which may be told in between
        try:
            proposal = propose(
                current,
                policy,
                known=roll.known(),
                silent=roll.silent(),
                gone=roll.gone(),
                workers=workers,
                time_is_up=waited_s >= patience_s,
            )
        except MeetingFailedError:
            proposal = None
            if not hopeful:
                text = line.call(lambda store: _leave(store, base, me, seal, call))
                if text is None:
                    raise
                break
        if proposal is not None and (proposal.members or not hopeful):
            proposal = replace(proposal, decided_at=time.time())
            text = line.call(partial(_decide, f"{base}/roster", seal.close(proposal.pack(), f"roster {call}")))
        elif waited_s >= 3 * patience_s:
            line.call(lambda store: _leave(store, base, me, seal, call))
            raise MeetingFailedError(f"{told(guests)} came, but nothing was decided in {waited_s:.1f} s")
        else:
            overtaken = roll.latest is not None and roll.latest > call  # asked before the roster is looked for
            text = line.call(lambda store: wait_for(store, f"{base}/roster", min(0.05, roll.tick_s)))
            if text is None and overtaken:
                raise MeetingFailedError("the others have gone on to a later round", behind=True)
    opened = seal.open(text.decode(), f"roster {call}")
    if opened is None:
        raise TurnedAwayError(
            f"The list of members does not bear the seal that worker {me.worker} knows: its job or its secret is not "
            "that of the others. Start it with theirs (CADENZA_JOB, CADENZA_SECRET)."
        )
    roster = _obeyed(Roster.unpack(opened), me)
    if standing is not None:
        raise MeetingFailedError(f"the round was held with an earlier process of worker {me.worker}", behind=True)
    return roster


def _obeyed(roster: Roster, me: Guest) -> Roster:
    """Return the roster if this worker stands on it."""
    if me.worker in (roster.turned_away or {}):
        raise TurnedAwayError(
            f"Worker {me.worker} was turned away from the round: {(roster.turned_away or {})[me.worker]}. Give every "
            "worker the same model, strategy and version."
        )
    if me.worker in roster.members:
        if roster.incarnations[roster.members.index(me.worker)] == me.incarnation:
            return roster
        raise MeetingFailedError("the round is held with an earlier process in this worker's place", behind=True)
    if not roster.members:
        raise MeetingFailedError(f"{told(roster.absent)} did not come", absent=roster.absent)
    raise MeetingFailedError(
        f"the round was held by {told(roster.members)} without worker {me.worker}, which came "
        f"{max(0.0, time.time() - roster.decided_at):.2f} s too late",
        behind=True,
    )


def clean_up(store: dist.Store, held: Sequence[tuple[str, int]]) -> None:
    """Delete what old meetings, each with so many members, and their groups have left in the store."""
    for base, members in held[:-KEPT]:
        votes = [f"{vote}/{key}" for vote in ("vote", "assembled", "joining/assembled") for key in VOTE_KEYS]
        for key in ("guests", "roster", *votes):
            store.delete_key(f"{base}/{key}")
        for position in range(members):
            store.delete_key(f"{base}/group/0/{position}")
            store.delete_key(f"{base}/joining/group/0/{position}")


def told(workers: Collection[int]) -> str:
    """Name workers in a sentence.

    >>> told({2, 0}), told([3]), told([])
    ('workers 0, 2', 'worker 3', 'no worker')
    """
    if not workers:
        return "no worker"
    return ("worker " if len(workers) == 1 else "workers ") + ", ".join(map(str, sorted(workers)))


def _announce(line: Line, call: Call) -> None:
    """Make the meeting known to those who are behind; refuse one that lies before the latest."""

    def announce(store: dist.Store) -> bytes:
        if store.check(["finished"]):
            raise MeetingFailedError("the others have finished", behind=True)
        latest = bytes(store.get("latest")).decode() if store.check(["latest"]) else ""
        if not latest or Call.parse(latest) < call:
            store.set("latest", str(call))
        return latest.encode()

    latest = line.call(announce).decode()
    if latest and call < Call.parse(latest):
        raise MeetingFailedError(
            f"the others are at step {Call.parse(latest).step} and this worker at {call.step}", behind=True
        )


def _decide(key: str, roster: str, store: dist.Store) -> bytes:
    """Write a roster unless one stands already; return the one that stands."""
    return bytes(store.compare_set(key, "", roster))


def _sign(store: dist.Store, base: str, guest: Guest, seal: Seal, call: Call) -> None:
    append(store, f"{base}/guests", seal.close(json.dumps(asdict(guest)), str(call)) + "\n")


def _standing(store: dist.Store, base: str) -> bytes | None:
    """Return the roster, if one was decided on."""
    return bytes(store.get(f"{base}/roster")) if store.check([f"{base}/roster"]) else None


def _leave(store: dist.Store, base: str, me: Guest, seal: Seal, call: Call) -> bytes | None:
    """Give up waiting, unless a roster stands by now."""
    _sign(store, base, replace(me, here=False), seal, call)
    return _standing(store, base)


def _guests(store: dist.Store, base: str, seal: Seal, call: Call) -> dict[int, Guest]:
    """Return who is there, as far as their entries bear this job's seal."""
    found: dict[int, Guest] = {}
    for line in bytes(store.get(f"{base}/guests")).decode().splitlines():
        text = seal.open(line, str(call))
        if text is None:
            continue
        told = json.loads(text)
        guest = Guest(**{**told, "last": tuple(told["last"])})
        found[guest.worker] = guest
    return {worker: guest for worker, guest in found.items() if guest.here}


def _agreed(guests: Mapping[int, Guest]) -> str:
    """Return the terms on which a round is held: those of most workers that have been in rounds, or of most."""
    veterans = [guest for guest in guests.values() if not guest.new] or list(guests.values())
    counts = Counter(guest.terms for guest in veterans)
    first = {guest.terms: -guest.worker for guest in sorted(veterans, key=lambda guest: -guest.worker)}
    return max(counts, key=lambda terms: (counts[terms], first[terms]))


def _leader(veterans: Sequence[Guest]) -> Guest:
    """Return the first of those that have seen most rounds; of different histories of one length, the commonest."""
    most = max(guest.rounds for guest in veterans)
    furthest = [guest for guest in veterans if guest.rounds == most]
    chains = Counter(guest.chain for guest in furthest)
    return max(furthest, key=lambda guest: (chains[guest.chain], -guest.worker))

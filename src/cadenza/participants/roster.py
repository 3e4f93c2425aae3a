"""Who is in a round: what each worker writes when it arrives, and the roster that a pure function makes of it.

`cadenza.participants.assembly` carries both through the store.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import asdict, dataclass, replace

from cadenza.common.wording import name_workers
from cadenza.errors import CadenzaError
from cadenza.faults import FaultPolicy

__all__ = ["Arrival", "RollbackError", "Roster", "RoundNotHeldError", "propose"]


class RoundNotHeldError(CadenzaError):
    """No round can be held; says why. Nothing was changed."""

    def __init__(self, reason: str, *, absent: Sequence[int] = (), behind: bool = False, over: bool = False) -> None:
        super().__init__(reason)
        self.absent = tuple(absent)
        self.behind = behind
        self.over = over


class RollbackError(RoundNotHeldError):
    """Nobody who is here has seen the last rounds that were held, or can know that it has."""


@dataclass(frozen=True)
class Arrival:
    """What a worker writes when it comes to a round.

    Attributes:
        incarnation: What tells its process from an earlier one in the same place.
        rounds: How many rounds it has seen land.
        chain: A hash over them: equal on two workers that have seen the same.
        terms: A fingerprint of model, strategy, version and of what it is about to send.
        last: The members of the last roster that it has seen; empty for a worker that was in none.
        late_s: How late it came to a round that was held without it, if it was.
        generation: The process group that works for it; empty if none does.
        settled: Whether it holds the result of this very step's round, so that none is needed at the end of a run.
        here: False if it has given up waiting.
        called: Whether it came because others were said to hold the round, and not by steps of its own.
        unreached: Workers to which it cannot connect.
        unsure: Whether the store has forgotten, since its last round, how many were held.
    """

    worker: int
    incarnation: str
    rounds: int
    chain: str
    terms: str
    last: tuple[int, ...] = ()
    late_s: float = 0.0
    generation: str = ""
    settled: bool = False
    here: bool = True
    called: bool = False
    unreached: tuple[int, ...] = ()
    unsure: bool = False

    def pack(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def unpack(cls, text: str) -> Arrival:
        told = json.loads(text)
        arrival = cls(**{**told, **{name: _whole_numbers(told[name]) for name in ("last", "unreached")}})
        _whole_numbers([arrival.worker, arrival.rounds])
        for name in ("incarnation", "chain", "terms", "generation"):
            if not isinstance(getattr(arrival, name), str):
                raise TypeError(f"{name} is no text")
        return replace(arrival, late_s=float(arrival.late_s))

    @property
    def new(self) -> bool:
        """Whether it was in no round yet."""
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
        settled: Whether the leader holds the result of this step's round already.
        decided_at: When that was decided, in seconds since 1970 by the clock of the one who proposed it.
        unreached: Who came and is left out, and the members that cannot connect to it, or it to them.
        given_up: Up to which number rounds were held that nobody here has seen, and that are given up.
    """

    members: tuple[int, ...]
    incarnations: tuple[str, ...] = ()
    leader: int = -1
    behind: tuple[int, ...] = ()
    absent: tuple[int, ...] = ()
    turned_away: Mapping[int, str] | None = None
    late: Mapping[int, float] | None = None
    keep: bool = False
    settled: bool = False
    decided_at: float = 0.0
    unreached: Mapping[int, Sequence[int]] | None = None
    given_up: int = 0

    def pack(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def unpack(cls, text: str) -> Roster:
        told = json.loads(text)
        for name in ("members", "behind", "absent"):
            told[name] = _whole_numbers(told[name])
        told["incarnations"] = tuple(map(str, told["incarnations"]))
        for name in ("turned_away", "unreached", "late"):
            told[name] = {int(key): value for key, value in (told[name] or {}).items()}
        told["unreached"] = {worker: _whole_numbers(others) for worker, others in told["unreached"].items()}
        _whole_numbers([told["given_up"]])
        roster = cls(**told)
        if len(roster.incarnations) != len(roster.members) or (roster.members and roster.leader not in roster.members):
            raise ValueError("this is no roster")
        return replace(roster, decided_at=float(roster.decided_at))


def _whole_numbers(values: Sequence[object]) -> tuple[int, ...]:
    found = tuple(value for value in values if type(value) is int and value >= 0)
    if len(found) != len(values):
        raise ValueError(f"these are no whole numbers from 0: {values!r}")
    return found


def propose(
    arrivals: Mapping[int, Arrival],
    policy: FaultPolicy,
    *,
    known: Set[int],
    silent: Set[int],
    gone: Set[int],
    workers: int,
    time_is_up: bool,
    held: int = 0,
    accept_rollback: bool = False,
) -> Roster | None:
    """Return the roster that these arrivals allow, or None as long as waiting may help.

    Args:
        arrivals: Who is there now.
        policy: What is enough.
        known: Who has signed on.
        silent: Who of them does not beat any more.
        gone: Who has signed off.
        workers: How many are expected at the very first round, numbered from 0.
        time_is_up: Whether those who are late have been waited for.
        held: How many rounds were held, as far as is known.
        accept_rollback: Whether a state that has seen fewer may be gone on from.

    Raises:
        RollbackError: Nobody who is here has seen the last rounds that were held.
        RoundNotHeldError: There is no use in waiting.
    """
    agreed = _agreed(arrivals)
    members = {worker for worker, arrival in arrivals.items() if arrival.terms == agreed and worker not in silent}
    turned_away = {
        worker: "its model, strategy or version is not that of the others" for worker in arrivals.keys() - members
        if arrivals[worker].terms != agreed
    }  # fmt: skip
    unreached = _unreached(arrivals, members)
    members -= unreached.keys()
    veterans = [arrivals[worker] for worker in sorted(members) if not arrivals[worker].new]
    leader = _leader(veterans) if veterans else None
    if leader is not None:
        last = set(leader.last) - gone
        missing = (last | known) - silent - members - turned_away.keys() - unreached.keys()
    else:
        last = set(range(workers))
        missing = last - members - unreached.keys()
    # Who was left out of the last round comes at its next step; who was in it may take long.
    suffices = policy.suffices(members, last) and policy.enough(members, last) and not missing - last
    if missing and not time_is_up and not (leader is not None and suffices):
        return None
    if veterans and all(arrival.called for arrival in veterans):
        raise RoundNotHeldError("of those who came, nobody has come to this step by its own steps")
    absent = tuple(sorted((missing | last) - members))
    # Where the store has forgotten, those without a state are no witnesses: others may have seen more.
    witnesses = {w for w in members if not arrivals[w].new} if leader is not None and leader.unsure else members
    if not members or not policy.enough(members, last):
        reason = f"only {name_workers(members)} came, of {name_workers(last)}" + _told(unreached)
        if leader is not None and policy.enough(last, last) and 2 * len(members & last) > len(last):
            return Roster(
                (), absent=absent, turned_away=turned_away, unreached=unreached
            )  # a majority may decide to skip
        if leader is None and not time_is_up:
            return None
        raise RoundNotHeldError(reason, absent=absent)
    lost = held if leader is not None and leader.rounds < held else 0
    if lost and leader is not None and not accept_rollback:
        text = f"{held} rounds were held, and of those who are here nobody has seen more than {leader.rounds}"
        raise RollbackError(text, absent=absent)
    if not policy.enough(witnesses, last) and not accept_rollback:
        text = f"the store has forgotten how many rounds were held, and only {name_workers(witnesses)} has seen any"
        raise RollbackError(text, absent=absent)
    first = leader.worker if leader is not None else min(members)
    chain = arrivals[first].chain
    behind = [w for w in sorted(members) if w != first and (arrivals[w].new or arrivals[w].chain != chain)]
    late = {worker: arrivals[worker].late_s for worker in sorted(members) if arrivals[worker].late_s}
    groups = {arrivals[worker].generation for worker in members}
    keep = len(groups) == 1 and "" not in groups and leader is not None and set(leader.last) == members
    return Roster(
        tuple(sorted(members)),
        tuple(arrivals[worker].incarnation for worker in sorted(members)),
        first,
        tuple(behind),
        absent,
        turned_away,
        late,
        keep,
        arrivals[first].settled,
        unreached=unreached,
        given_up=lost,
    )


def _unreached(arrivals: Mapping[int, Arrival], members: Set[int]) -> dict[int, list[int]]:
    """Return whom to leave out so that all others can connect: joiners first, then who is in most pairs that cannot."""
    veterans = [arrivals[worker] for worker in sorted(members) if not arrivals[worker].new]
    last = _leader(veterans).last if veterans else ()
    pairs = {frozenset((a, b)) for a in members for b in arrivals[a].unreached if b in members and a != b}
    found: dict[int, list[int]] = {}
    while pairs:
        counts = Counter(worker for pair in pairs for worker in pair)
        worst = max(counts, key=lambda worker: (worker not in last, counts[worker], worker))
        found[worst] = sorted(worker for pair in pairs if worst in pair for worker in pair - {worst})
        pairs = {pair for pair in pairs if worst not in pair}
    return found


def _told(unreached: Mapping[int, Sequence[int]]) -> str:
    told = (f"; worker {worker} cannot be reached by {name_workers(others)}" for worker, others in unreached.items())
    return "".join(told)


def _agreed(arrivals: Mapping[int, Arrival]) -> str:
    """Return the terms on which a round is held: those of most workers that have been in rounds, or of most."""
    veterans = [arrival for arrival in arrivals.values() if not arrival.new] or list(arrivals.values())
    counts = Counter(arrival.terms for arrival in veterans)
    first = {arrival.terms: -arrival.worker for arrival in sorted(veterans, key=lambda arrival: -arrival.worker)}
    return max(counts, key=lambda terms: (counts[terms], first[terms]))


def _leader(veterans: Sequence[Arrival]) -> Arrival:
    """Return the first of those that have seen most rounds; of different histories of one length, the commonest."""
    most = max(arrival.rounds for arrival in veterans)
    furthest = [arrival for arrival in veterans if arrival.rounds == most]
    chains = Counter(arrival.chain for arrival in furthest)
    return max(furthest, key=lambda arrival: (chains[arrival.chain], -arrival.worker))

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
    members, turned_away, unreached = _sort_out(arrivals, silent)
    veterans = [arrivals[worker] for worker in sorted(members) if not arrivals[worker].new]
    leader = _leader(veterans) if veterans else None
    came = members | turned_away.keys() | unreached.keys()
    last = set(leader.last) - gone if leader is not None else set(range(workers))
    missing = ((last | known) - silent if leader is not None else last) - came
    # Who was left out of the last round comes at its next step; who was in it may take long.
    suffices = policy.suffices(members, last) and policy.enough(members, last) and not missing - last
    if missing and not time_is_up and not (leader is not None and suffices):
        return None
    if veterans and all(arrival.called for arrival in veterans):
        raise RoundNotHeldError("of those who came, nobody has come to this step by its own steps")
    absent = tuple(sorted((missing | last) - members))
    nobody = Roster((), absent=absent, turned_away=turned_away, unreached=unreached)
    if not members or not policy.enough(members, last):
        if leader is not None and policy.enough(last, last) and 2 * len(members & last) > len(last):
            return nobody  # a majority may decide to skip
        if leader is None and not time_is_up:
            return None
        reason = f"only {name_workers(members)} came, of {name_workers(last)}" + _told(unreached)
        raise RoundNotHeldError(reason, absent=absent)
    if leader is not None and not accept_rollback:
        _refuse_rollback(leader, {arrival.worker for arrival in veterans}, policy, last, held=held)
    first = leader if leader is not None else arrivals[min(members)]
    ordered = [arrivals[worker] for worker in sorted(members)]
    groups = {arrival.generation for arrival in ordered}
    return replace(
        nobody,
        members=tuple(arrival.worker for arrival in ordered),
        incarnations=tuple(arrival.incarnation for arrival in ordered),
        leader=first.worker,
        behind=tuple(a.worker for a in ordered if a.worker != first.worker and (a.new or a.chain != first.chain)),
        late={arrival.worker: arrival.late_s for arrival in ordered if arrival.late_s},
        keep=len(groups) == 1 and "" not in groups and leader is not None and set(leader.last) == members,
        settled=first.settled,
        given_up=held if leader is not None and leader.rounds < held else 0,
    )


def _sort_out(
    arrivals: Mapping[int, Arrival], silent: Set[int]
) -> tuple[set[int], dict[int, str], dict[int, list[int]]]:
    """Return who of those that came may be a member, who is turned away and why, and who cannot be reached by whom."""
    agreed = _agreed(arrivals)
    turned_away = {
        worker: "its model, strategy or version is not that of the others"
        for worker, arrival in arrivals.items()
        if arrival.terms != agreed
    }
    members = arrivals.keys() - turned_away.keys() - silent
    unreached = _unreached(arrivals, members)
    return members - unreached.keys(), turned_away, unreached


def _refuse_rollback(leader: Arrival, veterans: Set[int], policy: FaultPolicy, last: Set[int], *, held: int) -> None:
    """Raise if rounds were, or may have been, held that nobody who is here has seen."""
    if leader.rounds < held:
        raise RollbackError(
            f"{held} rounds were held, and of those who are here nobody has seen more than {leader.rounds}",
            absent=sorted(last - veterans),
        )
    # Where the store has forgotten, those without a state are no witnesses: others may have seen more.
    if leader.unsure and not policy.enough(veterans, last):
        raise RollbackError(
            f"the store has forgotten how many rounds were held, and only {name_workers(veterans)} has seen any",
            absent=sorted(last - veterans),
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

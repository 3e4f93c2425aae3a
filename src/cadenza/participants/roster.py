"""Who is in a round: what each worker writes when it arrives, and the roster that a pure function makes of it.

`cadenza.participants.assembly` carries both through the store.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import asdict, dataclass, replace

from cadenza.common.wording import name_workers
from cadenza.errors import CadenzaError
from cadenza.faults import FaultPolicy
from cadenza.participants.worker_lists import in_ranges, numbers_of, shares_of, whole_numbers

__all__ = ["Arrival", "RollbackError", "Roster", "RoundNotHeldError", "group_name", "propose", "stage_place"]


class RoundNotHeldError(CadenzaError):
    """No round can be held; says why. Nothing was changed."""

    def __init__(
        self,
        reason: str,
        *,
        absent: Sequence[int] = (),
        behind: bool = False,
        over: bool = False,
        late_s: float = 0.0,
    ) -> None:
        super().__init__(reason)
        self.late_s = late_s
        self.absent = tuple(absent)
        self.behind = behind
        self.over = over


class RollbackError(RoundNotHeldError):
    """Nobody who is here has seen the last rounds that were held, or can know that it has."""


_KNOWN = ("incarnations", "sites", "inside")  # of a roster that is the last one again: its members know it


@dataclass(frozen=True)
class Arrival:
    """What a worker writes when it comes to a round.

    Attributes:
        incarnation: What tells its process from an earlier one in the same place.
        rounds: How many rounds it has seen land.
        chain: A hash over them: equal on two workers that have seen the same.
        terms: A fingerprint of model, strategy, version and of what it is about to send.
        last: The members of the last roster that it has seen; empty for a worker that was in none.
        weights: What each of these counted in the last round; empty if all counted alike.
        late_s: How late it came to a round that was held without it, if it was.
        groups: The process groups that it has and that work, by name (see `group_name`); the last one is that of the
            roster that it was on last.
        settled: Whether it holds the result of this very step's round, so that none is needed at the end of a run.
        here: False if it has given up waiting.
        called: Whether it came because others were said to hold the round, and not by steps of its own.
        unreached: Workers to which it cannot connect.
        unsure: Whether the store has forgotten, since its last round, how many were held.
        site: Where it is, from the largest place to the smallest, with slashes.
        at: When it was written, in seconds since 1970 by its own clock.
    """

    worker: int
    incarnation: str
    rounds: int
    chain: str
    terms: str
    last: tuple[int, ...] = ()
    weights: tuple[float, ...] = ()
    late_s: float = 0.0
    groups: tuple[str, ...] = ()
    settled: bool = False
    here: bool = True
    called: bool = False
    unreached: tuple[int, ...] = ()
    unsure: bool = False
    site: str = ""
    at: float = 0.0

    def pack(self) -> str:
        return json.dumps({**asdict(self), "last": in_ranges(self.last)})

    @classmethod
    def unpack(cls, text: str) -> Arrival:
        told = json.loads(text)
        told["last"], told["unreached"] = numbers_of(told["last"]), whole_numbers(told["unreached"])
        arrival = cls(**{**told, "weights": shares_of(told["weights"])})
        if len(arrival.weights) not in (0, len(arrival.last)):
            raise ValueError("there is not one weight for each worker")
        whole_numbers([arrival.worker, arrival.rounds])
        for name in ("incarnation", "chain", "terms", "site"):
            if not isinstance(getattr(arrival, name), str):
                raise TypeError(f"{name} is no text")
        groups, [late_s] = tuple(map(str, arrival.groups)), shares_of([arrival.late_s])
        return replace(arrival, groups=groups, late_s=late_s, at=float(arrival.at))

    @property
    def new(self) -> bool:
        """Whether it was in no round yet."""
        return not self.last

    @property
    def weighed(self) -> dict[int, float]:
        """What each worker counted in the last round; empty if all counted alike."""
        return dict(zip(self.last, self.weights, strict=False))


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
        keep: The name of a process group that all of them have; empty if a new one is to be made.
        again: Whether it is the last roster of all its members, so that they know each other.
        settled: Whether the leader holds the result of this step's round already.
        decided_at: When that was decided, in seconds since 1970 by the clock of the one who proposed it.
        unreached: Who came and is left out, and the members that cannot connect to it, or it to them.
        given_up: Up to which number rounds were held that nobody here has seen, and that are given up.
        sites: Where the members are, in their order.
        inside: The members by site, if there are several and equally many in each: values go by stages then.
    """

    members: tuple[int, ...]
    incarnations: tuple[str, ...] = ()
    leader: int = -1
    behind: tuple[int, ...] = ()
    absent: tuple[int, ...] = ()
    turned_away: Mapping[int, str] | None = None
    late: Mapping[int, float] | None = None
    keep: str = ""
    again: bool = False
    settled: bool = False
    decided_at: float = 0.0
    unreached: Mapping[int, Sequence[int]] | None = None
    given_up: int = 0
    sites: tuple[str, ...] = ()
    inside: tuple[tuple[int, ...], ...] = ()

    @property
    def concerned(self) -> tuple[int, ...]:
        """The leader and those who take its state."""
        return tuple(sorted({self.leader, *self.behind}))

    @property
    def mark(self) -> str:
        """What no other roster has, of this run or another: it names processes, and the moment."""
        return _hash(self.members, self.incarnations, self.decided_at)

    def pack(self) -> str:
        """Return it as text: a short one where all of its members were in the last round together."""
        told = {**asdict(self), "members": in_ranges(self.members), "absent": in_ranges(self.absent)}
        if self.again:
            told = {name: value for name, value in told.items() if name not in _KNOWN}
            told["processes"] = _hash(self.incarnations)
        return json.dumps(told)

    @classmethod
    def unpack(cls, text: str, known: Roster | None = None) -> Roster:
        """Return what `pack` gave; `known` is the last roster of this worker, for what is left out where it is again.

        To whoever was not on that one, its processes are strangers.
        """
        told = json.loads(text)
        for name in ("members", "absent"):
            told[name] = numbers_of(told[name])
        told["behind"] = whole_numbers(told["behind"])
        if told["again"]:
            strangers = ("",) * len(told["members"])
            here = told["members"], told.pop("processes")
            same = known is not None and (known.members, _hash(known.incarnations)) == here
            told |= (
                {name: getattr(known, name) for name in _KNOWN}
                if same
                else dict(zip(_KNOWN, [strangers, strangers, ()], strict=True))
            )
        for name in ("incarnations", "sites"):
            told[name] = tuple(map(str, told[name]))
        told["inside"] = tuple(map(whole_numbers, told["inside"]))
        for name in ("turned_away", "unreached", "late"):
            told[name] = {int(key): value for key, value in (told[name] or {}).items()}
        told["unreached"] = {worker: whole_numbers(others) for worker, others in told["unreached"].items()}
        shares_of(list(told["late"].values()))
        whole_numbers([told["given_up"]])
        if not isinstance(told["keep"], str):
            raise TypeError("keep is no name")
        roster = cls(**told)
        aligned = len(roster.incarnations) == len(roster.sites) == len(roster.members)
        staged = sorted(worker for group in roster.inside for worker in group)
        equal = len({len(group) for group in roster.inside}) < 2 and staged in ([], list(roster.members))
        if not (aligned and equal) or (roster.members and roster.leader not in roster.members):
            raise ValueError("this is no roster")
        return replace(roster, decided_at=float(roster.decided_at))


def _hash(*told: object) -> str:
    return hashlib.blake2b(repr(told).encode(), digest_size=16).hexdigest()


def group_name(made_for: str, members: Sequence[int]) -> str:
    """Return the name of the process group that was made of these members for a round; no other one has it.

    >>> group_name("20.0.0", (0, 1, 2, 5))
    '20.0.0 of 0-2 5'
    """
    return f"{made_for} of {in_ranges(members)}"


def _common_group(arrivals: Sequence[Arrival]) -> str:
    """Return a group of just these workers that all of them have, or nothing."""
    members = in_ranges([arrival.worker for arrival in arrivals])
    common = set.intersection(*(set(arrival.groups) for arrival in arrivals))
    return max((name for name in common if name.partition(" of ")[2] == members), default="")


def stage_place(kind: str, group: Sequence[int]) -> str:
    """Return where the keys of a group inside or across a staged round are, below those of the round.

    >>> stage_place("inside", (4, 5))
    'inside/4'
    """
    return f"{kind}/{group[0]}"


def propose(
    arrivals: Mapping[int, Arrival],
    policy: FaultPolicy,
    *,
    known: Set[int],
    silent: Set[int],
    gone: Set[int],
    workers: int,
    time_is_up: bool,
    lingered: bool = True,
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
        workers: How many are expected at the very first round, numbered from 0; with 0, whoever has no state waits for
            those who have one.
        time_is_up: Whether those who are late have been waited for.
        lingered: Whether those who are a moment late have been, where the others are enough.
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
    weights = leader.weighed if leader is not None else {}
    suffices = policy.suffices(members, last, weights) and policy.enough(members, last) and not missing - last
    # Nor is a round held by some who have missed the last one, while those who were in it are still to come.
    current = leader is not None and leader.rounds >= held and not leader.late_s
    if missing and not time_is_up and not (current and suffices and lingered):
        return None
    if veterans and all(arrival.called for arrival in veterans):
        raise RoundNotHeldError("of those who came, nobody has come to this step by its own steps")
    absent = tuple(sorted((missing | last) - members))
    nobody = Roster((), absent=absent, turned_away=turned_away, unreached=unreached)
    if not members or not policy.enough(members, last) or (leader is None and not workers):
        if leader is not None and policy.enough(last, last) and 2 * len(members & last) > len(last):
            return nobody  # a majority may decide to skip
        if leader is None and not time_is_up and (workers or known - silent - came):
            return None
        reason = f"only {name_workers(members)} came, of {name_workers(last)}" + _told(unreached)
        if leader is None and not workers:
            reason = f"of those who came, {name_workers(came)}, nobody has a state" + _told(unreached)
        raise RoundNotHeldError(reason, absent=absent)
    if leader is not None and not accept_rollback and (missing or not _minority_goes_on(policy, last)):
        _refuse_rollback(leader, {arrival.worker for arrival in veterans}, policy, last, held=held)
    first = leader if leader is not None else arrivals[min(members)]
    ordered = [arrivals[worker] for worker in sorted(members)]
    return replace(
        nobody,
        members=tuple(arrival.worker for arrival in ordered),
        incarnations=tuple(arrival.incarnation for arrival in ordered),
        leader=first.worker,
        behind=tuple(a.worker for a in ordered if a.worker != first.worker and (a.new or a.chain != first.chain)),
        late={arrival.worker: arrival.late_s for arrival in ordered if arrival.late_s},
        keep=(keep := _common_group(ordered)),
        again=bool(keep) and all(arrival.groups[-1] == keep for arrival in ordered),
        settled=first.settled,
        given_up=held if leader is not None and leader.rounds < held else 0,
        sites=tuple(arrival.site for arrival in ordered),
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


def _minority_goes_on(policy: FaultPolicy, last: Set[int]) -> bool:
    """Tell whether half of the workers may hold a round without waiting: it is lost with them, and others go on."""
    everybody = sorted(last) if len(last) > 1 else [*last, max(last) + 1]
    few = set(everybody[: len(everybody) // 2])
    return policy.suffices(few, set(everybody), {}) and policy.enough(few, set(everybody))


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

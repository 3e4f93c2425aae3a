"""Who holds a round: what is proposed from a arrival book, without any store."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

import cadenza
from cadenza.participants.assembly import obeyed
from cadenza.participants.roster import Arrival, RollbackError, Roster, RoundNotHeldError, group_name, propose
from cadenza.participants.round_id import RoundId
from cadenza.participants.signing import Signer

ALL = (0, 1, 2)


def arrival(worker: int, *, rounds: int = 4, chain: str = "c", terms: str = "t", **more: Any) -> Arrival:
    return Arrival(worker, f"i{worker}", rounds, chain, terms, **{"last": ALL, **more})


def new(worker: int, **more: Any) -> Arrival:
    return arrival(worker, rounds=0, chain="", last=(), **more)


def proposed(*arrivals: Arrival, policy: Any = None, late: bool = False, **heartbeat: Any) -> Roster | None:
    known = {"known": set(ALL), "silent": set(), "gone": set(), "workers": 3, **heartbeat}
    book = {arrival.worker: arrival for arrival in arrivals}
    return propose(book, policy or cadenza.shrink(), time_is_up=late, **known)


def test_all_that_are_expected_hold_the_round_at_once() -> None:
    roster = proposed(*map(arrival, ALL))
    assert roster is not None
    assert (roster.members, roster.leader, roster.behind, roster.absent) == (ALL, 0, (), ())


def test_a_process_that_took_the_place_of_a_dead_one_is_not_the_one_on_the_roster() -> None:
    roster = proposed(*map(arrival, ALL))
    assert roster is not None
    assert obeyed(roster, arrival(2)) is roster
    with pytest.raises(RoundNotHeldError, match="an earlier process in this worker's place") as caught:
        obeyed(roster, replace(new(2), incarnation="another"))
    assert caught.value.behind, "it has nothing of what the others hold: it must catch up first"


def test_a_worker_that_is_alive_is_waited_for_until_the_time_is_up() -> None:
    assert proposed(arrival(0), arrival(1)) is None
    roster = proposed(arrival(0), arrival(1), late=True)
    assert roster is not None
    assert (roster.members, roster.absent) == ((0, 1), (2,))


def test_a_silent_worker_is_not_waited_for() -> None:
    roster = proposed(arrival(0), arrival(1), silent={2})
    assert roster is not None
    assert (roster.members, roster.absent) == ((0, 1), (2,))


def test_a_minority_holds_no_round_and_does_not_wait_for_the_dead() -> None:
    with pytest.raises(RoundNotHeldError, match="only worker 0 came, of workers 0, 1, 2"):
        proposed(arrival(0), silent={1, 2})


def test_a_smaller_quorum_lets_one_go_on() -> None:
    roster = proposed(arrival(0), silent={1, 2}, policy=cadenza.shrink(quorum=0.0))
    assert roster is not None
    assert roster.members == (0,)


def test_fewer_than_the_least_number_of_workers_skip_the_round() -> None:
    roster = proposed(arrival(0), arrival(1), silent={2}, policy=cadenza.shrink(min_workers=3))
    assert roster is not None
    assert (roster.members, roster.absent) == ((), (2,))


def test_under_skip_round_a_majority_decides_to_skip() -> None:
    roster = proposed(arrival(0), arrival(1), silent={2}, policy=cadenza.skip_round())
    assert roster is not None
    assert (roster.members, roster.absent) == ((), (2,))


def test_who_has_signed_off_is_neither_expected_nor_counted() -> None:
    roster = proposed(arrival(0), silent={1, 2}, gone={1, 2})
    assert roster is not None
    assert roster.members == (0,)


def test_a_worker_that_joins_is_behind_and_never_leads() -> None:
    roster = proposed(arrival(1), arrival(2), new(0), known={0, 1, 2})
    assert roster is not None
    assert (roster.leader, roster.behind) == (1, (0,))


def test_who_missed_a_round_takes_the_state_of_those_who_did_not() -> None:
    roster = proposed(arrival(0, rounds=3, chain="b"), arrival(1), arrival(2))
    assert roster is not None
    assert (roster.leader, roster.behind) == (1, (0,))


def test_of_two_histories_of_one_length_the_commoner_is_taken() -> None:
    roster = proposed(arrival(0, chain="x"), arrival(1), arrival(2))
    assert roster is not None
    assert (roster.leader, roster.behind) == (1, (0,))


def test_at_the_very_start_all_are_waited_for_and_the_first_leads() -> None:
    assert proposed(new(0), new(1), known={0, 1}) is None
    roster = proposed(*map(new, ALL))
    assert roster is not None
    assert (roster.leader, roster.behind) == (0, (1, 2))


def test_a_worker_with_other_terms_is_turned_away_whatever_its_number() -> None:
    roster = proposed(arrival(1), arrival(2), new(0, terms="another"))
    assert roster is not None
    assert roster.members == (1, 2)
    assert set(roster.turned_away or ()) == {0}


def test_a_group_is_kept_only_if_it_works_for_all_and_is_of_the_same_members() -> None:
    name = group_name("round/4.0.0", ALL)
    working = [arrival(worker, groups=(name,)) for worker in ALL]
    roster = proposed(*working)
    assert roster is not None
    assert (roster.keep, roster.again) == (name, True)
    broken = proposed(*working[:2], arrival(2))
    assert broken is not None
    assert not broken.keep
    smaller = proposed(*working[:2], silent={2})
    assert smaller is not None
    assert not smaller.keep


def test_a_group_of_earlier_is_taken_again_when_its_members_are_together_again() -> None:
    both = tuple(group_name(round, members) for round, members in (("round/4.0.0", ALL), ("round/8.0.0", (0, 1))))
    arrivals = [arrival(worker, groups=both, last=(0, 1)) for worker in (0, 1)]
    slow = arrival(2, groups=both[:1], rounds=3, chain="b", late_s=0.2)
    roster = proposed(*arrivals, slow)
    assert roster is not None
    assert (roster.members, roster.keep, roster.behind) == (ALL, both[0], (2,))
    assert not roster.again, "for two of them the last roster was another one"
    assert Roster.unpack(roster.pack()).incarnations == ("i0", "i1", "i2")
    without = proposed(*arrivals, late=True)
    assert without is not None
    assert (without.keep, without.again) == (both[1], True)
    together = [replace(one, last=ALL) for one in (*arrivals, slow)]  # as after a round of a larger level
    again = proposed(*together)
    assert again is not None
    assert (again.keep, again.again) == (both[0], False)


def test_a_roster_survives_the_store() -> None:
    told = Roster(ALL, ("a", "b", "c"), 1, (0,), (3,), {4: "why"}, {0: 1.5}, keep="g", settled=True, decided_at=2.0)
    roster = replace(told, again=True, unreached={5: (0, 1)}, sites=("eu", "eu", "us"))
    assert Roster.unpack(roster.pack(), known=replace(roster, leader=0, behind=())) == roster
    made = replace(roster, keep="", again=False)
    assert Roster.unpack(made.pack()) == made


def test_rounds_are_held_in_the_order_of_steps_phases_and_fragments() -> None:
    assert RoundId(5) < RoundId(5, fragment=1) < RoundId(5, phase=1) < RoundId(10)


def test_a_signature_is_worth_nothing_elsewhere() -> None:
    signer = Signer("job", secret="word")
    signed = signer.sign_text("text", "here")
    assert signer.verified_text(signed, "here") == "text"
    assert signer.verified_text(signed, "there") is None
    assert Signer("another", secret="word").verified_text(signed, "here") is None
    assert signer.verified_text(signed.replace("text", "test"), "here") is None


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: cadenza.shrink(min_workers=0), "min_workers"),
        (lambda: cadenza.shrink(min_workers=1.5), "min_workers"),  # type: ignore[arg-type]
        (lambda: cadenza.shrink(quorum=1.0), "quorum"),
        (lambda: cadenza.skip_round(grace_s=0), "grace_s"),
        (lambda: cadenza.shrink(poison="ignore"), "poison"),
        (lambda: cadenza.shrink(explosion=0.5), "explosion"),
        (lambda: cadenza.local_sgd(faults=cadenza.skip_round(), balanced=True), "balanced"),
        (lambda: cadenza.hierarchical({2: 2, 4: "all"}, faults=cadenza.shrink()), "groups of fixed ranks"),
    ],
)
def test_what_cannot_work_is_refused_with_a_reason(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_policies_are_part_of_what_ranks_compare_and_raising_changes_no_description() -> None:
    assert "strategy.faults.min_workers: 2" in cadenza.diloco(faults=cadenza.shrink(min_workers=2)).identity
    assert cadenza.diloco().identity == cadenza.diloco(faults=cadenza.raise_error()).identity


def test_a_joiner_that_cannot_be_reached_is_left_out_and_told_so() -> None:
    roster = proposed(arrival(0, unreached=(7,)), arrival(1), arrival(2), new(7, unreached=(0, 1)), known={*ALL, 7})
    assert roster is not None
    assert (roster.members, dict(roster.unreached or {})) == (ALL, {7: [0, 1]})
    with pytest.raises(RoundNotHeldError, match="no connection can be made between it and workers 0, 1") as caught:
        obeyed(Roster.unpack(roster.pack()), new(7))
    assert caught.value.behind, "it may be reached later"


def test_a_joiner_cannot_talk_a_member_out_of_a_round() -> None:
    roster = proposed(*map(arrival, ALL), new(7, unreached=ALL), known={*ALL, 7})
    assert roster is not None
    assert (roster.members, set(roster.unreached or {})) == (ALL, {7})


def test_of_members_the_one_that_most_cannot_reach_is_left_out() -> None:
    book = arrival(0, unreached=(1, 2)), arrival(1, unreached=(0,)), arrival(2, unreached=(0,))
    roster = proposed(*book)
    assert roster is not None
    assert (roster.members, roster.leader) == ((1, 2), 1)
    assert roster.absent == (0,)


def test_two_that_cannot_reach_each_other_hold_no_round_and_say_why() -> None:
    first, second = (arrival(w, last=(0, 1), unreached=(1 - w,)) for w in (0, 1))
    with pytest.raises(RoundNotHeldError, match="worker 1 cannot be reached by worker 0"):
        proposed(first, second, known={0, 1})


def test_nobody_leads_from_below_the_rounds_that_were_held() -> None:
    """A majority has held 253 rounds and comes back empty; the two that are left have seen 95."""
    everyone = {"known": set(range(5)), "held": 253}
    book = [arrival(w, rounds=95, last=tuple(range(5))) for w in (3, 4)] + [new(w) for w in (0, 1, 2)]
    with pytest.raises(RollbackError, match=r"253 rounds were held, .* nobody has seen more than 95"):
        proposed(*book, **everyone)
    roster = proposed(*book, **everyone, accept_rollback=True)
    assert roster is not None
    assert (roster.leader, roster.given_up, roster.behind) == (3, 253, (0, 1, 2))
    assert Roster.unpack(roster.pack()) == replace(roster, turned_away={}, late={}, unreached={})


def test_a_worker_that_comes_back_empty_counts_where_the_store_remembers() -> None:
    book = arrival(0, last=(0, 1)), new(1)
    roster = proposed(*book, known={0, 1}, held=4)
    assert roster is not None
    assert roster.members == (0, 1)
    with pytest.raises(RollbackError, match="only worker 0 has seen any"):
        proposed(replace(book[0], unsure=True), book[1], known={0, 1}, held=4)


def test_a_round_does_not_wait_for_who_is_late_once_enough_have_come() -> None:
    policy = cadenza.shrink(commit_at=0.6)
    assert proposed(arrival(0), policy=policy) is None
    roster = proposed(arrival(0), arrival(1), policy=policy)
    assert roster is not None
    assert (roster.members, roster.absent) == ((0, 1), (2,))


def test_who_was_left_out_of_the_last_round_is_waited_for() -> None:
    first, second = (arrival(worker, last=(0, 1)) for worker in (0, 1))
    assert proposed(first, second, policy=cadenza.shrink(commit_at=0.6)) is None
    roster = proposed(first, second, arrival(2, rounds=3, chain="b"), policy=cadenza.shrink(commit_at=0.6))
    assert roster is not None
    assert (roster.members, roster.behind) == (ALL, (2,))


def test_one_worker_may_be_enough_if_the_quorum_allows_it() -> None:
    assert proposed(arrival(0), policy=cadenza.shrink(commit_at=1)) is None, "a minority decides nothing"
    roster = proposed(arrival(0), policy=cadenza.shrink(commit_at=1, quorum=0.0))
    assert roster is not None
    assert roster.members == (0,)


def test_who_missed_the_last_round_does_not_hold_one_before_those_who_were_in_it_come() -> None:
    policy = cadenza.shrink(commit_at=1, quorum=0.0)
    known = {0, 1, 2, 3}
    left_out = arrival(2, last=(0, 1, 2, 3), late_s=0.01)
    assert proposed(left_out, policy=policy, known=known) is None, "it knows by itself"
    assert proposed(arrival(2, last=(0, 1, 2, 3)), policy=policy, known=known, held=5) is None, "all know it"
    seen = arrival(1, rounds=5, chain="d", last=(1,))
    assert proposed(left_out, seen, policy=policy, known=known) is None, "the others were left out too"
    roster = proposed(left_out, seen, policy=policy, known=known, silent={0, 3})
    assert roster is not None
    assert (roster.leader, roster.behind) == (1, (2,))


def test_who_is_a_moment_late_is_waited_for_where_the_others_are_enough() -> None:
    policy = cadenza.shrink(commit_at=0.6)
    assert proposed(arrival(0), arrival(1), policy=policy, lingered=False) is None
    roster = proposed(*map(arrival, ALL), policy=policy, lingered=False)
    assert roster is not None
    assert roster.members == ALL


def test_a_round_that_one_worker_held_alone_is_lost_with_it_and_the_others_go_on() -> None:
    """Worker 2 has held the fifth round by itself, and died."""
    left_out = [arrival(worker, last=ALL, late_s=0.01) for worker in (0, 1)]
    alone = cadenza.shrink(commit_at=1, quorum=0.0)
    assert proposed(*left_out, policy=alone, held=5) is None, "as long as it lives it is waited for"
    roster = proposed(*left_out, policy=alone, held=5, silent={2})
    assert roster is not None
    assert (roster.members, roster.given_up) == ((0, 1), 5)
    for policy in (cadenza.shrink(quorum=0.0), cadenza.shrink(commit_at=0.6), cadenza.shrink()):
        with pytest.raises(RollbackError, match="5 rounds were held"):
            proposed(*left_out, policy=policy, held=5, silent={2})


@pytest.mark.parametrize("value", [0, 0.0, 1.0, -1, True, 2.5, "all"])
def test_what_is_no_number_of_workers_to_commit_at_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="commit_at is a share"):
        cadenza.shrink(commit_at=value)


def test_a_roster_whose_group_is_kept_does_not_grow_with_its_members() -> None:
    everybody = tuple(range(200))
    arrivals = [arrival(worker, last=everybody, groups=(group_name("round/4.0.0", everybody),)) for worker in everybody]
    roster = proposed(*arrivals, known=set(everybody))
    assert roster is not None
    assert roster.keep
    assert len(roster.pack()) < 500
    assert len(arrivals[0].pack()) < 500
    read = Roster.unpack(roster.pack(), known=replace(roster, leader=7, keep=""))
    assert read == replace(roster, turned_away={}, late={}, unreached={})


def test_a_kept_roster_means_nothing_to_a_process_that_was_not_on_it() -> None:
    roster = proposed(*(arrival(worker, groups=(group_name("round/4.0.0", ALL),)) for worker in ALL))
    assert roster is not None
    read = Roster.unpack(roster.pack())
    assert read.members == ALL
    with pytest.raises(RoundNotHeldError, match="an earlier process") as caught:
        obeyed(read, new(1))
    assert caught.value.behind
    mine = Roster.unpack(roster.pack(), known=replace(roster, keep=""))
    assert obeyed(mine, arrival(1)) is mine


def test_commit_at_is_a_share_of_the_weight() -> None:
    def held(weights: tuple[float, ...], here: tuple[int, ...]) -> bool:
        arrivals = {w: Arrival(w, "process", 5, "chain", "terms", last=(0, 1, 2, 3), weights=weights) for w in here}
        found = propose(
            {w: Arrival.unpack(arrival.pack()) for w, arrival in arrivals.items()},
            cadenza.shrink(commit_at=0.75, quorum=0.4),
            known={0, 1, 2, 3},
            silent=set(),
            gone=set(),
            workers=4,
            time_is_up=False,
            held=5,
        )
        return found is not None

    assert held((), (0, 1, 2))
    assert not held((), (0, 1))
    assert held((0.5, 0.3, 0.1, 0.1), (0, 1)), "two who count for four fifths are enough"
    assert not held((0.5, 0.1, 0.2, 0.2), (1, 2, 3)), "three who count for half are not"
    assert held((0.25, 0.25 + 1e-12, 0.25, 0.25 - 1e-12), (0, 2, 3)), "rounding does not decide"
    assert held((0.0, 0.0, 0.0, 0.0), (0, 1, 2)), "where nobody counted, all count alike"


@pytest.mark.parametrize("weights", [[1e308, 1e308], [1.0], [1.0, -1.0], [1.0, "1"], [1.0, float("nan")], [True, 1.0]])
def test_weights_that_cannot_be_are_not_understood(weights: list[Any]) -> None:
    text = json.dumps({**json.loads(Arrival(0, "p", 5, "c", "t", last=(0, 1)).pack()), "weights": weights})
    with pytest.raises(ValueError, match="weight"):
        Arrival.unpack(text)


@pytest.mark.parametrize("late_s", [-1.0, float("nan"), float("inf"), "1", None])
def test_an_arrival_that_would_spoil_a_roster_is_not_understood(late_s: Any) -> None:
    text = json.dumps({**json.loads(Arrival(0, "p", 5, "c", "t", last=(0, 1)).pack()), "late_s": late_s})
    with pytest.raises(ValueError, match="weights"):
        Arrival.unpack(text)


@pytest.mark.parametrize(
    ("options", "last", "lost"),
    [
        ({"commit_at": 1, "quorum": 0.0}, (0, 1, 2), True),
        ({"commit_at": 1, "quorum": 0.0}, (2,), True),
        ({"commit_at": 64, "quorum": 0.0}, tuple(range(256)), True),
        ({"commit_at": 2, "quorum": 0.0}, (0, 1, 2), False),
        ({"commit_at": 0.75}, (2,), False),
        ({}, (2,), False),
    ],
)
def test_a_round_that_only_the_dead_have_seen_is_given_up_where_half_may_hold_one(
    options: dict[str, Any], last: tuple[int, ...], lost: bool
) -> None:
    here = [arrival(worker, rounds=4, last=last) for worker in last]

    def hold() -> Roster | None:
        return proposed(*here, policy=cadenza.shrink(**options), known=set(last), held=5)

    if lost:
        roster = hold()
        assert roster is not None
        assert roster.given_up == 5
    else:
        with pytest.raises(RollbackError):
            hold()

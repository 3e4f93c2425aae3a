"""The header that precedes data, the words of a disagreement, and the vote that precedes a change."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from cadenza.engine.header import HEADER_BYTES, Header, Stance, disagreement
from cadenza.errors import DisagreementError, TransportError
from cadenza.participants.vote import Vote

DIGEST = bytes(range(16))


@given(st.integers(-(2**63), 2**63 - 1), st.binary(min_size=16, max_size=16), st.booleans())
@settings(deadline=None, derandomize=True)
def test_a_header_survives_the_wire_in_96_bytes(step: int, digest: bytes, able: bool) -> None:
    header = Header(step, digest, able)
    data = header.pack()
    assert len(data) == HEADER_BYTES == 96
    assert Header.unpack(data) == header


@pytest.mark.parametrize("data", [bytes(96), b"\xff" * 96, b"CDZ0" + Header(1, DIGEST, True).pack()[4:]])
def test_what_is_no_header_is_refused_with_the_likely_reason(data: bytes) -> None:
    with pytest.raises(DisagreementError, match=r"no Cadenza header.*same version"):
        Header.unpack(data)


@given(st.integers(0, 2**40), st.none() | st.text(), st.lists(st.text(), max_size=5), st.integers(0, 20))
@settings(deadline=None, derandomize=True)
def test_a_stance_survives_the_wire_and_padding(step: int, problem: str | None, lines: list[str], padding: int) -> None:
    stance = Stance(step, problem, lines)
    data = stance.pack()
    assert Stance.unpack(data.ljust(len(data) + padding)) == stance


def stance(*lines: str, step: int = 3, problem: str | None = None) -> Stance:
    return Stance(step, problem, list(lines))


def test_a_difference_is_told_with_both_sides_and_all_ranks() -> None:
    ours, theirs = stance("p0: (2,)", "p1: (5,)"), stance("p0: (2,)", "p1: (6,)")
    assert disagreement({0: ours, 4: theirs, 8: ours, 12: theirs}) == (
        "The ranks disagree on what to average. p1: (5,) on ranks 0, 8; p1: (6,) on ranks 4, 12. "
        "Pass the same parameters, in the same order, on every rank."
    )


def test_only_the_first_difference_is_told_and_the_others_are_counted() -> None:
    ours, theirs = stance("p0: (1,)", "p1: (2,)", "p2: (3,)"), stance("p0: (1,)", "p1: (4,)", "p2: (5,)")
    text = disagreement({0: ours, 1: theirs, 2: ours})
    assert "p1: (2,) on ranks 0, 2; p1: (4,) on rank 1." in text
    assert "2 parameters differ in all." in text
    assert "p2" not in text


def test_one_difference_is_not_counted() -> None:
    assert "in all" not in disagreement({0: stance("a", "b"), 1: stance("a", "c")})


def test_a_rank_with_fewer_parameters_is_told_where_it_has_nothing() -> None:
    text = disagreement({0: stance("a", "b"), 1: stance("a")})
    assert "b on rank 0; nothing at position 1 on rank 1" in text


def test_a_rank_with_no_parameters_at_all_is_told() -> None:
    assert "a on rank 0; nothing at position 0 on rank 1" in disagreement({0: stance("a"), 1: stance()})


def test_a_missing_gradient_comes_with_a_hint_to_zero_grad() -> None:
    text = disagreement({0: stance("p0: (2,), takes part"), 1: stance("p0: (2,), has no gradient")})
    assert "average before zero_grad()" in text


def test_without_a_missing_gradient_there_is_no_such_hint() -> None:
    assert "zero_grad" not in disagreement({0: stance("p0: (2,), takes part"), 1: stance("p0: (3,), takes part")})


def test_different_steps_are_told_before_anything_else_that_differs() -> None:
    assert disagreement({0: stance("a", step=4), 1: stance("b", step=5), 2: stance("a", step=4)}) == (
        "The ranks average at different steps: step 4 on ranks 0, 2; step 5 on rank 1. Call the averager once per "
        "step on every rank, and restore its step together with the model."
    )


def test_a_problem_is_told_first_with_the_ranks_that_have_it() -> None:
    text = disagreement(
        {
            0: stance("a", step=4),
            1: stance("b", step=5, problem="parameter 0 has dtype int64."),
            2: stance("b", problem="parameter 0 has dtype int64."),
            3: stance("b", problem="parameter 7 is on the meta device."),
        }
    )
    assert text == (
        "These parameters cannot be averaged. On ranks 1, 2: parameter 0 has dtype int64. "
        "On rank 3: parameter 7 is on the meta device."
    )


def test_equal_descriptions_with_different_digests_are_put_down_to_memory() -> None:
    text = disagreement({0: stance("a", "b"), 1: stance("a", "b")})
    assert "how the parameters lie in memory" in text
    assert "tied" in text


def test_the_text_is_the_same_whatever_the_rank_that_writes_it() -> None:
    stances = {rank: stance("a" if rank % 3 else "b", step=7) for rank in range(6)}
    wire = {rank: Stance.unpack(one.pack()) for rank, one in stances.items()}
    assert disagreement(stances) == disagreement(wire)


# --- the vote ---------------------------------------------------------------------------------------------------------


def gather(actions: Sequence[Callable[[], bool | None]]) -> list[bool | None]:
    """What each member's action returned; all of them run at once."""
    with ThreadPoolExecutor(len(actions)) as pool:
        return [future.result() for future in [pool.submit(action) for action in actions]]


def votes(store: dist.Store, members: int, timeout_s: float = 20.0, key: str = "round/1") -> list[Vote]:
    return [Vote(store, key, members=members, timeout_s=timeout_s) for _ in range(members)]


@pytest.mark.parametrize("members", [1, 2, 5])
def test_the_vote_commits_when_all_are_ready(members: int) -> None:
    store = dist.HashStore()
    assert gather([vote.ready for vote in votes(store, members)]) == [True] * members


def test_the_keys_of_a_vote_are_gone_once_all_have_read_it() -> None:
    store = dist.PrefixStore("group", dist.HashStore())
    for number in range(5):
        gather([vote.ready for vote in votes(store, 3, key=f"round/{number}")])
        assert store.num_keys() == 0


def test_an_abort_that_comes_first_is_obeyed_by_all() -> None:
    first, *others = votes(dist.HashStore(), 4)
    first.abort()
    assert gather([vote.ready for vote in others]) == [False] * 3


def test_an_abort_reaches_those_who_wait_already() -> None:
    first, *others = votes(dist.HashStore(), 4)

    def late_abort() -> None:
        time.sleep(0.1)
        first.abort()

    assert gather([late_abort, *(vote.ready for vote in others)]) == [None, False, False, False]


def test_an_abort_after_the_commit_changes_nothing() -> None:
    store = dist.HashStore()
    one, other = votes(store, 2)
    store.add("round/1/read", -1)  # somebody has not read yet, so that the verdict stays
    assert gather([one.ready, other.ready]) == [True, True]
    one.abort()
    assert bytes(store.get("round/1/verdict")) == b"commit"


def test_time_that_runs_out_aborts() -> None:
    store = dist.HashStore()
    present = votes(store, 3, timeout_s=0.05)[:2]
    assert gather([vote.ready for vote in present]) == [False, False]


def test_a_member_that_comes_after_the_time_was_up_obeys_the_abort() -> None:
    store = dist.HashStore()
    early, late = votes(store, 2, timeout_s=0.05)
    assert early.ready() is False
    assert late.ready() is False, "it completes the count, but abort stands already"
    assert store.num_keys() == 0


@pytest.mark.parametrize("seed", range(10))
def test_all_members_obey_one_verdict_whatever_their_order(seed: int) -> None:
    dice = random.Random(seed)
    store = dist.HashStore()
    members = votes(store, 6, timeout_s=0.2)
    willing = [dice.random() < 0.9 for _ in members]

    def member(vote: Vote, ready: bool, delay_s: float) -> Callable[[], bool | None]:
        def act() -> bool | None:
            time.sleep(delay_s)
            return vote.ready() if ready else vote.abort()

        return act

    delays = [dice.choice([0.0, 0.01, 0.3]) for _ in members]
    verdicts = gather([member(v, w, d) for v, w, d in zip(members, willing, delays, strict=True)])
    obeyed = {verdict for verdict in verdicts if verdict is not None}
    assert len(obeyed) <= 1
    assert obeyed != {True} or all(willing)


def test_votes_of_different_rounds_do_not_touch_each_other() -> None:
    store = dist.HashStore()
    votes(store, 2, key="round/1")[0].abort()
    assert gather([vote.ready for vote in votes(store, 2, key="round/2")]) == [True, True]


@pytest.fixture
def lost_store() -> dist.Store:
    """A client whose server is gone."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False)
    del server
    return client


def test_a_lost_store_is_an_error_that_says_what_is_known(lost_store: dist.Store) -> None:
    with pytest.raises(TransportError, match=r"store was lost.*another rank may"):
        Vote(lost_store, "round/1", members=2, timeout_s=0.1).ready()


def test_aborting_over_a_lost_store_is_silent(lost_store: dist.Store) -> None:
    Vote(lost_store, "round/1", members=2, timeout_s=0.1).abort()

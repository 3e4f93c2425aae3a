"""Life lines: who dies is known at once, long before a lease has run out; who only lost a line is not given up."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable

import pytest

from cadenza.errors import StoreLostError
from cadenza.participants import generation as generations
from cadenza.participants.membership import Membership, join
from cadenza.participants.store import serve

LONG_S = 3600.0  # a lease that does not run out in a test


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def two(port: int, lease_s: float) -> tuple[Membership, Membership]:
    """Two workers of one job that watch each other."""
    first, second = (join(f"127.0.0.1:{port}", worker=i, workers=2, lease_s=lease_s) for i in range(2))
    if lease_s == LONG_S:  # nobody beats by itself soon enough
        first.heartbeat._tick()
    until(lambda: (1, second.heartbeat.incarnation) in first.heartbeat._life.watched)
    return first, second


def test_a_line_that_ends_is_a_death_before_any_lease_has_run_out(store: int) -> None:
    first, second = two(store, LONG_S)
    second.heartbeat._life.close()  # as the kernel does when a process dies
    until(lambda: first.heartbeat.silent() == {1})
    assert first.heartbeat.gone() == set(), "it may come back: a majority is still counted with it"
    first.close()
    second.close()


def test_a_worker_that_only_lost_its_line_is_heard_again_and_connected_again(store: int) -> None:
    first, second = two(store, 0.5)
    first.heartbeat._line_ended(1, second.heartbeat.incarnation)
    assert first.heartbeat.silent() == {1}
    until(lambda: first.heartbeat.silent() == set())
    until(lambda: (1, second.heartbeat.incarnation) in first.heartbeat._life.watched)
    first.close()
    second.close()


def test_what_is_heard_of_an_earlier_process_says_nothing_of_the_present_one(store: int) -> None:
    first, second = two(store, 0.5)
    first.heartbeat._line_ended(1, "an earlier one")
    assert first.heartbeat.silent() == set()
    first.close()
    second.close()


def test_who_was_met_in_a_round_is_known_before_it_is_heard_and_given_up_like_others(store: int) -> None:
    """Rounds may be quicker than beats: a last one that waits for all must not miss whom it has met."""
    alone = join(f"127.0.0.1:{store}", worker=0, workers=2, lease_s=0.3)
    alone.heartbeat.note_met({0: (alone.heartbeat.incarnation, ""), 1: ("a process that never beats", "eu/a")})
    assert alone.heartbeat.known() == {0, 1}
    assert alone.heartbeat.sites()[1] == "eu/a"
    until(lambda: alone.heartbeat.silent() == {1})
    alone.close()


def test_who_was_met_before_it_was_heard_is_heard_by_its_next_beat(store: int) -> None:
    first, second = (join(f"127.0.0.1:{store}", worker=i, workers=2, lease_s=LONG_S) for i in range(2))
    first.heartbeat.note_met({1: (second.heartbeat.incarnation, "")})
    assert first.heartbeat.is_current(1, second.heartbeat.incarnation)
    first.heartbeat._tick()
    assert first.heartbeat._heard[1].last.started
    second.close()
    first.heartbeat._tick()
    assert first.heartbeat.gone() == {1}
    first.close()


def test_without_life_lines_there_is_the_lease(store: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no port is left")

    monkeypatch.setattr("cadenza.participants.heartbeat.LivenessSockets", refuse)
    first, second = (join(f"127.0.0.1:{store}", worker=i, workers=2, lease_s=0.3) for i in range(2))
    until(lambda: first.heartbeat.known() == {0, 1})
    second.heartbeat._ended.set()  # it beats no more
    until(lambda: first.heartbeat.silent() == {1})
    first.close()
    second.close()


def test_a_worker_that_starts_while_the_store_is_away_waits_for_it() -> None:
    first = serve(host="127.0.0.1")
    port = first.port
    del first
    gc.collect()
    found: list[Membership] = []
    starting = threading.Thread(target=lambda: found.append(join(f"127.0.0.1:{port}", worker=0, workers=1)))
    starting.start()
    time.sleep(0.3)
    assert not found
    store = serve(port, host="127.0.0.1")
    starting.join()
    found[0].close()
    del store


def test_a_store_that_does_not_come_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(StoreLostError, match=r"Nobody answered for 0 s.*python -m cadenza.membership"):
        join("127.0.0.1:1", worker=0, workers=1, wait_s=0)


def test_letting_a_group_go_does_not_search_all_memory(store: int) -> None:
    """A full collection takes tenths of a second beside torch, in each worker, at every change of membership."""
    membership = join(f"127.0.0.1:{store}", worker=0, workers=1)
    generation = generations.assemble(
        membership.connection(), membership.signer, place="here", members=[0], worker=0, timeout_s=10, missing=set
    )
    searched: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            searched.append(info["generation"])

    gc.callbacks.append(note)
    try:
        generation.close()
    finally:
        gc.callbacks.remove(note)
    assert 2 not in searched
    membership.close()

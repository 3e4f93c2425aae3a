"""Workers as threads: they train as processes do, end together, and tell what went wrong."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

import cadenza
from cadenza import Strategy, codecs
from cadenza.errors import DisagreementError, NotInitializedError, TransportError
from cadenza.testing import Worker, workers
from cadenza.testing import references as algorithms
from cadenza.testing.references import Workers
from cadenza.transports.group import current_group
from cadenza.transports.loopback import LoopbackGroup
from support.compare import same_bits
from support.models import CASES
from support.ranks import outcome
from support.training import Trace, momentum_sgd, one_number, train, values
from support.trajectories import PRESETS, assert_same_way

PAIRS, ALL = [[0, 1], [2, 3]], [[0, 1, 2, 3]]


def on_workers(count: int, strategy: Strategy, steps: int, **options: Any) -> list[Trace]:
    with workers(count) as pool:
        return pool.run(lambda _: train(strategy, steps, **options))


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_walks_the_way_of_its_reference(name: str, world: int) -> None:
    strategy, reference, bits = PRESETS[name]
    traces = on_workers(world, strategy, 10)
    assert_same_way(traces, reference(Workers(CASES["mlp"], world, momentum_sgd)), bits=bits)


def test_groups_of_ranks_walk_the_way_of_their_reference() -> None:
    traces = on_workers(4, cadenza.hierarchical({2: 2, 6: "all"}), 10)
    reference = algorithms.hierarchical(Workers(CASES["mlp"], 4, momentum_sgd), 10, levels={2: PAIRS, 6: ALL})
    assert_same_way(traces, reference, bits=False)


def test_workers_may_pretend_to_be_on_several_hosts() -> None:
    with workers(4, hosts=["north", "south", "north", "south"]) as pool:
        traces = pool.run(lambda _: train(cadenza.hierarchical({2: "host", 6: "all"}), 10))
    levels = {2: [[0, 2], [1, 3]], 6: ALL}
    reference = algorithms.hierarchical(Workers(CASES["mlp"], 4, momentum_sgd), 10, levels=levels)
    assert_same_way(traces, reference, bits=False)


@pytest.mark.parametrize(
    "strategy",
    [
        cadenza.diloco(4, codec=codecs.int8()),
        cadenza.streaming_diloco(4, layers=1, delay=2),
        cadenza.hierarchical({2: 2, 4: "all"}, codec=codecs.int8()),
    ],
    ids=["int8", "streaming", "staged"],
)
def test_two_runs_of_one_strategy_are_the_same_bits(strategy: Strategy) -> None:
    once, again = (on_workers(4, strategy, 9) for _ in range(2))
    for a, b in zip(once, again, strict=True):
        assert all(same_bits(x, y) for x, y in zip(a.history, b.history, strict=True))


def test_a_saved_worker_goes_on_where_it_was() -> None:
    def walk(worker: Worker, stop_at: int | None) -> float:
        model, sync, step = one_number(cadenza.diloco(2))
        for n in range(6):
            if n == stop_at:
                saved, kept = sync.state_dict(), values(model)
                sync.close()
                model, sync, step = one_number(cadenza.diloco(2))
                sync.load_state_dict(saved)
                model.x.data.copy_(kept)
            step(1.0 + worker.rank)
        sync.finish()
        return model.x.item()

    with workers(2) as pool:
        assert pool.run(walk, 3) == pool.run(walk, None)


@pytest.mark.parametrize("faults", [cadenza.faults.shrink(), cadenza.faults.skip_round()], ids=["shrink", "skip"])
def test_elastic_workers_meet_in_the_pools_store(faults: Any) -> None:
    def elastic(worker: Worker) -> tuple[Trace, tuple[int, ...]]:
        return train(cadenza.diloco(4, defaults="paper", faults=faults), 10, membership=worker.membership())

    with workers(3) as pool:
        for _ in range(2):  # a second run is another job in the same store
            traces = pool.run(elastic)
            reference = algorithms.diloco(Workers(CASES["mlp"], 3, momentum_sgd), 10, period=4)
            assert_same_way(traces, reference, bits=False)


def test_elastic_workers_go_on_without_one_that_left() -> None:
    strategy = cadenza.diloco(2, faults=cadenza.faults.shrink(min_workers=2))

    def leave_early(worker: Worker) -> tuple[int, ...]:
        _, sync, step = one_number(strategy, membership=worker.membership(lease_s=0.3))
        for _ in range(4):
            step(1.0)
        if worker.rank == 1:
            sync.close()
            return ()
        for _ in range(4):
            step(1.0)
        sync.finish()
        return sync.members

    with workers(3) as pool:
        assert pool.run(leave_early) == [(0, 2), (), (0, 2)]


def test_results_come_in_rank_order_and_each_worker_has_its_own_place() -> None:
    def place(worker: Worker, pause_s: float, *, word: str) -> tuple[Any, ...]:
        time.sleep(pause_s * (3 - worker.rank))
        assert current_group() is worker.group
        assert isinstance(worker.group, LoopbackGroup)
        return worker.rank, worker.workers, worker.group.rank, worker.group.ranks, word

    with workers(3) as pool:
        assert pool.run(place, 0.01, word="la") == [(rank, 3, rank, (0, 1, 2), "la") for rank in range(3)]
    assert current_group() is None


def test_a_workers_random_numbers_are_its_own_and_the_same_in_every_run() -> None:
    with workers(3) as pool:
        first, again = (pool.run(lambda worker: torch.rand(4, generator=worker.generator)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], first[1])


def test_a_group_can_be_given_by_name_too() -> None:
    def given(worker: Worker) -> float:
        model, sync, step = one_number(cadenza.local_sgd(1), process_group=worker.group)
        step(float(worker.rank))
        sync.finish()
        return model.x.item()

    with workers(2) as pool:
        assert pool.run(given) == [pytest.approx(0.95)] * 2


def wait_for_a_failed_one(worker: Worker, stage: str) -> None:
    if stage == "in attach" and worker.rank == 1:
        raise ZeroDivisionError("by worker 1")
    _, sync, step = one_number(cadenza.local_sgd(2, delay=1 if stage == "in flight" else 0))
    for n in range(4):
        if n == 2 and worker.rank == 1:
            raise ZeroDivisionError("by worker 1")
        step(1.0)
    sync.finish()


@pytest.mark.parametrize("stage", ["in attach", "in a round", "in flight"])
def test_the_first_error_is_raised_and_nobody_waits_for_the_one_that_failed(stage: str) -> None:
    started = time.monotonic()
    with workers(4, timeout_s=60) as pool, pytest.raises(ZeroDivisionError, match="by worker 1") as caught:
        pool.run(wait_for_a_failed_one, stage)
    assert time.monotonic() - started < 10
    first, *others = caught.value.__notes__
    assert "worker 1 of 4" in first
    assert sorted(note.split()[2] for note in others) == ["0", "2", "3"]
    assert all("Traceback" in note and "wait_for_a_failed_one" in note for note in others)


def test_a_pool_can_be_used_again_after_a_failure() -> None:
    with workers(2) as pool:
        with pytest.raises(ZeroDivisionError):
            pool.run(lambda worker: 1 // worker.rank)
        assert pool.run(lambda worker: worker.rank) == [0, 1]


def test_those_who_wait_for_one_that_returned_are_told_so() -> None:
    def leave(worker: Worker) -> tuple[Any, ...]:
        transport = worker.group.connect([0, 1])
        return () if worker.rank == 1 else outcome(transport.exchange(b"hello"))

    with workers(2, timeout_s=60) as pool:
        first, _ = pool.run(leave)
    assert first[:2] == ("error", "TransportError")
    assert "Rank 1 has ended" in first[2]


def test_a_worker_that_does_not_come_is_waited_for_until_the_timeout() -> None:
    ended = threading.Event()

    def stay_away(worker: Worker) -> None:
        if worker.rank == 1:
            ended.wait(20)
            return
        try:
            one_number(cadenza.local_sgd(2))
        finally:
            ended.set()

    with workers(2, timeout_s=0.3) as pool, pytest.raises(TransportError, match=r"within 0.3 s"):
        pool.run(stay_away)


def test_workers_that_differ_are_refused_alike() -> None:
    def differ(worker: Worker) -> tuple[Any, ...]:
        return outcome(one_number, cadenza.local_sgd(2 + worker.rank))

    with workers(3) as pool:
        first, *others = pool.run(differ)
    assert first[1] == DisagreementError.__name__
    assert all(other == first for other in others)


def test_no_thread_is_left_and_torch_has_its_threads_back() -> None:
    before, threads = torch.get_num_threads(), threading.active_count()
    torch.set_num_threads(2)
    try:
        with workers(3) as pool:
            assert pool.run(lambda _: torch.get_num_threads()) == [1, 1, 1]
            assert torch.get_num_threads() == 2
            pool.run(lambda _: train(cadenza.streaming_diloco(4, layers=1, delay=2), 6))
        deadline = time.monotonic() + 5
        while threading.active_count() > threads and time.monotonic() < deadline:
            time.sleep(0.01)  # a courier that was told to end does so by itself
        assert threading.active_count() == threads
    finally:
        torch.set_num_threads(before)


def test_an_interrupted_run_wakes_all_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    join, interrupted = threading.Thread.join, []

    def interrupt_once(thread: threading.Thread, timeout: float | None = None) -> None:
        if threading.current_thread() is threading.main_thread() and not interrupted:
            interrupted.append(thread)
            raise KeyboardInterrupt
        join(thread, timeout)

    monkeypatch.setattr(threading.Thread, "join", interrupt_once)
    started = time.monotonic()
    with workers(2, timeout_s=60) as pool, pytest.raises(KeyboardInterrupt):
        pool.run(lambda worker: worker.group.store.get("never"))
    assert time.monotonic() - started < 10


def test_outside_of_a_worker_there_is_no_group() -> None:
    with workers(1), pytest.raises(NotInitializedError):
        one_number(cadenza.local_sgd(2))


@pytest.mark.parametrize("count", [0, -1, True, 1.5])
def test_a_pool_has_a_whole_number_of_workers(count: Any) -> None:
    with pytest.raises(ValueError, match="whole number of workers"), workers(count):
        pass


def test_other_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(ValueError, match="positive number of seconds"), workers(2, timeout_s=0):
        pass
    with pytest.raises(ValueError, match="each of the 2 workers; got 1"), workers(2, hosts=["one"]):
        pass

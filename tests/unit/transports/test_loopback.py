"""The loopback transport where the contract does not look: strange interleavings, absence, members out of step."""

from __future__ import annotations

import random
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from cadenza.errors import TopologyError, TransportError
from cadenza.participants.vote import Vote
from cadenza.testing import Worker, workers
from cadenza.testing.transport_contract import average_buckets
from cadenza.transports import connect
from cadenza.transports.loopback import LoopbackHub, LoopbackTransport
from cadenza.transports.loopback_store import LoopbackStore
from support.compare import same_bits
from support.ranks import RankPool, outcome

CPU = torch.device("cpu")


def connected(worker: Worker) -> LoopbackTransport:
    transport = worker.group.connect(worker.group.ranks)
    assert isinstance(transport, LoopbackTransport)
    return transport


def stumble(worker: Worker, seed: int) -> list[float]:
    """Average, exchange and scatter with pauses of random length between all stages."""
    transport, pauses = connected(worker), random.Random(100 * seed + worker.rank)
    lanes, seen = transport.lanes(CPU), []
    for number in range(30):
        lane = lanes[number % len(lanes)]
        lane.outgoing(5, torch.float32).fill_(float(number * (worker.rank + 1)))
        time.sleep(pauses.choice([0, 0, 0.002]))
        lane.launch()
        replies = transport.exchange(bytes([number, worker.rank]))
        time.sleep(pauses.choice([0, 0, 0.002]))
        lane.combine()
        assert replies() == [bytes([number, rank]) for rank in range(worker.workers)]
        time.sleep(pauses.choice([0, 0, 0.002]))
        seen.append(lane.land()[4].item())
    return seen


@pytest.mark.parametrize("seed", range(4))
def test_no_order_of_the_threads_changes_a_result(seed: int) -> None:
    with workers(4) as pool:
        assert pool.run(stumble, seed) == [[2.5 * number for number in range(30)]] * 4


def test_what_a_member_does_with_its_result_does_not_reach_the_others() -> None:
    def spoil(worker: Worker) -> list[list[float]]:
        lane, seen = connected(worker).lanes(CPU)[0], []
        for _ in range(20):
            lane.outgoing(3, torch.float32).fill_(1.0 + worker.rank)
            lane.launch()
            lane.combine()
            mean = lane.land()
            seen.append(mean.tolist())
            mean.fill_(float("nan"))
        return seen

    with workers(2) as pool:
        assert pool.run(spoil) == [[[1.5] * 3] * 20] * 2


def random_means(transport: Any, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(transport.position)
    mine = torch.randn(70_001, generator=generator).mul_(3).to(dtype)
    return average_buckets(transport, [mine])[0]


def means_of_processes(dtype: torch.dtype) -> torch.Tensor:
    assert dist.group.WORLD is not None
    return random_means(connect(dist.group.WORLD), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mean_has_the_bits_it_has_over_shared_memory(ranks: RankPool, dtype: torch.dtype) -> None:
    with workers(3) as pool:
        threads = pool.run(lambda worker: random_means(connected(worker), dtype))
    processes = ranks.run(3, means_of_processes, dtype, env={"CADENZA_SHARED_MEMORY": "1"})
    assert all(same_bits(a, b) for a, b in zip(threads, processes, strict=True))


def test_members_that_are_out_of_step_are_told_where_each_is() -> None:
    def differ(worker: Worker) -> tuple[Any, ...]:
        transport = connected(worker)
        if worker.rank == 2:
            return outcome(average_buckets, transport, [torch.ones(3)])
        return outcome(transport.exchange(b"hello"))

    with workers(3) as pool:
        first, *others = pool.run(differ)
    assert first[:2] == ("error", "TransportError")
    assert "rank 1 at an exchange of 5 bytes and rank 2 at a mean of 3 values of torch.float32" in first[2]
    assert all(other == first for other in others)


def test_one_that_does_not_come_is_named_after_the_timeout() -> None:
    waited = threading.Barrier(3)

    def wait(worker: Worker) -> tuple[Any, ...]:
        transport = connected(worker)
        found = () if worker.rank == 0 else outcome(average_buckets, transport, [torch.ones(1)])
        waited.wait(20)  # nobody ends before, so only the timeout lets them go
        return found

    with workers(3, timeout_s=0.2) as pool:
        _, *others = pool.run(wait)
    assert others == [("error", "TransportError", "Rank 0 did not come to this averaging within 0.2 s.")] * 2


def test_a_transport_abandoned_by_another_thread_of_its_worker_stops_waiting() -> None:
    def abandon(worker: Worker) -> tuple[Any, ...]:
        transport = connected(worker)
        if worker.rank == 1:
            return outcome(transport.exchange(b"hello"))
        threading.Timer(0.1, transport.abandon).start()
        return outcome(lambda: [transport.exchange(b"hello")(), transport.exchange(b"again")()])

    with workers(2, timeout_s=60) as pool:
        first, second = pool.run(abandon)
    assert second == ("ok", [b"hello"] * 2)
    assert first[:2] == ("error", "TransportError")


def test_ranks_that_cannot_be_connected_are_refused() -> None:
    group = LoopbackHub(3, timeout_s=1.0).group(1)
    with pytest.raises(TopologyError, match=r"Ranks \[0, 2\] cannot be connected from rank 1"):
        group.connect([0, 2])
    with pytest.raises(TopologyError, match=r"among the group's ranks \[0, 1, 2\]"):
        group.connect([1, 3])
    with pytest.raises(ValueError, match="ranks 0 to 2; got 3"):
        LoopbackHub(3, timeout_s=1.0).group(3)
    with pytest.raises(ValueError, match="each of the 3 workers; got 1"):
        LoopbackHub(3, timeout_s=1.0, hosts=["one"])


def test_a_transport_that_one_member_has_dropped_already_is_still_the_same_for_the_next() -> None:
    hub = LoopbackHub(2, timeout_s=1.0)
    reply = hub.group(0).connect([0, 1]).exchange(b"early")
    assert hub.group(1).connect([1, 0]).exchange(b"later")() == [b"early", b"later"]
    assert reply() == [b"early", b"later"]


def test_votes_of_different_groups_do_not_meet_in_the_store() -> None:
    hub = LoopbackHub(2, timeout_s=1.0)
    both, alone = hub.group(0).connect([0, 1]), hub.group(0).connect([0])
    assert Vote(alone.store, "round/1", members=1, timeout_s=1.0).ready()
    assert not Vote(both.store, "round/1", members=2, timeout_s=0.01).ready()


class TestStore:
    def test_it_sets_gets_adds_and_deletes(self) -> None:
        store = LoopbackStore(timeout_s=0.01)
        store.set("a", b"1")
        store.append("a", "2")
        assert (store.get("a"), store.add("a", 3), store.check(["a"]), store.num_keys()) == (b"12", 15, True, 1)
        assert (store.delete_key("a"), store.delete_key("a"), store.check(["a"])) == (True, False, False)

    @pytest.mark.parametrize(
        ("found", "expected", "stands"),
        [(None, "", "new"), (None, "old", "old"), ("old", "old", "new"), ("x", "", "x")],
    )
    def test_it_compares_as_torchs_store_does(self, found: str | None, expected: str, stands: str) -> None:
        for store in (LoopbackStore(timeout_s=1.0), dist.HashStore()):
            if found is not None:
                store.set("key", found)
            assert bytes(store.compare_set("key", expected, "new")) == stands.encode()

    def test_waiting_ends_with_the_key_the_timeout_or_a_failure(self) -> None:
        store = LoopbackStore(timeout_s=60)
        threading.Timer(0.05, lambda: store.set("soon", "here")).start()
        store.wait(["soon"])
        with pytest.raises(TransportError, match=r"no 'never'. Nobody set it within 0.01 s"):
            store.wait(["soon", "never"], timedelta(seconds=0.01))
        threading.Timer(0.05, lambda: store.fail("Worker 3 failed.")).start()
        with pytest.raises(TransportError, match="Worker 3 failed"):
            store.part("view").get("never")
        assert store.get("soon") == b"here", "what is there can still be read"

    def test_counting_from_many_threads_loses_nothing(self) -> None:
        def count(worker: Worker) -> None:
            for _ in range(200):
                worker.group.store.add("count", 1)

        hub_store = []
        with workers(4) as pool:
            pool.run(lambda worker: (count(worker), hub_store.append(worker.group.store)))
        assert hub_store[0].get("count") == b"800"

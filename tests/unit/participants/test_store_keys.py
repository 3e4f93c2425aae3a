"""What workers leave in the store does not grow, however many of them die."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

import cadenza
from cadenza.errors import RoundError
from cadenza.participants.beat import Beat, beat_key
from cadenza.participants.membership import join
from cadenza.participants.signed_store import SignedStore
from cadenza.participants.signing import Signer
from cadenza.participants.store import serve
from cadenza.participants.vote import Vote
from cadenza.participants.worker_index import WorkerIndex
from cadenza.testing import Worker, workers
from cadenza.transports.faulty import FaultyTransport


def test_a_worker_that_comes_again_and_again_has_one_entry() -> None:
    server = serve(host="127.0.0.1")
    counts = []
    for _ in range(5):
        join(f"127.0.0.1:{server.port}", worker=3, workers=4).close()
        counts.append(server.num_keys())
    assert len(set(counts)) == 1


def test_the_entry_of_a_worker_that_was_silent_for_long_is_deleted() -> None:
    signer = Signer("job", secret=None)
    store = SignedStore(dist.HashStore(), signer)
    store.set(beat_key(1), Beat(1, "a", 1).pack())
    index = WorkerIndex(signer)
    assert index.update(store, {0, 1}, set()) == {0, 1}
    assert index.update(store, {0}, {1}) == {0}
    assert not store.check([beat_key(1)])


def train(worker: Worker, model: torch.nn.Module, counts: list[int], server: dist.TCPStore) -> None:
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    membership = join(f"127.0.0.1:{server.port}", worker=worker.rank, workers=2, lease_s=2.0)
    faults = cadenza.shrink(grace_s=20.0, first_s=60.0, quorum=0.0)
    sync = cadenza.attach(model, optimizer, cadenza.diloco(period=1, faults=faults), membership=membership)
    while sync.clock < 24:
        if worker.rank and sync.clock == 12:
            sync.close()  # as if it had died: the other one has led only some of the rounds so far
            return
        model(torch.ones(1, 2)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        sync.step()
        if not worker.rank:
            counts.append(server.num_keys())
    sync.finish()


def test_the_keys_of_rounds_do_not_grow_whoever_held_them() -> None:
    server, counts = serve(host="127.0.0.1"), list[int]()
    with workers(2, timeout_s=120.0) as pool:
        pool.run(train, torch.nn.Linear(2, 1), counts, server)
    assert max(counts[8:]) <= max(counts[:8]) + 2


def fail_at_the_end(worker: Worker, model: torch.nn.Module) -> bool:
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    sync = cadenza.attach(model, optimizer, cadenza.diloco(period=1))
    sync.step()
    outermost = sync.replica.participants.levels[-1]
    outermost.transport = FaultyTransport(outermost.transport, fail_at="exchange")
    with pytest.raises(RoundError, match="round at step 1 failed"):
        sync.finish()
    return True


def test_a_transport_that_fails_after_the_last_round_is_a_round_error_too() -> None:
    with workers(2) as pool:
        assert pool.run(fail_at_the_end, torch.nn.Linear(2, 1)) == [True, True]


def test_of_many_members_one_counts_the_votes_for_all() -> None:
    below, signer = dist.HashStore(), Signer("job", secret="word")
    stores = [SignedStore(below, signer, who=f"{worker} token") for worker in range(3)]
    votes = [
        Vote(store, "round/1/vote", members=3, timeout_s=10.0, counts=worker == 1)
        for worker, store in enumerate(stores)
    ]
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(lambda vote: vote.ready(lambda: False), votes)) == [True] * 3
    late = [Vote(store, "round/2/vote", members=3, timeout_s=0.1, counts=False) for store in stores[:2]]
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda vote: vote.ready(lambda: False), late)) == [False] * 2, "nobody counts"

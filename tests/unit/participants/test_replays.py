"""Somebody has recorded what an earlier run of the job wrote, and writes it again: it bears the right secret."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import cadenza
from cadenza.errors import TransportError
from cadenza.participants.assembly import Assembly
from cadenza.participants.ending import FINISHED
from cadenza.participants.membership import join
from cadenza.participants.roster import Arrival, Roster
from cadenza.participants.round_id import RoundId
from cadenza.participants.signing import Signer
from cadenza.participants.sites import Scope
from cadenza.testing import Worker, WorkerPool, workers

VERDICT, READY = "round/10.0.0/vote/verdict", "round/10.0.0/vote/ready"

Begun = Callable[[Worker, cadenza.Synchronizer], None]


def train(worker: Worker, begun: Begun) -> dict[str, Any]:
    """Train 20 steps with a round after every fifth; return what can be compared."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    membership = worker.membership(job="mine", secret="word", lease_s=1.0)
    told: list[cadenza.RoundReport] = []
    strategy = cadenza.diloco(period=5, faults=cadenza.shrink(grace_s=10.0, first_s=30.0))
    sync = cadenza.attach(model, optimizer, strategy, membership=membership, observers=[told.append])
    begun(worker, sync)
    while sync.clock < 20:
        model(torch.randn(4, 2, generator=worker.generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        sync.step()
        if sync.clock == 10:
            time.sleep(0.1)  # so that whoever looks every millisecond sees what is there
    sync.finish()
    rounds = [report.step for report in told if report.kind == "round"]
    return {"rounds": rounds, "weight": model.weight.detach().clone(), "ignored": membership.signer.ignored}


def place_of(pool: WorkerPool) -> dist.Store:
    """Where the job's entries are, for somebody who reaches the port and has no secret."""
    assert pool._store is not None
    client = dist.TCPStore("127.0.0.1", pool._store.port, None, False, timeout=timedelta(seconds=1))
    return dist.PrefixStore(f"cadenza/mine/{Signer('mine', secret='word').space}", client)


@pytest.fixture(scope="module")
def recorded() -> dict[str, bytes]:
    """What a whole run has left, and what it wrote into the store at one of its rounds."""
    found: dict[str, bytes] = {}
    over = threading.Event()

    def watch(place: dist.Store) -> None:
        while not over.wait(0.001):
            for key in (VERDICT, READY):
                if place.check([key]):
                    with suppress(dist.DistStoreError):  # it was deleted in between
                        found[key] = place.get(key)

    with workers(2, timeout_s=60.0) as pool:
        watching = threading.Thread(target=lambda: watch(place_of(pool)), daemon=True)

        def begun(worker: Worker, sync: cadenza.Synchronizer) -> None:
            if worker.rank == 0:
                watching.start()

        pool.run(train, begun)
        over.set()
        watching.join()  # while there is a store
        found[FINISHED] = place_of(pool).get(FINISHED)
    assert found.keys() == {VERDICT, READY, FINISHED}
    return found


def run_again(recorded: dict[str, bytes], *keys: str, begun: Begun = lambda worker, sync: None) -> list[dict[str, Any]]:
    """Train under the same name and secret, in a new store into which somebody has written what he recorded."""
    with workers(2, timeout_s=60.0) as pool:

        def written(worker: Worker, sync: cadenza.Synchronizer) -> None:
            begun(worker, sync)
            for key in keys if worker.rank == 0 else ():
                place_of(pool).set(key, recorded[key])

        return pool.run(train, written)


def test_the_end_of_an_earlier_run_ends_nobody(recorded: dict[str, bytes]) -> None:
    found = run_again(recorded, FINISHED)
    assert [one["rounds"] for one in found] == [[5, 10, 15, 20]] * 2
    assert torch.equal(found[0]["weight"], found[1]["weight"])
    assert any(one["ignored"] for one in found)


@pytest.mark.parametrize("keys", [(VERDICT,), (READY,)])
def test_an_earlier_vote_does_not_commit_a_round_that_fails_now(
    recorded: dict[str, bytes], keys: tuple[str, ...]
) -> None:
    def begun(worker: Worker, sync: cadenza.Synchronizer) -> None:
        if worker.rank == 0:
            return
        participants: Any = sync.replica.participants
        agree = participants.agree

        def failing(round: RoundId, exchange: Callable[[], object]) -> object:
            def lost() -> object:
                result = exchange()
                if round.step == 10:
                    time.sleep(0.2)
                    raise TransportError("The line broke when the others had everything.")
                return result

            return agree(round, lost)

        participants.agree = failing

    found = run_again(recorded, *keys, begun=begun)
    assert [one["rounds"] for one in found] == [[5, 15, 20]] * 2, "on both, or on none"
    assert torch.equal(found[0]["weight"], found[1]["weight"])


def test_a_short_roster_names_the_processes_that_it_means() -> None:
    def roster(run: str) -> Roster:
        return Roster((0, 1), (f"{run}0", f"{run}1"), leader=0, keep="5.0.0 of 0-1", again=True, sites=("", ""))

    earlier, known = roster("a"), roster("b")
    assert Roster.unpack(known.pack(), known).incarnations == known.incarnations
    assert Roster.unpack(earlier.pack(), known).incarnations == ("", ""), "its members were other processes"


def test_an_arrival_of_an_earlier_process_or_of_long_ago_hides_nobody(
    store: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    membership = join(f"127.0.0.1:{store}", worker=0, workers=2, job="mine", secret="word")
    try:
        connection, heartbeat, signer = membership.connection(), membership.heartbeat, membership.signer
        me = Arrival(0, heartbeat.incarnation, 4, "c", "t", last=(0, 1))
        assembly = Assembly(connection, heartbeat, signer, RoundId(5), me, scope=Scope(0))
        other = Arrival(7, "never heard of", 400, "d", "t", last=(7, 8))
        now = time.time()
        with monkeypatch.context() as patched:
            patched.setattr(time, "time", lambda: now - 3600)
            connection.call(lambda store: assembly.sign(store, other))
        for arrival in (me, Arrival(0, "an earlier process", 400, "d", "t", last=(0, 1))):
            connection.call(lambda store, one=arrival: assembly.sign(store, one))  # type: ignore[misc]
        assert {w: one.incarnation for w, one in connection.call(assembly._arrivals).items()} == {0: me.incarnation}
        assert signer.ignored == 1
    finally:
        membership.close()

"""A group is made without waiting for those who are gone or out of reach, and everyone learns who that was."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

import cadenza
from cadenza.errors import CadenzaError, TransportError
from cadenza.participants import forming, liveness
from cadenza.participants.forming import Forming, UnreachedError
from cadenza.participants.group_store import GroupStore
from cadenza.participants.membership import Membership
from cadenza.participants.signed_store import SignedStore
from cadenza.participants.signing import Signer
from cadenza.testing import Worker, workers
from cadenza.transports.c10d import Seat
from support.faults import build, take_step

ALL = (0, 1, 2)


class Members:
    """Members that make a group at once, on threads."""

    def __init__(self) -> None:
        self.below = dist.HashStore()
        self.signer = Signer("job", secret="word")
        self.gone: set[int] = set()
        self.cut_off: set[int] = set()
        self.results: dict[int, Any] = {}

    def store(self, worker: int) -> SignedStore:
        return SignedStore(self.below, self.signer, who=f"{worker} token")

    def form(self, worker: int) -> None:
        seat = Seat(ALL, ALL.index(worker), self.below, 60.0)

        def reach(asked: set[int]) -> set[int]:
            return asked if worker in self.cut_off else asked & self.cut_off

        one = Forming(self.store(worker), "round/5.0.0", seat, missing=lambda: self.gone, reach=reach)
        try:
            self.results[worker] = one.form()
        except CadenzaError as error:
            self.results[worker] = error

    def run(self, *who: int) -> dict[int, Any]:
        threads = [threading.Thread(target=self.form, args=(worker,), daemon=True) for worker in who]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        return self.results


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave Gloo 5 s to connect, where a machine that is busy with other tests may take more than its 2 s."""
    monkeypatch.setattr(forming, "FORMING_S", 25.0)


@pytest.mark.usefixtures("unhurried")
def test_all_members_get_the_group_and_addresses_are_signed() -> None:
    members = Members()
    stranger = members.below
    stranger.set("round/5.0.0/group/0/0", b"an address elsewhere")
    found = members.run(*ALL)
    assert all(isinstance(group, dist.ProcessGroup) for group in found.values())
    assert GroupStore(members.store(0), "round/5.0.0/group").get("0/1")
    assert b" " in stranger.get("round/5.0.0/group/0/1"), "a signature, and the address"


def test_nobody_waits_for_a_member_that_dies_while_they_connect() -> None:
    members = Members()

    def tell_an_address_and_die() -> None:
        addresses = GroupStore(members.store(2), "round/5.0.0/group")
        addresses.set("0/2", addresses.get("0/0"))  # any will do: Gloo waits for worker 2 to connect
        time.sleep(0.3)
        members.gone.add(2)

    threading.Thread(target=tell_an_address_and_die, daemon=True).start()
    began = time.monotonic()
    found = members.run(0, 1)
    assert {type(found[worker]) for worker in (0, 1)} == {TransportError}
    assert "worker 2 died" in str(found[0]).lower()
    assert time.monotonic() - began < forming.FORMING_S / 2, "Gloo itself waits for longer"


def test_members_report_whom_they_could_not_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    members = Members()
    members.cut_off = {2}
    monkeypatch.setattr(forming, "_DOUBT_S", 0.2)
    found = members.run(0, 1)
    assert [found[worker].workers for worker in (0, 1)] == [{2}, {2}]
    assert isinstance(found[0], UnreachedError)
    assert "GLOO_SOCKET_IFNAME" in str(found[0])


@pytest.mark.usefixtures("unhurried")
def test_an_address_that_somebody_deletes_is_written_again() -> None:
    members = Members()
    first = threading.Thread(target=members.form, args=(0,), daemon=True)
    first.start()
    while not GroupStore(members.store(1), "round/5.0.0/group").get("0/0"):
        time.sleep(0.01)
    members.below.delete_key("round/5.0.0/group/0/0")
    found = members.run(1, 2)
    first.join(30)
    assert found.keys() == set(ALL)
    assert all(isinstance(group, dist.ProcessGroup) for group in found.values()), found


def test_nobody_is_blamed_for_an_address_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody who deletes it would else have workers left out that everybody can reach."""
    members = Members()
    monkeypatch.setattr(forming, "FORMING_S", 0.5)
    found = members.run(0, 1)
    assert {type(found[worker]) for worker in (0, 1)} == {TransportError}


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A port at which nobody listens, and nobody will."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


def test_a_worker_out_of_reach_is_left_out_and_the_others_go_on(
    closed_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Worker 2 beats and comes to rounds, but nobody can connect to it: as behind a NAT."""
    monkeypatch.setattr(liveness, "_AGAIN_S", 0.3)
    told = liveness._told
    first = threading.Event()
    joined: dict[int, Membership] = {}

    def elsewhere(host: str, port: int) -> str:
        return told(host, closed_port if threading.current_thread().name == "cadenza worker 2" else port)

    monkeypatch.setattr(liveness, "_told", elsewhere)
    strategy = cadenza.diloco(period=5, faults=cadenza.shrink(grace_s=3.0, first_s=20.0))

    def run(worker: Worker) -> list[Any]:
        model, optimizer = build(worker.rank)
        if worker.rank == 2:
            first.wait(20)
        membership = joined[worker.rank] = worker.membership(workers=2, lease_s=0.6)
        if worker.rank == 2:
            while not all(2 in joined[other].heartbeat.unreached() for other in (0, 1)):
                time.sleep(0.05)
        elif len(joined) == 2:
            first.set()
        reports: list[Any] = []
        try:
            sync = cadenza.attach(model, optimizer, strategy, membership=membership, observers=[reports.append])
        except CadenzaError as error:
            return [str(error)]
        while sync.clock < 60:
            take_step(model, optimizer, worker.rank, sync.clock)
            time.sleep(0.04)
            sync.step()
        sync.finish()
        return reports

    with workers(3) as pool:
        first_told, second_told, third_told = pool.run(run)
    assert {report.kind for report in (*first_told, *second_told)} == {"round"}
    assert {report.participants for report in first_told} == {(0, 1)}
    assert "came too late" in third_told[0]

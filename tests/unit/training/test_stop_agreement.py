"""Elastic workers stop at one step if they can, and never wait long for those who do not answer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

import cadenza
from cadenza.participants.membership import Membership
from cadenza.participants.store import serve
from cadenza.training import stop_agreement
from cadenza.training.connections import DirectConnection
from cadenza.training.stop_agreement import StopAgreement
from cadenza.training.stopping import Stopper


@pytest.fixture
def two() -> Iterator[list[Membership]]:
    store = serve(host="127.0.0.1")
    members = [cadenza.join(f"127.0.0.1:{store.port}", worker=w, workers=2, lease_s=0.3) for w in range(2)]
    yield members
    for member in members:
        member.close()


def stopper_of(member: Membership, **options: bool) -> Stopper:
    agreement = StopAgreement(
        member.connection(),
        member.connection(),
        expected=lambda: {0, 1} - member.heartbeat.silent(),
        all_must_answer=False,
    )
    return Stopper(agreement, worker=member.worker, **options)


def test_all_stop_after_the_largest_step_that_one_has_begun(two: list[Membership]) -> None:
    ahead, behind = (stopper_of(member) for member in two)
    assert all(ahead.may_begin(step) for step in range(1, 8))
    assert behind.may_begin(1)
    ahead.request()
    behind._freeze()  # as its thread does when it hears
    assert [behind.may_begin(step) for step in (2, 7, 8)] == [True, True, False]
    assert not ahead.may_begin(8)


def test_one_that_does_not_answer_is_not_waited_for_long(
    two: list[Membership], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stop_agreement, "_ANSWER_S", 0.2)
    stopper = stopper_of(two[0])
    assert stopper.may_begin(5)
    stopper.request()
    assert not stopper.may_begin(6)
    assert stopper.target == 5


def test_one_that_leaves_asks_nobody(two: list[Membership]) -> None:
    leaving, staying = stopper_of(two[0], leaves_on_sigterm=True), stopper_of(two[1])
    assert leaving.may_begin(3)
    leaving.leave()
    assert leaving.left
    assert not leaving.may_begin(4)
    assert not staying._agreement.is_asked()


def test_without_a_store_each_stops_where_it_is() -> None:
    store = serve(host="127.0.0.1")
    member = cadenza.join(f"127.0.0.1:{store.port}", worker=0, workers=1, lease_s=0.3)
    stopper = stopper_of(member)
    del store
    assert stopper.may_begin(4)
    stopper.request()
    assert not stopper.may_begin(5)
    assert stopper.target == 4
    member.close()


def test_a_process_group_waits_for_all_as_before() -> None:
    store = DirectConnection(dist.HashStore())
    stopper = Stopper(StopAgreement(store, store, expected=lambda: {0}, all_must_answer=True), worker=0)
    assert stopper.may_begin(1)
    stopper.request()
    assert not stopper.may_begin(2)

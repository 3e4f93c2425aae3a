"""A worker's place in a job: it is taken once, by one synchronizer, and under a number and a secret that are some."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest
import torch

import cadenza
from cadenza.errors import NotInitializedError, TopologyError, UsageError
from cadenza.participants.membership import join
from cadenza.testing import Worker, workers


def attach_again(worker: Worker) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    strategy, membership = cadenza.diloco(2, faults=cadenza.shrink()), worker.membership()
    cadenza.attach(model, optimizer, strategy, membership=membership).close()
    with pytest.raises(NotInitializedError, match=r"membership has ended.*cadenza\.join"):
        cadenza.attach(model, optimizer, strategy, membership=membership)


def test_a_membership_that_has_ended_is_refused_and_nobody_is_waited_for() -> None:
    with workers(1) as pool:
        pool.run(attach_again)


@pytest.mark.parametrize("given", [1.5, True, "x", "", "1.0", None])
@pytest.mark.parametrize("name", ["worker", "workers"])
def test_what_is_no_number_of_a_worker_is_refused_and_not_rounded(
    monkeypatch: pytest.MonkeyPatch, name: str, given: Any
) -> None:
    for variable in ("CADENZA_WORKER", "CADENZA_WORKERS"):
        monkeypatch.setenv(variable, "x")
    with pytest.raises(ValueError, match=rf"^{name} is a whole number of at least \d; got "):
        cadenza.join("127.0.0.1:1", **{"worker": 0, "workers": 1, name: given})


@pytest.mark.parametrize("secret", ["", " \n"])
def test_an_empty_secret_is_not_taken_for_one(monkeypatch: pytest.MonkeyPatch, secret: str) -> None:
    with pytest.raises(ValueError, match="The secret is empty"):
        cadenza.join("127.0.0.1:1", worker=0, workers=1, secret=secret)
    monkeypatch.setenv("CADENZA_SECRET", secret)
    with pytest.raises(ValueError, match="The secret is empty"):
        cadenza.join("127.0.0.1:1", worker=0, workers=1)


@pytest.mark.parametrize("seconds", [-1.0, math.nan])
def test_a_store_is_not_waited_for_without_end_by_mistake(seconds: float) -> None:
    with pytest.raises(ValueError, match="wait_s is a number of seconds"):
        cadenza.join("127.0.0.1:1", worker=0, workers=1, wait_s=seconds)


def test_an_attach_that_fails_leaves_nobody_behind_to_be_waited_for(
    store: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CADENZA_STORE", f"127.0.0.1:{store}")
    monkeypatch.setenv("CADENZA_SITE", "eu")  # and the strategy has one level
    other = join(worker=1, workers=2, site="")
    given = join(worker=2, workers=2)
    model = torch.nn.Linear(2, 1)
    optimizer, strategy = torch.optim.SGD(model.parameters(), lr=0.1), cadenza.diloco(period=2, faults=cadenza.shrink())
    try:
        for number, membership in (("0", None), ("2", given)):
            monkeypatch.setenv("CADENZA_WORKER", number)
            monkeypatch.setenv("CADENZA_WORKERS", "2")
            with pytest.raises(TopologyError):
                cadenza.attach(model, optimizer, strategy, membership=membership)
        assert given.closed
        deadline = time.monotonic() + 20
        while not other.heartbeat.gone() >= {0, 2} and time.monotonic() < deadline:
            time.sleep(0.02)
        assert other.heartbeat.gone() == {0, 2}
    finally:
        other.close()


def test_a_membership_is_for_one_model(store: int) -> None:
    membership = join(f"127.0.0.1:{store}", worker=0, workers=1)
    first, second = torch.nn.Linear(2, 1), torch.nn.Linear(3, 1)
    strategy = cadenza.diloco(period=2, faults=cadenza.shrink())
    sync = cadenza.attach(first, torch.optim.SGD(first.parameters(), lr=0.1), strategy, membership=membership)
    try:
        with pytest.raises(UsageError, match=r"another synchronizer.*join\(job="):
            cadenza.attach(second, torch.optim.SGD(second.parameters(), lr=0.1), strategy, membership=membership)
        assert not membership.closed
        sync.step()
        sync.step()
        assert sync.replica.participants.held == 1
    finally:
        sync.close()

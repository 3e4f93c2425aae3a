"""A worker's place in a job: it is taken once, by one synchronizer, and under a number and a secret that are some."""

from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import cadenza
from cadenza.errors import (
    DisagreementError,
    NotInitializedError,
    ReplicaBrokenError,
    StoreLostError,
    TopologyError,
    UsageError,
)
from cadenza.participants import membership
from cadenza.participants.heartbeat import Heartbeat
from cadenza.participants.island import Island
from cadenza.participants.join_arguments import accepts_rollback
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


NO_UTF8 = b"caf\xe9".decode(errors="surrogateescape")  # as os.environ has it


@pytest.mark.parametrize(
    ("name", "said"), [("CADENZA_JOB", r"got 'caf\\udce9'.*CADENZA_JOB"), ("CADENZA_SECRET", "no UTF-8")]
)
def test_a_name_or_a_secret_in_another_encoding_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, said: str
) -> None:
    monkeypatch.setenv(name, NO_UTF8)
    with pytest.raises(UsageError, match=said) as caught:
        cadenza.join("127.0.0.1:1", worker=0, workers=1, wait_s=0)
    assert name == "CADENZA_JOB" or "caf" not in str(caught.value), "nobody reads the secret in a log"


@pytest.mark.parametrize(
    ("said", "addresses"),
    [
        ('address of a store is "host:port"', ["127.0.0.1:²", "[]:29400", ":29400", "29400", "127.0.0.1:-1"]),
        ("port of a store is a number from 1 to 65535", ["127.0.0.1:99999", "127.0.0.1:0", "127.0.0.1:" + "9" * 5000]),
        ("host of a store has a name of parts", ["x" * 64 + ".org:1", "a..b:1", "a\0b:1", f"{NO_UTF8}:1"]),
    ],
)
def test_what_cannot_be_the_address_of_a_store_is_refused_at_once(said: str, addresses: list[str]) -> None:
    for address in addresses:
        with pytest.raises(ValueError, match=f"^The {said}.*; got ") as caught:
            cadenza.join(address, worker=0, workers=1, wait_s=0)
        assert repr(address) in str(caught.value)


@pytest.mark.parametrize(
    ("word", "accepts"),
    [
        *[(word, True) for word in ("1", "true", "Yes")],
        *[(word, False) for word in ("0", "false", "NO", "")],
        *[(word, None) for word in ("on", "2", "y e s")],
    ],
)
def test_a_rollback_is_accepted_by_a_word_that_says_so_and_other_words_are_refused(
    monkeypatch: pytest.MonkeyPatch, word: str, accepts: bool | None
) -> None:
    monkeypatch.setenv("CADENZA_ACCEPT_ROLLBACK", word)
    if accepts is not None:
        assert accepts_rollback() is accepts
        assert accepts_rollback(not accepts) is not accepts, "an argument counts for more"
        return
    with pytest.raises(UsageError, match='CADENZA_ACCEPT_ROLLBACK is "1", "true" or "yes"'):
        cadenza.join("127.0.0.1:1", worker=0, workers=1, wait_s=0)


def test_more_workers_than_there_can_be_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CADENZA_WORKERS", "99999999999")
    with pytest.raises(ValueError, match="workers is how many start together, at most 65536; got '99999999999'"):
        cadenza.join("127.0.0.1:1", worker=0, wait_s=0)


def test_a_membership_that_cannot_begin_leaves_no_thread_behind(store: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(heartbeat: Heartbeat) -> None:
        exchange(heartbeat)  # the connections are there
        raise TypeError("of another kind")

    exchange = Heartbeat._tick
    monkeypatch.setattr(Heartbeat, "_tick", fail)
    before = set(threading.enumerate())
    with pytest.raises(TypeError, match="of another kind"):
        cadenza.join(f"127.0.0.1:{store}", worker=0, workers=1)
    for thread in set(threading.enumerate()) - before:
        thread.join(30)
        assert not thread.is_alive(), thread.name


def islands(ranks: int) -> list[Island]:
    """A replica whose ranks are threads."""
    pairs = [[socket.socketpair() for _ in range(3)] for _ in range(ranks - 1)]
    first = Island(range(ranks), 0, [[pair[kind][0] for pair in pairs] for kind in range(3)])
    others = [Island(range(ranks), n, [[one[1]] for one in pair]) for n, pair in enumerate(pairs, start=1)]
    return [first, *others]


@pytest.mark.parametrize(
    ("name", "other", "said"),
    [
        ("worker", 1, "worker is 0 on ranks 0 2, 1 on rank 1"),
        ("workers", 3, "workers is 2 on ranks 0 2, 3 on rank 1"),
        ("job", "its own", "job is 'job' on ranks 0 2, 'its own' on rank 1"),
        ("site", "us", "site is 'eu' on ranks 0 2, 'us' on rank 1"),
        ("lease_s", 2.5, "lease_s is 1.0 on ranks 0 2, 2.5 on rank 1"),
        ("secret", "another", "secret is not the same on all"),
        ("secret", None, "secret is not the same on all"),
    ],
)
def test_mates_that_do_not_join_as_one_worker_are_told_so(
    monkeypatch: pytest.MonkeyPatch, name: str, other: object, said: str
) -> None:
    def join(island: Island, given: Mapping[str, Any]) -> None:
        try:
            cadenza.join("127.0.0.1:1", replica=island, **given)  # type: ignore[arg-type]
        except Exception as error:
            errors.append(error)

    monkeypatch.setattr(membership, "meet_mates", lambda island, **_: island)
    errors: list[Exception] = []
    same = {"worker": 0, "workers": 2, "job": "job", "site": "eu", "lease_s": 1, "secret": "our word", "wait_s": 0.0}
    made = islands(3)
    threads = [
        threading.Thread(target=join, args=(island, {**same, name: other} if island.rank == 1 else same))
        for island in made
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [type(error) for error in errors] == [DisagreementError] * 3, errors
    assert {str(error) for error in errors} == {
        f"The ranks of this replica do not join as one worker: {said}. Give cadenza.join the same arguments, or the "
        "same environment, on all ranks of a replica."
    }
    assert "our word" not in str(errors[0])


def test_mates_that_agree_go_on_to_the_store_and_end_together_if_there_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(membership, "meet_mates", lambda island, **_: island)
    made = islands(4)
    with ThreadPoolExecutor(4) as pool:
        joined = [pool.submit(cadenza.join, "127.0.0.1:1", worker=0, workers=1, replica=i, wait_s=0.0) for i in made]  # type: ignore[arg-type]
    for one in joined:
        with pytest.raises(StoreLostError, match="Nobody answered for 0 s"):
            one.result()
    for island in made:
        with pytest.raises(ReplicaBrokenError):
            island.loop.exchange("")

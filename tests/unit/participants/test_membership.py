"""A worker's place in a job: it is taken once, by one synchronizer, and under a number and a secret that are some."""

from __future__ import annotations

import math
import threading
from typing import Any

import pytest
import torch

import cadenza
from cadenza.errors import NotInitializedError, UsageError
from cadenza.participants.heartbeat import Heartbeat
from cadenza.participants.join_arguments import accepts_rollback
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

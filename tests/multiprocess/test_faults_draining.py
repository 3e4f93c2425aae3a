"""Workers that have run out of data, while those who train die, come back, or do not."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import cadenza
from cadenza.faults import FaultPolicy
from support import islands
from support.faults import QUICK, kill, rank, train
from support.islands import RANKS
from support.ranks import RankPool, outcome

POLICIES = [cadenza.shrink, cadenza.skip_round]


def lose_who_trains(port: int, policy: Callable[..., FaultPolicy]) -> dict[str, Any]:
    """Worker 1 dies; rank 2 is its second life."""
    strategy = cadenza.diloco(5, outer_lr=0.5, faults=policy(**QUICK))
    if not rank():
        return train(port, 2, strategy, 8, drains=True)
    if rank() == 1:
        return train(port, 2, strategy, 40, at={14: kill}, step_s=0.05)
    time.sleep(6.0)
    return train(port, 2, strategy, 40, worker=1, step_s=0.05, drains=True)


@pytest.mark.parametrize("policy", POLICIES)
def test_who_drains_waits_for_who_was_killed_and_gives_it_the_state(
    ranks: RankPool, store: int, policy: Callable[..., FaultPolicy]
) -> None:
    drained, _, again = ranks.run(3, lose_who_trains, store, policy, init=False, expect_dead={1})
    assert drained["rounds"][:2] == [5, 10]
    assert again["joined_at"] == 15, "the clock stood still while nobody trained"
    assert again["taken"] == 25
    assert again["clock"] == drained["clock"] == 45
    assert torch.equal(again["values"], drained["values"])


def die_for_good(port: int, policy: Callable[..., FaultPolicy]) -> dict[str, Any]:
    strategy = cadenza.diloco(5, outer_lr=0.5, faults=policy(grace_s=1.0, first_s=5.0))
    return train(port, 2, strategy, 40 if rank() else 8, at={14: kill} if rank() else {}, step_s=0.05, drains=True)


@pytest.mark.parametrize("policy", POLICIES)
def test_it_ends_if_nobody_comes_back(ranks: RankPool, store: int, policy: Callable[..., FaultPolicy]) -> None:
    drained, _ = ranks.run(2, die_for_good, store, policy, init=False, expect_dead={1})
    assert drained["clock"] == 10
    assert drained["rounds"] == [5, 10]
    assert set(drained["failed"]) == {10}, "the attempts at a last round, and nothing else"


def drain(sync: Any, *_: Any) -> None:
    sync.drain()


def run_out_in_islands(port: int, kind: str) -> dict[str, Any]:
    strategy = cadenza.diloco(4, outer_lr=0.5, faults=cadenza.shrink(**QUICK))
    steps = 6 if rank() < RANKS else 18
    return islands.train(port, kind, 2, strategy, steps, step_s=0.05, then=drain)


@pytest.mark.parametrize("kind", ["fsdp", "ddp"])
def test_a_replica_of_several_ranks_answers_as_one(ranks: RankPool, store: int, kind: str) -> None:
    results = ranks.run(2 * RANKS, run_out_in_islands, store, kind, init=False)
    for number in range(RANKS):
        assert torch.equal(results[number]["values"], results[RANKS + number]["values"])
    for result in results:
        assert result["rounds"][:5] == [4, 8, 12, 16, 20]
        assert not result["failed"]
        assert result["clock"] == 20


def lose_a_rank_that_waits(port: int) -> tuple[Any, ...]:
    def wait(sync: Any, *_: Any) -> None:
        if rank() == 1:
            threading.Timer(1.5, kill).start()
        sync.drain()

    strategy = cadenza.diloco(4, outer_lr=0.5, faults=cadenza.shrink(**QUICK))
    steps = 6 if rank() < RANKS else 40
    return outcome(islands.train, port, "fsdp", 2, strategy, steps, step_s=0.15, then=wait)


def test_a_replica_that_waits_ends_with_its_first_rank_that_does(ranks: RankPool, store: int) -> None:
    results = ranks.run(2 * RANKS, lose_a_rank_that_waits, store, init=False, expect_dead={1})
    assert results[0][:2] == ("error", "ReplicaBrokenError")
    assert [kind for kind, *_ in results[RANKS:]] == ["ok", "ok"]

"""Ranks that do not do the same at the same step all raise, and are told what to do about it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import cadenza
from cadenza import Strategy
from cadenza.testing import Worker, workers
from support.ranks import outcome
from support.training import one_number

STRATEGIES = [cadenza.local_sgd(4), cadenza.diloco(4)]


def on_two(act: Callable[[Worker], Any]) -> list[str]:
    with workers(2, timeout_s=5) as pool:
        found = pool.run(lambda worker: outcome(act, worker))
    assert [(kind, error) for kind, error, _ in found] == [("error", "DisagreementError")] * 2
    return [text for _, _, text in found]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=["local_sgd", "diloco"])
def test_unequal_numbers_of_batches_name_drain(strategy: Strategy) -> None:
    def act(worker: Worker) -> None:
        _, sync, step = one_number(strategy)
        for _ in range([5, 9][worker.rank]):
            step(1.0)
        sync.finish()

    first, other = on_two(act)
    assert first == other
    assert "step 5 on rank 0; step 8 on rank 1" in first
    assert "call sync.drain() before sync.finish()" in first
    assert "averager" not in first


@pytest.mark.parametrize("strategy", STRATEGIES, ids=["local_sgd", "diloco"])
def test_averaged_on_one_rank_is_named(strategy: Strategy) -> None:
    def act(worker: Worker) -> None:
        _, sync, step = one_number(strategy)
        for n in range(8):
            step(1.0)
            if worker.rank == 0 and n == 5:
                with sync.averaged():
                    pass

    first, other = on_two(act)
    assert first == other
    assert "step 6 on rank 0; step 8 on rank 1" in first
    assert "sync.averaged() and sync.finish() on all ranks at the same step" in first


@pytest.mark.parametrize("strategy", STRATEGIES, ids=["local_sgd", "diloco"])
def test_averaged_on_one_rank_never_meets_the_last_round_of_others(strategy: Strategy) -> None:
    """They send the same values at the same step; once, they took each other for what they were about to do."""

    def act(worker: Worker) -> None:
        _, sync, step = one_number(strategy)
        for _ in range(5):
            step(1.0)
        if worker.rank == 0:
            with sync.averaged():
                pass
        sync.finish()

    first, other = on_two(act)
    assert first == other
    assert "averaged() of x: (1,) float32 on cpu, takes part on rank 0; parameter x: (1,)" in first
    assert "never on one alone" in first

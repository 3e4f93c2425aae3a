"""A worker that runs out of data where workers come and go: it answers the others' rounds, and never leads them."""

from __future__ import annotations

import copy
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

import cadenza
from cadenza import Strategy
from cadenza.faults import FaultPolicy
from cadenza.testing import Worker, workers
from support.faults import Told, build, hierarchy, take_step, values_of

PATIENT = {"grace_s": 20.0, "first_s": 60.0}
LEASE_S = 1.0
SITES = ("eu", "eu", "us", "us")
MODEL, _ = build(0)  # torch's random numbers are shared by all threads


@dataclass
class Ended:
    """Where a worker has come to, and what it was told."""

    clock: int
    taken: int
    told: Told
    values: torch.Tensor

    @property
    def rounds(self) -> list[tuple[int, int, tuple[float, ...]]]:
        return [(report.step, report.level, report.weights) for report in self.told if report.kind == "round"]


Before = Callable[[Any, int], None]


def train(
    worker: Worker,
    strategy: Strategy,
    steps: int,
    *,
    before: Before = lambda sync, step: None,
    drains: bool = True,
    **joining: Any,
) -> Ended:
    """Take so many steps, then drain and finish; `before` each step something may happen."""
    model = copy.deepcopy(MODEL)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    told, options = Told(), dict[str, Any]()
    if strategy.faults.tolerant:
        options["membership"] = worker.membership(lease_s=LEASE_S, **joining)
    sync = cadenza.attach(model, optimizer, strategy, observers=[told], **options)
    for step in range(steps):
        before(sync, step)
        take_step(model, optimizer, worker.rank, step)
        sync.step(samples=16)
    if drains:
        sync.drain()
    sync.finish()
    return Ended(sync.clock, steps, told, values_of(model))


def assert_alike(results: Sequence[Ended]) -> None:
    for result in results:
        assert [(report.step, report.reason) for report in result.told if report.kind == "failed"] == []
        assert result.clock == results[0].clock
        assert torch.equal(result.values, results[0].values)


STRATEGIES = {
    "mean": cadenza.local_sgd(4),
    "outer step": cadenza.diloco(4, outer_lr=0.7),
    "late": cadenza.local_sgd(4, delay=2),
    "streaming": cadenza.streaming_diloco(6, layers=1, delay=2),
    "adaptive": cadenza.sparse_loco(cadenza.adaptive(4, target_drift=0.1, minimum=3, maximum=12)),
}


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("policy", [cadenza.shrink, cadenza.skip_round])
def test_unequal_data_gives_what_it_gives_where_workers_are_fixed(
    name: str, policy: Callable[..., FaultPolicy]
) -> None:
    batches = (3, 12, 7)

    def run(worker: Worker, strategy: Strategy) -> Ended:
        return train(worker, strategy, batches[worker.rank])

    with workers(3) as pool:
        fixed = pool.run(run, STRATEGIES[name])
        elastic = pool.run(run, replace(STRATEGIES[name], faults=policy(**PATIENT)))
    assert_alike(elastic)
    assert [weights for *_, weights in elastic[0].rounds][:3] == [weights for *_, weights in fixed[0].rounds][:3]
    if name != "late" and name != "streaming":  # what lands late lands at a step of the fixed, and at a round here
        assert [step for step, *_ in elastic[0].rounds] == [step for step, *_ in fixed[0].rounds]
        assert torch.allclose(elastic[0].values, fixed[0].values, atol=1e-5)


def test_a_period_longer_than_the_grace_costs_nobody_a_step() -> None:
    """Once, the drained worker ran ahead, and the others were told that it was they who were late."""
    strategy = cadenza.diloco(4, faults=cadenza.shrink(grace_s=3.0, first_s=60.0))

    def pause(sync: Any, step: int) -> None:
        if step == 9:
            time.sleep(7.0)

    with workers(3, timeout_s=120.0) as pool:
        results = pool.run(
            lambda worker: train(worker, strategy, 20 if worker.rank else 8, before=pause if worker.rank else skip)
        )
    assert_alike(results)
    assert [(step, weights[0]) for step, _, weights in results[1].rounds[:5]] == [
        (4, pytest.approx(1 / 3)),
        (8, pytest.approx(1 / 3)),
        (12, 0.0),
        (16, 0.0),
        (20, 0.0),
    ]


def skip(sync: Any, step: int) -> None:
    """Do nothing."""


def test_who_drains_comes_to_the_last_round_of_who_does_not() -> None:
    strategy = cadenza.diloco(4, faults=cadenza.shrink(**PATIENT))
    with workers(2, timeout_s=120.0) as pool:
        results = pool.run(lambda worker: train(worker, strategy, 13 if worker.rank else 5, drains=not worker.rank))
    assert_alike(results)
    assert [step for step, *_ in results[0].rounds] == [4, 8, 12, 13]


@pytest.mark.parametrize("policy", [cadenza.shrink, cadenza.skip_round])
def test_it_ends_where_nobody_comes_back_and_its_clock_stays(
    policy: Callable[..., FaultPolicy], caplog: pytest.LogCaptureFixture
) -> None:
    strategy = cadenza.diloco(4, faults=policy(grace_s=1.0, first_s=4.0))
    done = threading.Event()

    def fall_silent(sync: Any, step: int) -> None:
        if step == 9:
            sync.replica.participants.membership.heartbeat.withheld = lambda: True
            done.wait(60.0)
            raise InterruptedError

    def run(worker: Worker) -> Ended | None:
        if not worker.rank:
            try:
                return train(worker, strategy, 4)
            finally:
                done.set()
        with pytest.raises(InterruptedError):
            train(worker, strategy, 20, before=fall_silent)
        return None

    with workers(2, timeout_s=120.0) as pool, caplog.at_level(logging.WARNING, logger="cadenza"):
        alone, _ = pool.run(run)
    assert alone is not None
    assert alone.clock == 8
    assert [step for step, *_ in alone.rounds] == [4, 8]
    assert "Worker 0 has run out of data, and for 4 s there was nobody who trains" in caplog.text


def test_who_trains_and_is_cut_off_for_a_while_finds_the_others_where_they_were() -> None:
    """Those without data are a majority here: they could go on by themselves, and end the training."""
    strategy = cadenza.diloco(4, faults=cadenza.shrink(**PATIENT))

    def cut(sync: Any, step: int) -> None:
        heartbeat = sync.replica.participants.membership.heartbeat
        if step == 9:
            heartbeat.withheld = lambda: True
            time.sleep(4 * LEASE_S)
            heartbeat.withheld = lambda: False
            time.sleep(2 * LEASE_S)  # a round is given up for a member that does not beat

    with workers(3, timeout_s=120.0) as pool:
        results = pool.run(
            lambda worker: train(worker, strategy, 4 if worker.rank else 16, before=skip if worker.rank else cut)
        )
    assert_alike(results)
    assert [(step, weights[0]) for step, _, weights in results[0].rounds[1:4]] == [(8, 1.0), (12, 1.0), (16, 1.0)]


@pytest.mark.parametrize("slow", [0, 3])
def test_sites_at_unlike_speeds_meet_in_all_their_rounds(slow: int) -> None:
    """Who has no data must neither go to a round of all too soon, nor miss one of its site."""
    batches = (5, 18, 11, 18)

    def lag(worker: Worker) -> Before:
        return lambda sync, step: time.sleep(0.15 if SITES[worker.rank] == SITES[slow] else 0.01)

    with workers(4, timeout_s=120.0) as pool:
        results = pool.run(
            lambda worker: train(
                worker,
                hierarchy(faults=cadenza.shrink(**PATIENT)),
                batches[worker.rank],
                before=lag(worker),
                site=SITES[worker.rank],
            )
        )
    assert_alike(results)
    for result in results:
        inner = [len(weights) for _, level, weights in result.rounds if level == 0]
        outer = [len(weights) for _, level, weights in result.rounds if level == 1]
        assert set(inner) == {2}
        assert set(outer) == {4}
        assert len(inner) >= 6


def test_it_waits_at_the_round_of_all_where_nobody_else_is_at_its_site() -> None:
    with workers(3, timeout_s=120.0) as pool:
        results = pool.run(
            lambda worker: train(
                worker,
                hierarchy(faults=cadenza.shrink(**PATIENT)),
                18 if worker.rank else 3,
                before=lambda sync, step: time.sleep(0.05),
                site=SITES[worker.rank + 1],
            )
        )
    assert_alike(results)
    assert [step for step, level, _ in results[0].rounds if level == 1][:3] == [6, 12, 18]

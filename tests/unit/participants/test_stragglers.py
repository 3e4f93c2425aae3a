"""Rounds that do not wait for a slow worker, which comes to the next one with what it has done."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
import torch

import cadenza
from cadenza.faults import FaultPolicy, Patience, Poison
from cadenza.participants.assembly import obeyed
from cadenza.participants.roster import Arrival, Roster, RoundNotHeldError
from cadenza.participants.roster_log import RosterLog
from cadenza.participants.round_id import RoundId
from cadenza.testing import Worker, workers

STEPS = 60


def train(
    worker: Worker, model: torch.nn.Module, faults: FaultPolicy, delay: int = 0, last_s: float = 0.0
) -> tuple[list[tuple[int, ...]], torch.Tensor]:
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    told: list[cadenza.RoundReport] = []
    strategy = cadenza.diloco(period=5, outer_lr=0.7, faults=faults, delay=delay)
    sync = cadenza.attach(
        model, optimizer, strategy, membership=worker.membership(lease_s=2.0), observers=[told.append]
    )
    while sync.clock < STEPS:
        time.sleep(0.06 if worker.rank == 2 else 0.01)
        model(torch.randn(4, 8, generator=worker.generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        sync.step()
    time.sleep(last_s * worker.rank)
    sync.finish()
    rounds = [report.participants for report in told if report.kind == "round"]
    return rounds, torch.cat([p.detach().flatten() for p in model.parameters()])


def test_a_slow_worker_is_left_out_of_a_round_and_in_the_next_one() -> None:
    torch.manual_seed(0)
    faults = cadenza.shrink(commit_at=0.6, grace_s=20.0, first_s=60.0)
    with workers(3, timeout_s=120.0) as pool:
        (first, values), (_, others), (slow, last) = pool.run(train, torch.nn.Linear(8, 4), faults)
    assert (0, 1) in first, "it was not waited for"
    assert (0, 1, 2) in first, "and came back"
    # Before it has come for the first time it may miss several: the others' first rounds take milliseconds.
    later = first[first.index((0, 1, 2)) :]
    assert not any(one == two == (0, 1) for one, two in pairwise(later)), "it is back at once"
    assert slow.count((0, 1, 2)) >= first.count((0, 1, 2)) - 1
    assert torch.equal(values, others)
    assert torch.equal(values, last)


def test_where_one_worker_is_enough_there_is_one_history_and_all_are_in_it() -> None:
    torch.manual_seed(0)
    faults = cadenza.shrink(commit_at=1, quorum=0.0, grace_s=20.0, first_s=60.0)
    with workers(3, timeout_s=120.0) as pool:
        results = pool.run(train, torch.nn.Linear(8, 4), faults, 2)
    for rounds, values in results:
        assert rounds.count((0, 1, 2)) >= 3, "who was left out is waited for at the next round, again and again"
        assert torch.equal(values, results[0][1])


def test_the_last_round_waits_for_all_also_where_one_worker_is_enough() -> None:
    torch.manual_seed(0)
    faults = cadenza.shrink(commit_at=1, quorum=0.0, grace_s=20.0, first_s=60.0)
    with workers(3, timeout_s=120.0) as pool:
        results = pool.run(train, torch.nn.Linear(8, 4), faults, 2, 0.4)
    assert all(torch.equal(values, results[0][1]) for _, values in results)


@dataclass(frozen=True)
class Hasty:
    """A policy of one's own for which one worker is enough."""

    patience: Patience = field(default=Patience(20.0), metadata={"local": "each may wait as long as it likes"})
    poison: Poison = field(default=Poison())
    name = "hasty"
    tolerant = True

    def enough(self, here: Set[int], last: Set[int]) -> bool:
        return len(here) >= 1

    def suffices(self, here: Set[int], last: Set[int], weights: Mapping[int, float]) -> bool:
        return True


def end_one_by_one(worker: Worker, strategy: cadenza.Strategy, steps: int, late_at: int) -> dict[str, torch.Tensor]:
    """Train, with worker 2 late at a step, and come to the end one after the other."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    sync = cadenza.attach(model, optimizer, strategy, membership=worker.membership(lease_s=10.0))
    while sync.clock < steps:
        time.sleep(0.7 if (worker.rank, sync.clock) == (2, late_at) else 0.01)
        optimizer.zero_grad()
        model(torch.randn(4, 8, generator=worker.generator)).square().sum().backward()
        sync.average_gradients()
        optimizer.step()
        sync.step()
    time.sleep(0.4 * worker.rank)
    sync.finish()
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_alike(results: list[dict[str, torch.Tensor]]) -> None:
    for other in results:
        assert [name for name, value in other.items() if not torch.equal(value, results[0][name])] == []


def test_the_last_round_waits_for_all_also_under_a_policy_of_ones_own() -> None:
    with workers(3, timeout_s=120.0) as pool:
        assert_alike(pool.run(end_one_by_one, cadenza.diloco(5, outer_lr=0.7, faults=Hasty()), 12, 3))


@pytest.mark.parametrize("late_at", [3, 11], ids=["late before", "late in the last step"])
@pytest.mark.parametrize("warm", [12, 24], ids=["at its end", "within it"])
def test_a_run_that_ends_in_its_warm_up_waits_for_all(warm: int, late_at: int) -> None:
    """Who is called to the end from a step of its own has no step to take any more."""
    faults = cadenza.shrink(commit_at=1, quorum=0.0, grace_s=20.0, first_s=60.0)
    strategy = cadenza.diloco(5, outer_lr=0.7, faults=faults, warmup_steps=warm)
    with workers(3, timeout_s=120.0) as pool:
        assert_alike(pool.run(end_one_by_one, strategy, 12, late_at))


def test_a_worker_that_is_often_late_is_worth_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="cadenza")
    log = RosterLog(0, leaves_out=True)
    without, late = Roster((0, 1), leader=0, absent=(2,)), Roster((0, 1, 2), leader=0, late={2: 0.3})
    for step in (5, 15):
        log.write(without, RoundId(step), last=(0, 1, 2))
        log.write(late, RoundId(step + 5), last=(0, 1))
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO", "INFO", "INFO"]
    assert "worker 2 is back; it was 0.30 s late" in caplog.text


def test_who_is_left_out_is_told_how_late_it_came() -> None:
    me = Arrival(2, "process", 3, "chain", "terms")
    held = Roster((0, 1), incarnations=("a", "b"), leader=0, decided_at=time.time() - 1.5)
    with pytest.raises(RoundNotHeldError, match="without worker 2, which came") as caught:
        obeyed(held, me)
    assert 1.5 <= caught.value.late_s < 60


def test_a_much_slower_worker_comes_as_soon_as_the_others_are_two_rounds_further() -> None:
    """It has taken two or three of its five steps then; nobody waits until it has taken the rest."""
    torch.manual_seed(0)
    faults = cadenza.shrink(commit_at=0.6, grace_s=20.0, first_s=60.0)
    with workers(3, timeout_s=120.0) as pool:
        *_, (slow, rounds) = pool.run(count_steps, torch.nn.Linear(8, 4), faults, 0.3)
    assert rounds >= 3
    assert slow < 5 * rounds, "it comes with what it has done"


def count_steps(worker: Worker, model: torch.nn.Module, faults: FaultPolicy, slow_s: float) -> tuple[int, int]:
    """Return how many steps a worker has taken, and in how many rounds it was."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    told: list[cadenza.RoundReport] = []
    sync = cadenza.attach(
        model,
        optimizer,
        cadenza.diloco(period=5, faults=faults),
        membership=worker.membership(lease_s=0.5),
        observers=[told.append],
    )
    steps = 0
    while sync.clock < STEPS:
        time.sleep(slow_s if worker.rank == 2 else 0.02)
        model(torch.randn(4, 8, generator=worker.generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        sync.step()
        steps += 1
    sync.finish()
    return steps, sum(report.kind == "round" for report in told)


def train_by_samples(worker: Worker, model: torch.nn.Module) -> list[tuple[int, ...]]:
    """Train with a worker that is slow and counts for nearly all."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    told: list[cadenza.RoundReport] = []
    faults = cadenza.shrink(commit_at=0.6, grace_s=20.0, first_s=60.0)
    sync = cadenza.attach(
        model,
        optimizer,
        cadenza.diloco(period=5, faults=faults, weight="samples"),
        membership=worker.membership(lease_s=2.0),
        observers=[told.append],
    )
    while sync.clock < STEPS:
        time.sleep(0.06 if worker.rank == 2 else 0.01)
        model(torch.randn(4, 8, generator=worker.generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        sync.step(samples=98 if worker.rank == 2 else 1)
    sync.finish()
    return [report.participants for report in told if report.kind == "round"]


def test_a_slow_worker_that_counts_for_most_is_waited_for() -> None:
    torch.manual_seed(0)
    with workers(3, timeout_s=120.0) as pool:
        first, *_ = pool.run(train_by_samples, torch.nn.Linear(8, 4))
    later = first[first.index((0, 1, 2)) :]
    assert later == [(0, 1, 2)] * len(later), "once it is known what it counts for"


def leave_with_rounds_in_flight(worker: Worker) -> int:
    """Train by fragments that land late, with unequal weights; the last worker leaves while some are in flight."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    strategy = cadenza.streaming_diloco(
        6,
        layers=1,
        delay=5,
        codec=cadenza.codecs.fp32(),
        weight="samples",
        faults=cadenza.shrink(grace_s=5.0, quorum=0.4),
    )
    sync = cadenza.attach(model, optimizer, strategy, membership=worker.membership(lease_s=0.5))
    for step in range(1, 61):
        if worker.rank == 2 and step == 21:
            sync.close()
            return 0
        model(torch.randn(4, 4, generator=worker.generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        sync.step(samples=1 + worker.rank)
    sync.finish()
    return len(sync.members)


def test_rounds_that_land_after_somebody_has_left_count_for_those_who_held_them() -> None:
    with workers(3, timeout_s=120.0) as pool:
        assert pool.run(leave_with_rounds_in_flight) == [2, 2, 0]

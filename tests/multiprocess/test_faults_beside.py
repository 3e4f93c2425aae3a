"""What is averaged beside parameters where workers come and go: gradients in a warm-up, buffers, optimizer state."""

from __future__ import annotations

import copy
import time
from typing import Any

import torch
from torch import nn

import cadenza
from support.faults import QUICK, arm, build, kill, rank, stop_for, take_step, train, values_of
from support.ranks import RankPool

PERIOD, WARM_UP = 4, 11


# ---- warm-up --------------------------------------------------------------------------------------------------------


def die_in_the_warm_up(port: int, phases: list[str]) -> dict[str, Any]:
    """Workers 1, 2, … die at one phase each of the gradients of step 3, 6, …; the first and the last one live."""
    strategy = cadenza.post_local_sgd(PERIOD, warmup_steps=WARM_UP, faults=cadenza.shrink(**QUICK))
    doomed = 1 <= rank() <= len(phases)
    at = {3 * rank() - 1: arm(phases[rank() - 1])} if doomed else None
    return train(port, len(phases) + 2, strategy, WARM_UP + PERIOD, at=at)


def survivors_alone(workers: int, deaths: dict[int, int]) -> torch.Tensor:
    """What plain torch makes of it: in every step the mean of the gradients of those who live through it."""
    model, optimizer = build(0)
    last = [0, workers - 1]
    for step in range(WARM_UP):
        there = [worker for worker in range(workers) if deaths.get(worker, WARM_UP + 1) > step + 1]
        gradients = []
        for worker in there:
            one = copy.deepcopy(model)
            take_step(one, torch.optim.SGD(one.parameters(), lr=0.0), worker, step)
            gradients.append([p.grad for p in one.parameters()])
        for parameter, *own in zip(model.parameters(), *gradients, strict=True):
            parameter.grad = torch.stack(own).mean(0)  # type: ignore[arg-type]
        optimizer.step()
    ends = []
    for worker in last:
        one = copy.deepcopy(model)
        own = torch.optim.SGD(one.parameters(), lr=0.05, momentum=0.9)
        own.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for step in range(WARM_UP, WARM_UP + PERIOD):
            take_step(one, own, worker, step)
        ends.append(values_of(one))
    return torch.stack(ends).mean(0)


def test_a_kill_in_a_warm_up_leaves_the_mean_of_those_who_live(ranks: RankPool, store: int) -> None:
    phases = ["signed", "exchange", "wire to vote"]
    dead = range(1, len(phases) + 1)
    results = ranks.run(len(phases) + 2, die_in_the_warm_up, store, phases, init=False, expect_dead=set(dead))
    first, last = results[0], results[-1]
    assert first["in the warm-up"].keys() == last["in the warm-up"].keys() == set(range(1, WARM_UP))
    for step, values in first["in the warm-up"].items():
        assert torch.equal(values, last["in the warm-up"][step]), step
    assert torch.equal(first["values"], last["values"])
    alone = survivors_alone(len(phases) + 2, {worker: 3 * worker for worker in dead})
    torch.testing.assert_close(first["values"], alone)
    assert first["taken"] == last["taken"] == WARM_UP + PERIOD


def without_momentum(worker: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, _ = build(worker)
    return model, torch.optim.SGD(model.parameters(), lr=0.05)


def come_in_the_warm_up(port: int) -> dict[str, Any]:
    """Worker 1 dies and is started again, worker 2 stops for a while; all of it in the warm-up."""
    strategy = cadenza.post_local_sgd(PERIOD, warmup_steps=120, faults=cadenza.shrink(grace_s=1.0, first_s=20.0))
    at = {1: {4: kill}, 2: {15: stop_for(2.5)}}.get(rank())
    worker = 1 if rank() == 3 else rank()
    time.sleep(1.5 if rank() == 3 else 0.0)
    return train(port, 3, strategy, 130, worker=worker, at=at, step_s=0.04, built=without_momentum)


def test_who_comes_in_mid_warm_up_trains_from_the_next_step(ranks: RankPool, store: int) -> None:
    first, _, stopped, again = ranks.run(4, come_in_the_warm_up, store, init=False, expect_dead={1})
    assert 0 < again["joined_at"] < 119
    assert again["taken"] == 130 - again["joined_at"]
    assert again["in the warm-up"].keys() == set(range(again["joined_at"] + 1, 120))
    for step, values in again["in the warm-up"].items():
        assert torch.equal(values, first["in the warm-up"][step]), step
    missed = {
        step
        for step, values in stopped["in the warm-up"].items()
        if step in first["in the warm-up"] and not torch.equal(values, first["in the warm-up"][step])
    }
    assert len(missed) < 5
    assert torch.equal(stopped["in the warm-up"][119], first["in the warm-up"][119])
    for other in (stopped, again):
        assert torch.equal(first["values"], other["values"])
        assert other["clock"] == first["clock"] == 130


# ---- buffers and optimizer state -------------------------------------------------------------------------------------


def with_statistics(worker: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(100 + worker)
    model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 4))
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def die_and_come_back(port: int) -> dict[str, Any]:
    """Worker 1 dies in an exchange, worker 2 before a vote; worker 1 is started again, without optimizer state."""
    strategy = cadenza.diloco(
        PERIOD, outer_lr=0.5, optimizer_state="average", buffers=True, faults=cadenza.shrink(**QUICK)
    )
    at = {1: {2 * PERIOD: arm("land")}, 2: {4 * PERIOD: arm("wire to vote")}}.get(rank())
    worker = 1 if rank() == 4 else rank()
    time.sleep(1.5 if rank() == 4 else 0.0)
    return train(port, 4, strategy, 80, worker=worker, at=at, step_s=0.04, built=with_statistics)


def test_buffers_and_optimizer_state_change_only_with_a_round_and_end_equal(ranks: RankPool, store: int) -> None:
    first, _, _, last, again = ranks.run(5, die_and_come_back, store, init=False, expect_dead={1, 2})
    assert first["failed"] == last["failed"] == [2 * PERIOD, 4 * PERIOD]  # `train` has held that they changed nothing
    assert first["participants"][-1] == (0, 1, 3)
    for other in (last, again):
        assert torch.equal(first["values"], other["values"])
        for name, buffer in first["buffers"].items():
            assert torch.equal(buffer, other["buffers"][name]), name
        moments = [value for value in first["optimizer"] if value.ndim]
        theirs = [value for value in other["optimizer"] if value.ndim]
        assert len(moments) == len(theirs) == 2 * 5
        assert all(torch.equal(one, two) for one, two in zip(moments, theirs, strict=True))

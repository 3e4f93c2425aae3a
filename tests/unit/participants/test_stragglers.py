"""Rounds that do not wait for a slow worker, which comes to the next one with what it has done."""

from __future__ import annotations

import copy
import time
from itertools import pairwise

import torch

import cadenza
from cadenza.testing import Worker, workers

STEPS = 60


def train(worker: Worker, model: torch.nn.Module) -> tuple[list[tuple[int, ...]], torch.Tensor]:
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    told: list[cadenza.RoundReport] = []
    faults = cadenza.shrink(commit_at=0.6, grace_s=20.0, first_s=60.0)
    strategy = cadenza.diloco(period=5, outer_lr=0.7, faults=faults)
    sync = cadenza.attach(
        model, optimizer, strategy, membership=worker.membership(lease_s=2.0), observers=[told.append]
    )
    while sync.clock < STEPS:
        time.sleep(0.06 if worker.rank == 2 else 0.01)
        model(torch.randn(4, 8, generator=worker.generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        sync.step()
    sync.finish()
    rounds = [report.participants for report in told if report.kind == "round"]
    return rounds, torch.cat([p.detach().flatten() for p in model.parameters()])


def test_a_slow_worker_is_left_out_of_a_round_and_in_the_next_one() -> None:
    torch.manual_seed(0)
    with workers(3, timeout_s=120.0) as pool:
        (first, values), (_, others), (slow, last) = pool.run(train, torch.nn.Linear(8, 4))
    assert (0, 1) in first, "it was not waited for"
    assert (0, 1, 2) in first, "and came back"
    # Before it has come for the first time it may miss several: the others' first rounds take milliseconds.
    later = first[first.index((0, 1, 2)) :]
    assert not any(one == two == (0, 1) for one, two in pairwise(later)), "it is back at once"
    assert slow.count((0, 1, 2)) >= first.count((0, 1, 2)) - 1
    assert torch.equal(values, others)
    assert torch.equal(values, last)

"""A worker that is started again is waited for only when it can come."""

from __future__ import annotations

import copy
import time

import torch

import cadenza
from cadenza.testing import Worker, workers

GRACE_S = 600.0  # how long a worker that could come would be waited for


def take_steps(worker: Worker, model: torch.nn.Module, until: dict[str, bool]) -> list[int]:
    """Train on two workers, and on a third that beats long before it can come to a round."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    told: list[cadenza.RoundReport] = []
    strategy = cadenza.diloco(period=1, faults=cadenza.shrink(grace_s=GRACE_S, first_s=60.0))
    late = worker.rank == 2
    while late and not until.get("begun"):
        time.sleep(0.01)
    membership = worker.membership(workers=2, lease_s=0.5, preparing=late)
    if late:
        until["joined"] = True
        while not until.get("passed"):
            time.sleep(0.01)
    sync = cadenza.attach(model, optimizer, strategy, membership=membership, observers=[told.append])
    while 2 not in sync.replica.participants.members or sync.clock < 12:
        model(torch.ones(1, 2)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.01)
        sync.step()
        until["begun"] = True
        if until.get("joined") and 2 in membership.heartbeat.known() and worker.rank == 0:
            until["count"] = until.get("count", 0) + 1  # type: ignore[assignment]
            until["passed"] = until["count"] > 5
    last = sync.clock
    sync.close()
    return [report.step for report in told if report.kind == "round" and report.step <= last]


def test_rounds_do_not_wait_for_a_worker_that_is_still_building_its_model() -> None:
    with workers(3, timeout_s=120.0) as pool:
        found = pool.run(take_steps, torch.nn.Linear(2, 1), {})
    assert all(found), "and it takes part when it has built it"

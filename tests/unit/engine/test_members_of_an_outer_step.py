"""An outer step is told by how many workers the round was held, wherever rounds are held."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import cadenza
from cadenza.testing import Worker, workers

MEMBERS = 9
RISES = cadenza.Strategy(
    levels=(cadenza.LevelPlan(2, outer=cadenza.nesterov(0.5, momentum=0.0, rises_beyond=4)),), buffers=False
)


def train(worker: Worker, strategy: cadenza.Strategy) -> float:
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    options: dict[str, Any] = {"membership": worker.membership()} if strategy.faults.tolerant else {}
    sync = cadenza.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy, **options)
    for _ in range(2 + strategy.delay):
        with torch.no_grad():
            model.weight.sub_(0.125 * (worker.rank % 3))  # 0.25 in two steps, on average
        sync.step()
    anchor = float(sync.replica.level_state(0, 0).anchors[0])
    sync.close()
    return anchor


@pytest.mark.parametrize("faults", [cadenza.raise_error(), cadenza.shrink()], ids=["fixed", "elastic"])
@pytest.mark.parametrize("delay", [0, 1])
def test_a_rate_that_rises_with_the_members_does_so_in_rounds(faults: Any, delay: int) -> None:
    with workers(MEMBERS) as pool:
        anchors = pool.run(train, replace(RISES, faults=faults, delay=delay))
    assert set(anchors) == {1 - 0.5 * (MEMBERS / 4) ** 0.5 * 0.25}

"""What encoding has lost is sent in a last round to which nobody has anything else to add."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import cadenza
from cadenza import codecs
from cadenza.reports import RoundReport
from cadenza.testing import Worker, workers


def train(worker: Worker, strategy: cadenza.Strategy) -> tuple[list[str], torch.Tensor]:
    torch.manual_seed(0)
    model = torch.nn.Linear(30, 20)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    told: list[RoundReport] = []
    sync = cadenza.attach(model, optimizer, strategy, membership=worker.membership(), observers=[told.append])
    for _ in range(8):
        optimizer.zero_grad()
        batch = torch.randn(8, 30, generator=worker.generator)
        (model(batch) - batch[:, :20]).square().mean().backward()
        optimizer.step()
        sync.step()
    sync.finish()
    return [report.reason for report in told if report.kind == "failed"], model.weight.detach().clone()


@pytest.mark.parametrize("codec", [codecs.int8(), codecs.topk(density=0.1)], ids=["int8", "top-k"])
def test_a_last_round_of_nothing_but_losses_is_held(codec: Any) -> None:
    # The round at step 8 lands in finish(): the parameters are the anchor, and there is a residual.
    strategy = cadenza.diloco(4, delay=2, codec=codecs.error_feedback(codec), faults=cadenza.shrink())
    with workers(3) as pool:
        found = pool.run(train, strategy)
    assert [failed for failed, _ in found] == [[], [], []]
    assert all(torch.equal(found[0][1], values) for _, values in found)

"""`period="auto"` and `codec="auto"` on real ranks and a real clock: all decide alike, whoever is slow."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

import cadenza
from cadenza import RoundReport
from support.ranks import RankPool


def decide() -> tuple[list[tuple[int, str, str]], list[float]]:
    """Train with steps of unequal lengths; the slowest rank's count for all."""
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    reports: list[RoundReport] = []
    strategy = cadenza.diloco("auto", codec="auto", outer_lr=0.5)
    with cadenza.attach(model, optimizer, strategy, observers=[reports.append]) as sync:
        for _ in range(40):
            time.sleep(0.002 * (1 + dist.get_rank()))
            model(torch.randn(2, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            sync.step()
    return [(r.step, r.codec, r.decision) for r in reports], [float(p.sum()) for p in model.parameters()]


def test_ranks_of_unequal_speed_take_the_same_periods_and_codecs(ranks: RankPool) -> None:
    results = ranks.run(3, decide)
    assert results[0] == results[1] == results[2]
    told, _ = results[0]
    assert len(told) >= 3
    assert told[0][0] == 4
    assert told[1][0] == 8

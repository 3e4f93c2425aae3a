"""Every paper's preset on real ranks: they train, and end with equal parameters. A new paper is a line in PAPERS."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import cadenza
from cadenza import Strategy
from cadenza.weighting import edit_norms
from support.compare import same_bits
from support.ranks import RankPool
from support.training import adam, momentum_sgd, train


def sgd_of_one(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1.0)


PAPERS: dict[str, Strategy] = {
    "demo": cadenza.demo(lr=0.01, k=2, chunk=4),
    "des_loc": cadenza.des_loc(2, momentum_period=3, variance_period=4),
    "eager_diloco": cadenza.eager_diloco(4),
    "edit": cadenza.edit(4, weight=edit_norms(observe=2)),
    "muloco": cadenza.muloco(4),
    "noloco": cadenza.noloco(4),
    "snoo": cadenza.snoo(4),
}
INNER: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {"demo": sgd_of_one, "des_loc": adam}


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("name", PAPERS)
def test_ranks_train_and_end_with_equal_parameters(ranks: RankPool, name: str, count: int) -> None:
    traces = ranks.run(count, train, PAPERS[name], 14, optimizer=INNER.get(name, momentum_sgd))
    assert all(same_bits(trace.finished, traces[0].finished) for trace in traces)
    assert traces[0].finished.isfinite().all()
    assert not same_bits(traces[0].finished, traces[0].history[0])

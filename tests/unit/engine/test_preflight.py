"""Before anything is sent: ranks that differ in anything that changes what is sent or done are all refused, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import cadenza
from cadenza import LevelPlan, Strategy, codecs
from cadenza.errors import DisagreementError
from cadenza.testing import Worker, workers


def attempt(worker: Worker, strategies: Callable[[int], Strategy]) -> str:
    model = torch.nn.Linear(3, 2)
    torch.nn.init.constant_(model.weight, 10.0 + worker.rank)
    before = model.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(DisagreementError) as error:
        cadenza.attach(model, optimizer, strategies(worker.rank))
    assert torch.equal(model.weight, before), "nothing was changed"
    return str(error.value)


PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "keep_anchor": ({"keep_anchor": True}, {"keep_anchor": False}),
    "schedule": ({"schedule": cadenza.every(4)}, {"schedule": cadenza.every(8)}),
    "codec": ({"codec": codecs.int8(block=64)}, {"codec": codecs.int8(block=128)}),
    "outer": ({"outer": cadenza.nesterov(lr=0.7)}, {"outer": cadenza.nesterov(lr=0.4)}),
    "delay": ({"delay": 1}, {"delay": 2}),
}


@pytest.mark.parametrize("name", PAIRS)
def test_levels_that_differ_in_a_field_are_refused_on_every_rank_by_its_name(name: str) -> None:
    plans = [{"schedule": cadenza.every(4), **options} for options in PAIRS[name]]

    def strategies(rank: int) -> Strategy:
        return Strategy(levels=(LevelPlan(**plans[rank % 2]),))

    with workers(3) as pool:
        told = pool.run(attempt, strategies)
    assert len(set(told)) == 1, "one text on every rank"
    assert f"strategy.levels[0].{name}" in told[0]
    assert "ranks 0, 2" in told[0]
    assert "rank 1" in told[0]


def test_weights_near_ten_do_not_become_five_where_only_one_rank_keeps_an_anchor() -> None:
    """Both ranks send as many values of one shape, so nothing but their plans tells values from differences."""
    with workers(2) as pool:
        told = pool.run(attempt, lambda rank: Strategy(levels=(LevelPlan(1, keep_anchor=rank == 0),)))
    assert "strategy.levels[0].keep_anchor: True on rank 0" in told[0]
    assert "strategy.levels[0].keep_anchor: False on rank 1" in told[1]

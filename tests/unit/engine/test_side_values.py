"""Buffers and optimizer state in rounds that may fail: as in fixed groups, also where members differ in theirs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import cadenza
from cadenza.engine import side_values
from cadenza.errors import UnsupportedTensorError
from cadenza.testing import Worker, workers

FAULTS = cadenza.shrink(grace_s=20.0)
Change = Callable[[Worker, nn.Module, torch.optim.Optimizer], None]


def train(
    worker: Worker, start: nn.Module, strategy: cadenza.Strategy, steps: int, change: Change = lambda *_: None
) -> dict[str, Any]:
    model = copy.deepcopy(start)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01, momentum=0.9)
    elastic = {"membership": worker.membership(lease_s=1.0)} if strategy.faults.tolerant else {}
    told: list[cadenza.RoundReport] = []
    sync = cadenza.attach(model, optimizer, strategy, observers=[told.append], **elastic)
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 3, generator=worker.generator) + worker.rank).square().mean().backward()
        optimizer.step()
        if step == steps - 1:
            change(worker, model, optimizer)
            before = copy.deepcopy([optimizer.state_dict()["state"], dict(model.named_buffers())])
        sync.step(samples=worker.rank + 1)
    sync.close()
    after = [optimizer.state_dict()["state"], dict(model.named_buffers())]
    return {"before": before, "after": after, "told": told}


def run(count: int, strategy: cadenza.Strategy, *, steps: int = 4, **options: Any) -> list[dict[str, Any]]:
    torch.manual_seed(2)
    start = nn.Sequential(nn.Linear(3, 4, bias=False), nn.BatchNorm1d(4), nn.Linear(4, 1))
    with workers(count) as pool:
        return pool.run(lambda worker: train(worker, start, strategy, steps, **options))


def tensors(found: list[Any]) -> list[torch.Tensor]:
    state, buffers = found
    return [value for entries in state.values() for value in entries.values()] + list(buffers.values())


@pytest.mark.parametrize("weight", ["uniform", "samples"])
@pytest.mark.parametrize("fragments", [cadenza.whole(), cadenza.by_layers(1)], ids=["whole", "by layers"])
def test_what_is_averaged_is_that_of_fixed_groups(weight: str, fragments: Any) -> None:
    options: dict[str, Any] = {
        "optimizer_state": "average",
        "buffers": True,
        "weight": weight,
        "fragments": fragments,
        "measure_drift": False,
    }
    elastic = run(3, cadenza.local_sgd(4, faults=FAULTS, **options), steps=8)
    fixed = run(3, cadenza.local_sgd(4, **options), steps=8)
    for one, two in zip(tensors(elastic[1]["after"]), tensors(fixed[1]["after"]), strict=True):
        torch.testing.assert_close(one, two)
    if fragments.single:
        assert all(map(torch.equal, tensors(elastic[0]["after"]), tensors(elastic[2]["after"])))


def test_who_has_other_state_keeps_it_and_the_rest_take_their_mean() -> None:
    def forget(worker: Worker, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if worker.rank == 1:
            optimizer.state.clear()
        if worker.rank == 2:
            optimizer.state.pop(next(iter(model.parameters())))

    results = run(4, cadenza.local_sgd(4, optimizer_state="average", faults=FAULTS), change=forget)
    means = [
        torch.stack(values).mean(0)
        for values in zip(*(tensors(results[i]["before"]) for i in (0, 3)), strict=True)
        if values[0].is_floating_point()
    ]
    assert results[1]["after"][0] == {}
    assert len(results[2]["after"][0]) == 4
    for kept in (1, 2):
        before, after = (tensors([results[kept][when][0], {}]) for when in ("before", "after"))
        assert all(map(torch.equal, before, after))
    for i in (0, 3):
        state = tensors([results[i]["after"][0], {}])
        counts = [value for value in state if value.ndim == 0]
        assert all(value == 4 for value in counts)
        for one, mean in zip(state, means, strict=False):
            torch.testing.assert_close(one, mean)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_values_that_are_not_finite_do_not_count(value: float) -> None:
    def spoil(worker: Worker, model: nn.Module, _: Any) -> None:
        model.get_buffer("1.running_var").fill_(value if worker.rank == 1 else 3.0)

    for result in run(3, cadenza.local_sgd(4, faults=FAULTS), change=spoil):
        assert result["after"][1]["1.running_var"].tolist() == [3.0] * 4


def test_a_mean_that_was_damaged_on_its_way_fails_the_round_and_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    exchange = side_values.exchange_mean

    def damaged(flat: torch.Tensor, *args: Any, **options: Any) -> Any:
        done = exchange(flat, *args, **options)
        flat[0] = 1e20
        return done

    monkeypatch.setattr(side_values, "exchange_mean", damaged)
    for result in run(2, cadenza.local_sgd(4, optimizer_state="average", faults=FAULTS)):
        assert [report.kind for report in result["told"]] == ["failed"]
        assert all(map(torch.equal, tensors(result["before"]), tensors(result["after"])))


def test_state_that_has_no_mean_is_refused_by_name() -> None:
    def add(_: Worker, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.state[next(iter(model.parameters()))]["codes"] = torch.zeros(3, dtype=torch.uint8)

    with pytest.raises(UnsupportedTensorError, match="codes are no floating-point tensors"):
        run(2, cadenza.local_sgd(4, optimizer_state="average", faults=FAULTS), change=add)

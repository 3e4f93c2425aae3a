"""A warm-up among workers that come and go: as in fixed groups while nobody does, whatever the gradients are."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import cadenza
from cadenza.errors import CadenzaError, UnsupportedTensorError
from cadenza.testing import Worker, workers

WARM_UP, PERIOD = 3, 4


class Net(nn.Module):
    """One part for each optimizer, of which the second may be left unused; and one that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(3, 4, bias=False), nn.Linear(4, 4), nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor, *, second: bool) -> torch.Tensor:
        out: torch.Tensor = self.norm(self.one(x))
        return self.two(out) if second else out


Gradients = Callable[[Worker, Net, int], None]


def train(
    worker: Worker,
    start: Net,
    strategy: cadenza.Strategy,
    *,
    steps: int,
    auto: bool = False,
    uses_all: bool = True,
    spoil: Gradients | None = None,
) -> dict[str, Any]:
    model = copy.deepcopy(start)
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.05, momentum=0.9) for part in (model.one, model.two)]
    elastic = {"membership": worker.membership(lease_s=1.0)} if strategy.faults.tolerant else {}
    sync = cadenza.attach(model, optimizers, strategy, auto=auto, **elastic)
    seen = []
    for step in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        batch = torch.randn(8, 3, generator=worker.generator)
        model(batch, second=uses_all or worker.rank != 1).square().mean().backward()
        if spoil is not None:
            spoil(worker, model, step)
        if not auto:
            sync.average_gradients()
        for optimizer in optimizers:
            optimizer.step()
        if not auto:
            sync.step()
        seen.append([p.detach().clone() for p in model.parameters()])
    sync.finish()
    return {"seen": seen, "end": list(model.state_dict().values()), "unused": model.three.weight.grad}


def run(count: int, *, steps: int = 9, faults: Any = None, **options: Any) -> list[dict[str, Any]]:
    strategy = cadenza.post_local_sgd(PERIOD, warmup_steps=WARM_UP, faults=faults or cadenza.shrink(grace_s=20.0))
    torch.manual_seed(1)
    start = Net()
    with workers(count) as pool:
        return pool.run(lambda worker: train(worker, start, strategy, steps=steps, **options))


def check_equal(results: list[dict[str, Any]], steps: int) -> None:
    for other in results[1:]:
        for one, two in zip(results[0]["seen"][: min(steps, WARM_UP)], other["seen"], strict=False):
            assert all(map(torch.equal, one, two))
        assert all(map(torch.equal, results[0]["end"], other["end"]))


@pytest.mark.parametrize("steps", [9, WARM_UP, 2])
@pytest.mark.parametrize("auto", [False, True], ids=["by hand", "by hooks of two optimizers"])
def test_an_undisturbed_warm_up_is_that_of_fixed_groups(auto: bool, steps: int) -> None:
    elastic = run(3, steps=steps, auto=auto)
    fixed = run(3, steps=steps, auto=auto, faults=cadenza.raise_error())
    check_equal(elastic, steps)
    for mine, theirs in zip(elastic[0]["end"], fixed[0]["end"], strict=True):
        torch.testing.assert_close(mine, theirs)
    for one, two in zip(elastic[0]["seen"], fixed[0]["seen"], strict=True):
        for mine, theirs in zip(one, two, strict=True):
            torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("faults", [cadenza.shrink(grace_s=20.0), cadenza.skip_round(grace_s=20.0)])
def test_a_gradient_that_some_have_is_averaged_with_zeros_and_one_that_nobody_has_stays_none(faults: Any) -> None:
    results = run(2, steps=2, faults=faults, uses_all=False)
    check_equal(results, 2)
    assert [result["unused"] for result in results] == [None, None]


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 1e30])
def test_gradients_that_are_not_finite_or_explode_reach_nobody(value: float) -> None:
    def spoil(worker: Worker, model: Net, step: int) -> None:
        if worker.rank == 1 and step == 1:
            model.one.weight.grad.fill_(value)  # type: ignore[union-attr]

    results = run(3, steps=4, spoil=spoil)
    check_equal(results, 4)
    assert all(tensor.isfinite().all() and tensor.abs().max() < 1e3 for tensor in results[0]["end"])


def test_gradients_that_nobody_can_use_stay_as_they_are_so_that_a_scaler_finds_them() -> None:
    found: list[bool] = []

    def run_one(worker: Worker) -> None:
        model = nn.Linear(2, 1)
        strategy = cadenza.post_local_sgd(4, warmup_steps=2, faults=cadenza.shrink(grace_s=20.0))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sync = cadenza.attach(model, optimizer, strategy, membership=worker.membership(lease_s=1.0))
        model.weight.grad = torch.full((1, 2), torch.inf)
        sync.average_gradients()
        found.append(bool(model.weight.grad.isinf().all()))
        sync.close()

    with workers(2) as pool:
        pool.run(run_one)
    assert found == [True, True]


def test_a_layout_of_its_own_does_not_matter_and_a_sparse_gradient_is_refused() -> None:
    def run_one(worker: Worker) -> torch.Tensor:
        model = nn.Linear(2, 3, bias=False)
        strategy = cadenza.post_local_sgd(4, warmup_steps=2, faults=cadenza.shrink(grace_s=20.0))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with cadenza.attach(model, optimizer, strategy, membership=worker.membership(lease_s=1.0)) as sync:
            own = torch.arange(6.0).reshape(2, 3).T * (1 + 2 * worker.rank)
            model.weight.grad = own if worker.rank else own.contiguous()
            sync.average_gradients()
            mean = model.weight.grad.clone()
            model.weight.grad = own.to_sparse()
            with pytest.raises(UnsupportedTensorError, match="layout"):
                sync.average_gradients()
            sync.step()
        return mean

    with workers(2) as pool:
        for mean in pool.run(run_one):
            assert torch.equal(mean, 2 * torch.arange(6.0).reshape(2, 3).T)


def test_who_runs_out_of_data_in_a_warm_up_is_told_so_and_stops_nobody() -> None:
    def run_one(worker: Worker) -> None:
        model = nn.Linear(2, 1)
        strategy = cadenza.post_local_sgd(4, warmup_steps=2, faults=cadenza.shrink(grace_s=20.0))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sync = cadenza.attach(model, optimizer, strategy, membership=worker.membership(lease_s=1.0))
        with pytest.raises(CadenzaError, match="ran out of data") if worker.rank == 2 else nullcontext():
            if worker.rank == 2:
                sync.drain()
            for _ in range(2):
                sync.average_gradients()
                sync.step()
        sync.close()
        assert sync.members == ((0, 1, 2) if worker.rank == 2 else (0, 1))

    with workers(3) as pool:
        pool.run(run_one)

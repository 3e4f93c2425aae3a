"""The inner optimizer's state in rounds: what has a mean is averaged, the rest is refused by name, SGD's is reset."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import cadenza
from cadenza import Strategy
from cadenza.testing import Worker, workers
from support.ranks import outcome
from support.surprises import warnings_of

Make = Callable[[nn.Module], torch.optim.Optimizer]


class Scaled(nn.Module):
    """A linear map with a scale, a parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.matrix = nn.Parameter(torch.eye(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.scale * (x @ self.matrix)).square().sum()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    return {
        f"{name}/{key}": value.clone()
        for name, p in model.named_parameters()
        for key, value in optimizer.state[p].items()
        if isinstance(value, torch.Tensor)
    }


def before_and_after(make: Make, strategy: Strategy) -> list[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]]:
    """Return each worker's state of the optimizer before and after its first round."""

    def run(worker: Worker) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        model = Scaled()
        optimizer = make(model)
        sync = cadenza.attach(model, optimizer, strategy)
        for _ in range(2):
            x = torch.randn(4, 3, generator=worker.generator)

            def closure(x: torch.Tensor = x) -> torch.Tensor:
                optimizer.zero_grad()
                loss = model(x)
                loss.backward()
                return loss

            optimizer.step(closure)
            before = state_of(model, optimizer)
            sync.step()
        return before, state_of(model, optimizer)

    with workers(2) as pool:
        return pool.run(run)


MAKERS: dict[str, Make] = {
    "Adam": lambda model: torch.optim.Adam(model.parameters(), lr=0.01),
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
    "Adafactor": lambda model: torch.optim.Adafactor(model.parameters()),
    "NAdam": lambda model: torch.optim.NAdam(model.parameters()),
}


@pytest.mark.parametrize("name", MAKERS)
def test_all_state_that_has_a_mean_is_averaged_and_counters_are_not(name: str) -> None:
    (mine, after), (theirs, other) = before_and_after(MAKERS[name], cadenza.local_sgd(2, optimizer_state="average"))
    counters = {"step", "mu_product"}
    for key, value in after.items():
        torch.testing.assert_close(value, (mine[key] + theirs[key]) / 2)
        assert torch.equal(value, other[key])
        assert key.endswith(tuple(counters)) or not torch.equal(mine[key], theirs[key])
    assert {key.split("/")[0] for key in after} == {"scale", "matrix"}


def test_the_counters_of_adam_stay_whole_numbers() -> None:
    for _, after in before_and_after(MAKERS["Adam"], cadenza.local_sgd(2, optimizer_state="average")):
        assert after["scale/step"] == after["matrix/step"] == 2


@pytest.mark.parametrize("rank", [0, 1])
def test_state_without_a_mean_is_refused_by_name_on_every_rank(rank: int) -> None:
    def run(worker: Worker) -> Any:
        model = Scaled()
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
        sync = cadenza.attach(model, optimizer, cadenza.local_sgd(1, optimizer_state="average"))
        x = torch.randn(4, 3, generator=worker.generator)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x)
            loss.backward()
            return loss

        if worker.rank == rank:  # the other has no state at all
            optimizer.step(closure)
        before = model.matrix.detach().clone()
        result = outcome(sync.step)
        assert torch.equal(model.matrix, before)
        return result

    with workers(2) as pool:
        (kind, error, text), other = pool.run(run)
    assert (kind, error) == ("error", "UnsupportedTensorError")
    assert other[2] == text
    assert f"On rank {rank}: the optimizer's state of parameter scale has no mean: " in text
    assert "old_dirs, old_stps" in text
    assert 'optimizer_state="leave" or "reset"' in text


def test_state_on_one_rank_only_is_found_out() -> None:
    def run(worker: Worker) -> Any:
        model = Scaled()
        optimizer = MAKERS["Adam"](model)
        sync = cadenza.attach(model, optimizer, cadenza.local_sgd(1, optimizer_state="average"))
        if worker.rank == 1:
            model(torch.ones(1, 3)).backward()
            optimizer.step()
        return outcome(sync.step)

    with workers(2) as pool:
        (_, error, text), other = pool.run(run)
    assert (error, other[2]) == ("DisagreementError", text)
    assert "nothing at position 0 on rank 0; optimizer state scale/exp_avg: () float32" in text


def test_slowmo_resets_the_momentum_of_sgd_also_of_a_single_number() -> None:
    for before, after in before_and_after(MAKERS["SGD"], cadenza.slowmo(2)):
        assert all(before[key].abs().sum() > 0 for key in ("scale/momentum_buffer", "matrix/momentum_buffer"))
        assert all(not after[key].any() for key in ("scale/momentum_buffer", "matrix/momentum_buffer"))


def test_slowmo_leaves_the_momentum_of_other_optimizers() -> None:
    def muon(model: nn.Module) -> torch.optim.Optimizer:
        model.scale.requires_grad_(False)
        return torch.optim.Muon([model.matrix])

    for before, after in before_and_after(muon, cadenza.slowmo(2)):
        assert torch.equal(before["matrix/momentum_buffer"], after["matrix/momentum_buffer"])


# ---- optimizers that are judged at other weights -------------------------------------------------------------------


class ScheduleFree(torch.optim.Optimizer):
    """Schedule-free SGD in a few lines: trains at y, is judged at x, and keeps z."""

    def __init__(self, parameters: Any, lr: float = 0.1, beta: float = 0.9) -> None:
        super().__init__(parameters, {"lr": lr})
        self._beta, self._training, self._steps = beta, True, 0

    def step(self, closure: Any = None) -> None:
        self._steps += 1
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            z = self.state[p].setdefault("z", p.detach().clone())
            with torch.no_grad():
                x = p.lerp(z, 1 - 1 / self._beta)
                z.sub_(p.grad, alpha=self.param_groups[0]["lr"])
                p.copy_(z.lerp(x.lerp(z, 1 / self._steps), self._beta))

    def eval(self) -> None:
        self._move(1 - 1 / self._beta)

    def train(self) -> None:
        self._move(1 - self._beta)

    @torch.no_grad()
    def _move(self, weight: float) -> None:
        for p, state in self.state.items():
            p.lerp_(state["z"], weight)


def the_package(parameters: Any) -> torch.optim.Optimizer:
    optimizer: torch.optim.Optimizer = pytest.importorskip("schedulefree").SGDScheduleFree(parameters, lr=0.1)
    return optimizer


@pytest.mark.parametrize("make", [ScheduleFree, the_package], ids=["double", "package"])
def test_the_weights_of_eval_are_equal_where_the_state_is_averaged(make: Any) -> None:
    model = nn.Linear(3, 1)
    make(model.parameters())  # skips here, not in a thread

    def run(worker: Worker) -> tuple[torch.Tensor, torch.Tensor]:
        mine = copy.deepcopy(model)
        optimizer = make(mine.parameters())
        if hasattr(optimizer, "train"):
            optimizer.train()
        sync = cadenza.attach(mine, optimizer, cadenza.local_sgd(4, optimizer_state="average"))
        for _ in range(6):
            optimizer.zero_grad()
            mine(torch.randn(4, 3, generator=worker.generator)).square().mean().backward()
            optimizer.step()
            sync.step()
        sync.finish()
        trained = mine.weight.detach().clone()
        optimizer.eval()
        return trained, mine.weight.detach()

    with workers(2) as pool:
        (y, x), (other_y, other_x) = pool.run(run)
    assert torch.equal(y, other_y)
    assert torch.equal(x, other_x)
    assert not torch.equal(x, y)


@pytest.mark.parametrize("make", [ScheduleFree, the_package], ids=["double", "package"])
def test_weights_of_eval_that_are_not_averaged_are_told(make: Any) -> None:
    model = nn.Linear(3, 1)
    [warning] = warnings_of(model, cadenza.local_sgd(4), make(model.parameters()))
    assert 'Use optimizer_state="average"' in str(warning.message)
    assert not warnings_of(model, cadenza.local_sgd(4, optimizer_state="average"), make(model.parameters()))

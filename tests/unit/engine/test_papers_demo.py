"""DeMo (arXiv 2411.19870) beside its equations, written apart: after every step, and stopped at every one."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

import cadenza
from cadenza import LevelPlan, Strategy
from cadenza.engine.layout import Layout
from cadenza.testing import Worker, workers
from support.compare import same_bits
from support.models import CASES
from support.resuming import assert_resumes_after_every_step
from support.training import values

Factor = Callable[[int], float]
LR, STEPS = 0.01, 8


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1.0)


def warming_up(n: int) -> float:
    return min(1.0, n / 4)


def always(n: int) -> float:
    return 1.0


class Transform:
    """The blocks of a tensor, (count, height · width), and their frequencies: `DeMo` of the authors, without einops."""

    def __init__(self, shape: torch.Size, chunk: int) -> None:
        self.rows, self.columns = (shape[0] if shape else 1), math.prod(shape[1:])
        self.high, self.wide = (
            max(n for n in range(1, min(side, chunk) + 1) if side % n == 0) for side in (self.rows, self.columns)
        )
        self.shape = shape

    def there(self, tensor: torch.Tensor) -> torch.Tensor:
        blocks = tensor.reshape(self.rows // self.high, self.high, self.columns // self.wide, self.wide).transpose(1, 2)
        return (dct_matrix(self.high).T @ blocks @ dct_matrix(self.wide)).flatten(2).flatten(0, 1)

    def back(self, frequencies: torch.Tensor) -> torch.Tensor:
        grid = self.rows // self.high, self.columns // self.wide, self.high, self.wide
        blocks = dct_matrix(self.high) @ frequencies.view(grid) @ dct_matrix(self.wide).T
        return blocks.transpose(1, 2).reshape(self.shape)


def dct_matrix(n: int) -> torch.Tensor:
    i, f = torch.arange(n, dtype=torch.float64)[:, None], torch.arange(n, dtype=torch.float64)[None]
    cosines = torch.cos(math.pi * (2 * i + 1) * f / (2 * n))
    cosines = cosines.where(cosines.abs() > 1e-12, 0.0)  # the cosine of a right angle has a sign only by rounding
    return torch.where(f == 0, math.sqrt(1 / n), math.sqrt(2 / n)) * cosines


def reference(
    count: int, case: str, *, factor: Factor, k: int, chunk: int, decay: float, weight_decay: float
) -> list[torch.Tensor]:
    """What all workers hold after every step."""
    model = CASES[case].model(0)
    parameters = list(model.parameters())
    transforms = [Transform(p.shape, chunk) for p in parameters]
    momenta = [[torch.zeros_like(p, dtype=torch.float64) for p in parameters] for _ in range(count)]
    history = []
    for n in range(1, STEPS + 1):
        sent: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in parameters]
        for rank in range(count):
            model.zero_grad()
            CASES[case].backward(model, rank, n)
            for i, p in enumerate(parameters):
                momentum, transform = momenta[rank][i], transforms[i]
                momentum.mul_(decay)
                if p.grad is not None:
                    momentum.add_(p.grad, alpha=factor(n))
                frequencies = transform.there(momentum)
                places = frequencies.abs().topk(min(k, frequencies.shape[1])).indices
                largest = frequencies.gather(1, places)
                momentum.sub_(transform.back(torch.zeros_like(frequencies).scatter(1, places, largest)))
                sent[i].append((places, largest))
        with torch.no_grad():
            for i, p in enumerate(parameters):
                places, largest = (torch.cat(parts, dim=1) for parts in zip(*sent[i], strict=True))
                empty = torch.zeros_like(transforms[i].there(momenta[0][i]))
                mean = empty.scatter_reduce(1, places, largest, reduce="mean", include_self=False)
                p.mul_(1 - LR * factor(n) * weight_decay)
                p.sub_(LR * factor(n) * transforms[i].back(mean).sign().float())
        history.append(values(model))
    return history


def on_workers(count: int, case: str, strategy: Strategy, factor: Factor) -> list[list[torch.Tensor]]:
    def train(worker: Worker) -> list[torch.Tensor]:
        model = CASES[case].model(worker.rank)
        optimizer, history = sgd(model), []
        sync = cadenza.attach(model, optimizer, strategy)
        for n in range(1, STEPS + 1):
            optimizer.param_groups[0]["lr"] = factor(n)
            optimizer.zero_grad()
            CASES[case].backward(model, worker.rank, n)
            optimizer.step()
            sync.step()
            history.append(values(model))
        sync.finish()
        return [*history, values(model)]

    with workers(count) as pool:
        return pool.run(train)


@pytest.mark.parametrize("case", ["mlp", "unused_branch"])
@pytest.mark.parametrize("factor", [always, warming_up])
@pytest.mark.parametrize("count", [2, 4])
def test_it_walks_the_way_of_its_equations(count: int, factor: Factor, case: str) -> None:
    options = {"k": 2, "chunk": 4, "decay": 0.9, "weight_decay": 0.1}
    found = on_workers(count, case, cadenza.demo(lr=LR, **options), factor)  # type: ignore[arg-type]
    expected = reference(count, case, factor=factor, **options)  # type: ignore[arg-type]
    for history in found:
        assert same_bits(history[-1], history[-2])
        assert all(same_bits(ours, first) for ours, first in zip(history, found[0], strict=True))
    for n, wanted in enumerate(expected, start=1):
        torch.testing.assert_close(found[0][n - 1], wanted, rtol=1e-6, atol=1e-6, msg=lambda m, n=n: f"step {n}: {m}")


def test_the_mean_is_over_those_who_sent_a_frequency() -> None:
    """Four values, one frequency each: with a mean over all workers, the constant part would lose to the wave."""
    basis = dct_matrix(4).float()
    gradients = [2 * basis[:, 0], 3 * basis[:, 1], 3 * basis[:, 1]]

    def step(worker: Worker) -> list[float]:
        x = nn.Parameter(torch.zeros(4))
        model = nn.ParameterList([x])
        optimizer = sgd(model)
        sync = cadenza.attach(model, optimizer, cadenza.demo(lr=1.0, k=1))
        (x * gradients[worker.rank]).sum().backward()
        optimizer.step()
        sync.step()
        return x.tolist()

    with workers(3) as pool:
        found = pool.run(step)
    assert found == [(-(2 * basis[:, 0] + 3 * basis[:, 1])).sign().tolist()] * 3
    assert found[0] != (-(2 * basis[:, 0] + 2 * 3 * basis[:, 1])).sign().tolist()


@pytest.mark.parametrize("count", [2, 3])
def test_it_resumes_after_every_step(count: int) -> None:
    assert_resumes_after_every_step(cadenza.demo(lr=LR, k=2, chunk=4), count=count, steps=6, inner=sgd)


def test_convolutions_and_a_delay_end_with_equal_parameters() -> None:
    strategy = cadenza.demo(2, lr=LR, k=2, chunk=4, delay=1)
    first, *others = on_workers(3, "conv_channels_last", strategy, always)
    assert all(same_bits(first[-1], other[-1]) for other in others)


def test_a_level_of_shapes_goes_beside_one_of_aligned_blocks() -> None:
    """Tensors start at multiples of a block for the inner level: the outer one sees what lies between them."""
    inner = LevelPlan(1, groups=2, codec=cadenza.codecs.int8(block=16), outer=cadenza.nesterov(0.5))
    outer = LevelPlan(2, codec=cadenza.codecs.dct(2, chunk=4), outer=cadenza.nesterov(0.5))
    first, *others = on_workers(4, "mlp", Strategy(levels=(inner, outer)), always)
    assert all(same_bits(first[-1], other[-1]) for other in others)


def test_shapes_are_those_in_which_values_are_packed() -> None:
    tensors = {
        "a": torch.zeros(3, 5).T,
        "b": torch.zeros(7),
        "c": torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "d": torch.zeros(4, 6)[:, ::2],
        "e": torch.zeros(2, 2, dtype=torch.complex64),
    }
    [*shapes] = Layout(tensors, home=None).shapes(0)
    assert shapes == [(3, 5), (7,), (2, 4, 5, 3), (4, 3), (2, 2, 2)]
    assert Layout(tensors, home=None, align=16).shapes(0)[:5] == [(3, 5), (1,), (7,), (9,), (2, 4, 5, 3)]

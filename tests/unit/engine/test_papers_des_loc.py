"""DES-LOC (arXiv 2505.22549) beside its equations, written apart: after every step, and stopped at every one."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import cadenza
from cadenza import Strategy
from cadenza.errors import DisagreementError, NotFiniteError, UnsupportedTensorError
from cadenza.schedules import moments
from cadenza.testing import Worker, workers
from support.compare import same_bits
from support.models import CASES
from support.ranks import outcome
from support.resuming import assert_resumes_after_every_step
from support.training import OneNumber, momentum_sgd, train, values

LR, BETAS, EPS, STEPS = 0.01, (0.9, 0.95), 1e-8, 13


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=LR, betas=BETAS, eps=EPS)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, key: str) -> torch.Tensor:
    return torch.cat([optimizer.state[p][key].reshape(-1) for p in model.parameters()])


History = list[list[tuple[torch.Tensor, ...]]]  # after every step, for every worker: x, u, v


def reference(count: int, periods: tuple[int, int, int]) -> History:
    """Adam on every worker, and the mean of parameters and of each moment at its own period."""
    models = [CASES["mlp"].model(0) for _ in range(count)]
    x = [values(model) for model in models]
    u, v = ([torch.zeros_like(one) for one in x] for _ in range(2))
    history: History = []
    for n in range(1, STEPS + 1):
        for rank, model in enumerate(models):
            nn.utils.vector_to_parameters(x[rank], model.parameters())
            model.zero_grad()
            CASES["mlp"].backward(model, rank, n)
            g = torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])
            u[rank] = BETAS[0] * u[rank] + (1 - BETAS[0]) * g
            v[rank] = BETAS[1] * v[rank] + (1 - BETAS[1]) * g * g
            first, second = u[rank] / (1 - BETAS[0] ** n), v[rank] / (1 - BETAS[1] ** n)
            x[rank] = x[rank] - LR * first / (second.sqrt() + EPS)
        for what, period in zip((x, u, v), periods, strict=True):
            if n % period == 0:
                what[:] = [sum(what) / count] * count  # type: ignore[list-item]
        history.append(list(zip(x, u, v, strict=True)))
    return history


def on_workers(count: int, strategy: Strategy) -> list[list[tuple[torch.Tensor, ...]]]:
    def run(worker: Worker) -> list[tuple[torch.Tensor, ...]]:
        model = CASES["mlp"].model(worker.rank)
        optimizer, history = adam(model), []
        sync = cadenza.attach(model, optimizer, strategy)
        for n in range(1, STEPS + 1):
            optimizer.zero_grad()
            CASES["mlp"].backward(model, worker.rank, n)
            optimizer.step()
            sync.step()
            held = [state_of(model, optimizer, key).clone() for key in ("exp_avg", "exp_avg_sq")]
            history.append((values(model), *held))
        sync.finish()
        return [*history, (values(model),)]

    with workers(count) as pool:
        return pool.run(run)


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("periods", [(2, 6, 12), (3, 4, 5), (4, 2, 1)])
def test_it_walks_the_way_of_its_equations(periods: tuple[int, int, int], count: int) -> None:
    every_x, every_u, every_v = periods
    found = on_workers(count, cadenza.des_loc(every_x, momentum_period=every_u, variance_period=every_v))
    for n, expected in enumerate(reference(count, periods)):
        for rank in range(count):
            for got, wanted in zip(found[rank][n], expected[rank], strict=True):
                torch.testing.assert_close(got, wanted, rtol=2e-6, atol=2e-6, msg=lambda m, n=n: f"step {n + 1}: {m}")
    assert all(same_bits(history[-1][0], found[0][-1][0]) for history in found)


def test_what_is_averaged_is_the_same_bits_on_all_workers_and_the_rest_is_not() -> None:
    found = on_workers(3, cadenza.des_loc(2))  # moments every 6 and 12 steps
    for n in range(1, STEPS + 1):
        for part, period in enumerate((2, 6, 12)):
            first, *others = (history[n - 1][part] for history in found)
            assert all(same_bits(first, other) for other in others) == (n % period == 0), (n, part)


def literal(gradients: list[list[float]], periods: tuple[int, int, int]) -> list[list[float]]:
    """Algorithm 2 as it is printed, for one number and the optimizer's own bias correction: averages of the last state
    are taken inside the step.
    """
    count = len(gradients)
    x, u, v = [1.0] * count, [0.0] * count, [0.0] * count
    history = []
    for t in range(STEPS):
        x, u, v = (
            [math.fsum(what) / count] * count if t % period == 0 else what
            for what, period in zip((x, u, v), periods, strict=True)
        )
        for m in range(count):
            g = gradients[m][t]
            u[m] = BETAS[0] * u[m] + (1 - BETAS[0]) * g
            v[m] = BETAS[1] * v[m] + (1 - BETAS[1]) * g * g
            first, second = u[m] / (1 - BETAS[0] ** (t + 1)), v[m] / (1 - BETAS[1] ** (t + 1))
            x[m] -= LR * first / (math.sqrt(second) + EPS)
        history.append(list(x))
    return history


def test_the_printed_order_differs_only_in_where_a_gradient_is_taken() -> None:
    """Gradients that do not depend on the parameters make the two one; ours only averages a step earlier."""
    generator, periods = torch.Generator().manual_seed(3), (2, 3, 4)
    gradients = torch.randn(2, STEPS, generator=generator).tolist()

    def run(worker: Worker) -> list[float]:
        model, history = OneNumber(), []
        optimizer = adam(model)
        sync = cadenza.attach(model, optimizer, cadenza.des_loc(2, momentum_period=3, variance_period=4))
        for gradient in gradients[worker.rank]:
            optimizer.zero_grad()
            model(gradient).backward()
            optimizer.step()
            sync.step()
            history.append(model.x.item())
        return history

    with workers(2) as pool:
        found = pool.run(run)
    for n, expected in enumerate(literal(gradients, periods), start=1):
        if n % 2:
            assert [history[n - 1] for history in found] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("count", [2, 3])
def test_it_resumes_after_every_step(count: int) -> None:
    strategy = cadenza.des_loc(2, momentum_period=3, variance_period=4)
    assert_resumes_after_every_step(strategy, count=count, steps=9, inner=adam)


def test_it_goes_with_an_outer_update_fragments_a_warm_up_and_any_optimizer() -> None:
    strategies: list[tuple[Strategy, Any]] = [
        (cadenza.des_loc(2, outer=cadenza.nesterov(1.0), fragments=cadenza.by_layers(2)), adam),
        (cadenza.des_loc(2, warmup_steps=3), adam),
        (cadenza.local_sgd(4, optimizer_state=moments(momentum_buffer=2)), momentum_sgd),
        (cadenza.hierarchical({2: 2, 4: "all"}, optimizer_state=moments(momentum_buffer=3)), momentum_sgd),
    ]
    for strategy, inner in strategies:
        with workers(4) as pool:
            first, *others = pool.run(lambda _, s=strategy, i=inner: train(s, 7, optimizer=i))
        assert all(same_bits(first.finished, other.finished) for other in others)


def test_periods_of_moments_count_from_the_end_of_the_warm_up() -> None:
    def run(worker: Worker) -> list[float]:
        model, history = OneNumber(), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
        strategy = cadenza.post_local_sgd(100, warmup_steps=1, optimizer_state=moments(momentum_buffer=2))
        sync = cadenza.attach(model, optimizer, strategy)
        for n in range(3):
            optimizer.zero_grad()
            model(8.0 * worker.rank if n else 4.0).backward()
            sync.average_gradients()
            optimizer.step()
            sync.step()
            history.append(optimizer.state[model.x]["momentum_buffer"].item())
        return history

    with workers(2) as pool:  # 4, then 2 + g, then half of it + g, averaged
        assert pool.run(run) == [[4.0, 2.0, 7.0], [4.0, 10.0, 7.0]]


def test_a_worker_without_data_gets_the_others_moments_and_does_not_count() -> None:
    def run(worker: Worker) -> float:
        model = OneNumber()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
        sync = cadenza.attach(model, optimizer, cadenza.local_sgd(1, optimizer_state=moments(momentum_buffer=2)))
        for _ in range(1 + worker.rank):
            optimizer.zero_grad()
            model(4.0 * worker.rank).backward()
            optimizer.step()
            sync.step()
        sync.drain()
        return optimizer.state[model.x]["momentum_buffer"].item()

    with workers(2) as pool:
        assert pool.run(run) == [6.0, 6.0]


def once(worker: Worker, strategy: Strategy, broken: str) -> tuple[Any, ...]:
    model = CASES["mlp"].model(worker.rank)
    optimizer = adam(model)
    sync = cadenza.attach(model, optimizer, strategy)
    CASES["mlp"].backward(model, worker.rank, 1)
    last = list(model.parameters())[-1]
    if broken == "one has no state" and worker.rank == 1:
        last.grad = None
    if broken == "none on one" and worker.rank == 1:
        optimizer.zero_grad()
    optimizer.step()
    if broken == "nan" and worker.rank == 1:
        optimizer.state[last]["exp_avg"][0] = math.nan
    before = values(model)
    result = outcome(sync.step)
    assert same_bits(values(model), before)
    return result


@pytest.mark.parametrize("count", [1, 2])
def test_an_entry_that_the_optimizer_does_not_have_is_refused(count: int) -> None:
    strategy = cadenza.local_sgd(9, optimizer_state=moments(exp_avg=1, momentum_buffer=1))
    with workers(count) as pool:
        first, *others = pool.run(once, strategy, "")
    assert first[1] == UnsupportedTensorError.__name__
    assert "has no momentum_buffer to average at step 1; it has exp_avg and exp_avg_sq. Name what" in first[2]
    assert all(other == first for other in others)


@pytest.mark.parametrize(
    ("broken", "error", "text"),
    [
        ("one has no state", DisagreementError, "optimizer state 4.bias/exp_avg"),
        ("none on one", UnsupportedTensorError, "has no exp_avg to average at step 1; it has nothing that has a mean"),
        ("nan", NotFiniteError, "optimizer state 4.bias/exp_avg is not finite"),
    ],
)
def test_state_that_differs_or_is_broken_is_found_by_all_and_nothing_is_changed(
    broken: str, error: type[Exception], text: str
) -> None:
    with workers(2) as pool:
        first, other = pool.run(once, cadenza.local_sgd(9, optimizer_state=moments(exp_avg=1)), broken)
    assert first == other
    assert first[1] == error.__name__
    assert text in first[2]


@pytest.mark.parametrize(
    "options",
    [{"delay": 1}, {"balanced": True}, {"faults": cadenza.shrink()}],
    ids=["delay", "balanced", "shrink"],
)
def test_what_does_not_go_with_moments_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"moments|optimizer state"):
        cadenza.local_sgd(4, optimizer_state=moments(exp_avg=8), **options)


def test_a_parameter_that_is_one_number_has_moments_too() -> None:
    def run(worker: Worker) -> float:
        x = nn.Parameter(torch.tensor(1.0))
        model = nn.ParameterList([x])
        optimizer = adam(model)
        sync = cadenza.attach(model, optimizer, cadenza.des_loc(1, momentum_period=1))
        (x * worker.rank).backward()
        optimizer.step()
        sync.step()
        return optimizer.state[x]["exp_avg"].item()

    with workers(2) as pool:
        assert pool.run(run) == [pytest.approx(0.05)] * 2


def bytes_told(strategy: Strategy) -> int:
    def run(worker: Worker) -> int:
        model = CASES["mlp"].model(worker.rank)
        optimizer, reports = adam(model), list[cadenza.RoundReport]()
        with cadenza.attach(model, optimizer, strategy, observers=[reports.append]) as sync:
            for n in range(1, 13):
                CASES["mlp"].backward(model, worker.rank, n)
                optimizer.step()
                sync.step()
        return sum(report.bytes_sent for report in reports)

    with workers(2) as pool:
        return pool.run(run)[0]


def test_the_bytes_of_moments_are_told() -> None:
    parameters = bytes_told(cadenza.local_sgd(period=4))  # three rounds
    with_moments = bytes_told(cadenza.local_sgd(period=4, optimizer_state=moments(exp_avg=4, exp_avg_sq=12)))
    # Four more of the same size; a round's own header and tally apart.
    assert with_moments == pytest.approx(parameters * (3 + 4) / 3, rel=0.1)

"""MuLoCo (arXiv 2505.23725): DiLoCo over workers that train with Muon, against its equations, after every step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import cadenza
from cadenza import Strategy
from cadenza.codecs import error_feedback, int8
from cadenza.optim import muon_and_adamw
from cadenza.testing import Worker, workers
from cadenza.testing import references as algorithms
from cadenza.testing.references import History, Workers
from support.models import CASES
from support.resuming import assert_resumes_after_every_step
from support.training import Trace, momentum_sgd, train, values
from support.trajectories import assert_same_way

PERIOD, STEPS = 3, 8


class Both:
    """Two optimizers as one, for the reference: Muon for the MLP's hidden matrices, chosen by hand."""

    def __init__(self, model: nn.Module) -> None:
        parameters = dict(model.named_parameters())
        hidden = [parameters.pop("0.weight"), parameters.pop("2.weight")]
        rest = list(parameters.values())
        self.muon = torch.optim.Muon(hidden, lr=0.02, momentum=0.95, nesterov=False, weight_decay=0.01)
        self.adamw = torch.optim.AdamW(rest, lr=0.003, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.01)

    def zero_grad(self) -> None:
        self.muon.zero_grad()
        self.adamw.zero_grad()

    def step(self) -> None:
        self.muon.step()
        self.adamw.step()


def two_optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    return muon_and_adamw(model, lr=0.02, adamw_lr=0.003)


def with_torchs_sgd(run: Workers) -> History:
    """The authors' way: torch's Nesterov SGD on theta_ref, with the mean difference as its gradient."""
    anchors = [tensor.clone() for tensor in run.parameters[0]]
    outer = algorithms.Nesterov(anchors, lr=0.7, momentum=0.6)  # rounds alike on all machines, which torch's does not
    history = []

    def come_together() -> None:
        for k, anchor in enumerate(anchors):
            anchor.grad = algorithms.mean([anchor - tensors[k] for tensors in run.parameters])
        outer.step()
        for tensors in run.parameters:
            for tensor, anchor in zip(tensors, anchors, strict=True):
                tensor.copy_(anchor)

    for n in range(1, STEPS + 1):
        run.local_step(n)
        if n % PERIOD == 0:
            come_together()
        history.append(run.snapshot())
    come_together()
    return [*history, run.snapshot()]


def by_the_equations(run: Workers) -> History:
    """u ← μ·u + η·Δ; θ ← θ_ref − μ·u − η·Δ, as the authors write it."""
    reference = run.snapshot()[0]
    u, history = torch.zeros_like(reference), []
    for n in range(1, STEPS + 2):
        if n <= STEPS:
            run.local_step(n)
        if n % PERIOD == 0 or n > STEPS:
            delta = reference - algorithms.mean(run.snapshot())
            u = 0.6 * u + 0.7 * delta
            reference = reference - 0.6 * u - 0.7 * delta
            for tensors in run.parameters:
                algorithms.unflatten(reference, tensors)
        history.append(run.snapshot())
    return history


def with_muon(worker: Worker, strategy: Strategy) -> Trace:
    trace, case = Trace(), CASES["mlp"]
    model = case.model(worker.rank)
    optimizers = two_optimizers(model)
    with cadenza.attach(model, optimizers, strategy) as sync:
        for n in range(1, STEPS + 1):
            for optimizer in optimizers:
                optimizer.zero_grad()
            case.backward(model, worker.rank, n)
            for optimizer in optimizers:
                optimizer.step()
            sync.step()
            trace.history.append(values(model))
    trace.history.append(values(model))
    return trace


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    """Workers have one thread each, and Muon's products in another order would be other bits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_muon_inside_walks_the_authors_way_to_the_bit(count: int) -> None:
    expected = with_torchs_sgd(Workers(CASES["mlp"], count, Both))  # type: ignore[arg-type]
    with workers(count) as pool:
        assert_same_way(pool.run(with_muon, cadenza.muloco(PERIOD, defaults="paper")), expected, bits=True)


@pytest.mark.parametrize("count", [2, 4])
def test_the_outer_step_is_that_of_its_equations(count: int) -> None:
    with workers(count) as pool:
        traces = pool.run(lambda _: train(cadenza.muloco(PERIOD, defaults="paper"), STEPS))
    assert_same_way(traces, by_the_equations(Workers(CASES["mlp"], count, momentum_sgd)), bits=False)


@pytest.mark.parametrize(
    "strategy",
    [
        cadenza.muloco(PERIOD, defaults="paper"),
        cadenza.muloco(PERIOD, codec=error_feedback(int8(block=16), decay=0.9), delay=1),
    ],
    ids=["exact", "int8 and late"],
)
def test_it_resumes_after_every_step(strategy: Strategy) -> None:
    assert_resumes_after_every_step(strategy, steps=7, inner=two_optimizers)


def test_a_framework_may_own_the_loop() -> None:
    def automatic(worker: Worker) -> tuple[int, torch.Tensor]:
        model = CASES["mlp"].model(worker.rank)
        optimizers = two_optimizers(model)
        with cadenza.attach(model, optimizers, cadenza.muloco(PERIOD, defaults="paper"), auto=True) as sync:
            for n in range(1, STEPS + 1):
                for optimizer in optimizers:
                    optimizer.zero_grad()
                CASES["mlp"].backward(model, worker.rank, n)
                for optimizer in optimizers:
                    optimizer.step()
        return sync.clock, values(model)

    with workers(2) as pool:
        by_hand = pool.run(with_muon, cadenza.muloco(PERIOD, defaults="paper"))
        for (clock, got), trace in zip(pool.run(automatic), by_hand, strict=True):
            assert clock == STEPS
            assert torch.equal(got, trace.finished)

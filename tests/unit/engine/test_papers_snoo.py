"""SNOO (arXiv 2510.15830), the outer step over data-parallel training, against its equations, after every step."""

from __future__ import annotations

import pytest
import torch

import cadenza
from cadenza import Strategy
from cadenza.errors import CadenzaError
from cadenza.testing import Worker, workers
from cadenza.testing import references as algorithms
from cadenza.testing.references import History, Workers
from support.compare import same_bits
from support.models import CASES
from support.resuming import assert_resumes_after_every_step
from support.training import Trace, adam, momentum_sgd, one_number, train
from support.trajectories import assert_same_way

PERIOD, STEPS = 3, 11


def reference(run: Workers, *, lr: float = 0.7, mu: float = 0.8) -> History:
    """s = w − w̃; b ← μ·b + s; w ← w − η·(μ·b + s), every K steps on mean gradients; nothing more at the end."""
    slow = run.snapshot()[0]
    momentum, history = torch.zeros_like(slow), []
    for n in range(1, STEPS + 1):
        run.step_on_mean_gradient(n)
        if n % PERIOD == 0:
            moved = slow - run.snapshot()[0]
            momentum = mu * momentum + moved
            slow = slow - lr * (mu * momentum + moved)
            for tensors in run.parameters:
                algorithms.unflatten(slow, tensors)
        history.append(run.snapshot())
    return [*history, run.snapshot()]


def traces(count: int, strategy: Strategy, **options: object) -> list[Trace]:
    with workers(count) as pool:
        return pool.run(lambda _: train(strategy, STEPS, **options))


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_it_walks_the_way_of_the_paper(count: int) -> None:
    expected = reference(Workers(CASES["mlp"], count, momentum_sgd))
    assert_same_way(traces(count, cadenza.snoo(PERIOD)), expected, bits=False)


def test_it_leaves_the_inner_optimizer_alone() -> None:
    expected = reference(Workers(CASES["mlp"], 2, adam), lr=0.68, mu=0.37)
    strategy = cadenza.snoo(PERIOD, outer_lr=0.68, outer_momentum=0.37)
    assert_same_way(traces(2, strategy, optimizer=adam), expected, bits=False)


def test_all_workers_hold_the_same_bits_after_every_step_and_send_nothing_in_rounds() -> None:
    found = traces(3, cadenza.snoo(PERIOD))
    for trace in found:
        assert all(same_bits(a, b) for a, b in zip(trace.history, found[0].history, strict=True))
        rounds = [report for report in trace.reports if report.level == 0]
        assert [report.step for report in rounds] == [3, 6, 9]
        assert not any(report.bytes_sent for report in rounds)


def test_without_momentum_and_with_lr_1_the_outer_step_changes_nothing() -> None:
    with_it = traces(2, cadenza.snoo(PERIOD, outer_lr=1.0, outer_momentum=0.0))
    run = Workers(CASES["mlp"], 2, momentum_sgd)
    history = []
    for n in range(1, STEPS + 1):
        run.step_on_mean_gradient(n)
        history.append(run.snapshot())
    assert_same_way(with_it, [*history, run.snapshot()], bits=False)


def test_forgetting_to_average_gradients_is_told() -> None:
    def forget(_: Worker) -> None:
        _, _, step = one_number(cadenza.snoo(PERIOD))
        step(1.0)

    with workers(2) as pool, pytest.raises(CadenzaError, match=r"sync\.average_gradients\(\)"):
        pool.run(forget)


def test_workers_that_come_and_go_are_refused() -> None:
    with pytest.raises(ValueError, match="shrink cannot be combined with groups of fixed ranks"):
        cadenza.snoo(PERIOD, faults=cadenza.shrink())


@pytest.mark.parametrize("inner", [momentum_sgd, adam])
def test_it_resumes_after_every_step(inner: object) -> None:
    assert_resumes_after_every_step(cadenza.snoo(PERIOD), inner=inner)  # type: ignore[arg-type]

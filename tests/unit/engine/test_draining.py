"""A worker that runs out of data: what it has learned since the last round counts, and then no more."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import cadenza
from cadenza import RoundReport, Strategy
from cadenza.strategy import LevelPlan
from cadenza.testing import Worker, workers
from support.training import one_number

Rounds = list[tuple[int, int, tuple[float, ...]]]


def run_out(strategy: Strategy, batches: list[int], *, samples: float | None = None) -> list[tuple[float, Rounds]]:
    """Let each worker take its own number of steps of −0.1, drain and finish; return where it ends, and its rounds."""

    def run(worker: Worker) -> tuple[float, Rounds]:
        reports: list[RoundReport] = []
        model, sync, _ = one_number(strategy, observers=[reports.append])
        [optimizer] = sync.replica.view.optimizers
        for _ in range(batches[worker.rank]):
            optimizer.zero_grad()
            model(1.0).backward()
            optimizer.step()
            sync.step(samples=samples)
        sync.drain()
        sync.finish()
        return model.x.item(), [(report.step, report.level, report.weights) for report in reports]

    with workers(len(batches)) as pool:
        return pool.run(run)


def test_steps_since_the_last_round_count_in_the_next_one() -> None:
    for value, rounds in run_out(cadenza.local_sgd(4), [3, 12]):
        assert rounds == [(4, 0, (0.5, 0.5)), (8, 0, (0.0, 1.0)), (12, 0, (0.0, 1.0)), (16, 0, (0.5, 0.5))]
        assert value == pytest.approx(1 - 0.35 - 0.8)


def test_all_that_stop_in_one_period_take_a_usual_round() -> None:
    """Once, up to a period's steps were thrown away: the outer step too."""
    strategy = cadenza.diloco(500, outer_lr=1.0, outer_momentum=0.0)
    for value, rounds in run_out(strategy, [499, 499]):
        assert rounds == [(500, 0, (0.5, 0.5))]
        assert value == pytest.approx(1 - 49.9, rel=1e-4)


def test_they_count_with_their_weight() -> None:
    for value, rounds in run_out(cadenza.local_sgd(4, weight="samples"), [1, 4], samples=8.0):
        assert rounds[0] == (4, 0, (0.2, 0.8))
        assert value == pytest.approx(1 - 0.2 * 0.1 - 0.8 * 0.4)


def test_steps_after_a_late_launch_count_in_the_round_after_it() -> None:
    for value, rounds in run_out(cadenza.local_sgd(4, delay=2), [5, 8]):
        assert [weights for _, _, weights in rounds][:2] == [(0.5, 0.5), (0.5, 0.5)]
        # Both at −0.4; then rank 0 takes one step more and rank 1 four: −0.25 at the mean of both.
        assert value == pytest.approx(1 - 0.4 - 0.25)


def test_steps_count_once_at_every_level() -> None:
    levels = (LevelPlan(2, groups=((0, 1), (2, 3))), LevelPlan(8, groups="all"))
    for _, rounds in run_out(Strategy(levels=levels), [1, 8, 8, 8])[:2]:
        inner = [weights for _, level, weights in rounds if level == 0]
        assert inner[:3] == [(0.5, 0.5), (0.0, 1.0), (0.0, 1.0)]
        assert next(weights for _, level, weights in rounds if level == 1) == (0.25,) * 4


def test_every_fragment_counts_them() -> None:
    def run(worker: Worker) -> tuple[list[float], list[tuple[float, ...]]]:
        reports: list[RoundReport] = []
        model = nn.ModuleDict({f"{i}": nn.ParameterDict({"w": torch.ones(1)}) for i in range(2)})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        strategy = cadenza.local_sgd(4, fragments=cadenza.by_layers(1))
        sync = cadenza.attach(model, optimizer, strategy, observers=[reports.append])
        for _ in range([1, 4][worker.rank]):
            optimizer.zero_grad()
            sum(p.sum() for p in model.parameters()).backward()  # type: ignore[union-attr]
            optimizer.step()
            sync.step()
        sync.drain()
        sync.finish()
        return [p.item() for p in model.parameters()], [report.weights for report in reports]

    with workers(2) as pool:
        for values, weights in pool.run(run):
            assert weights[:2] == [(0.5, 0.5), (0.5, 0.5)]
            assert values == pytest.approx([1 - 0.15 - 0.2, 1 - 0.25])


@pytest.mark.parametrize(
    "strategy",
    [cadenza.local_sgd(4, balanced=True), cadenza.diloco(4, outer_lr=1.0, outer_momentum=0.0, balanced=True)],
    ids=["mean", "sgd"],
)
def test_a_worker_alone_in_its_period_counts_alone_where_workers_are_balanced(strategy: Strategy) -> None:
    for value, rounds in run_out(strategy, [0, 2]):
        assert rounds[0][2] == (0.0, 1.0)
        assert value == pytest.approx(0.8)


def test_drained_steps_are_normalised_by_their_own_number_where_workers_are_balanced() -> None:
    for value, rounds in run_out(cadenza.local_sgd(4, balanced=True), [1, 3]):
        # FedNova: both moved −0.1 a step, and 2 steps is the mean; the differences are −0.1 and −0.3.
        assert rounds[0][2] == pytest.approx((0.5 * 2 / 1, 0.5 * 2 / 3))
        assert value == pytest.approx(0.8)


# ---- what travels beside the parameters ----------------------------------------------------------------------------


class Statistics(nn.Module):
    """A number to train and a buffer that each worker sets."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(1))
        self.register_buffer("mean", torch.zeros(2))


def beside(strategy: Strategy, *, steps: list[int], samples: list[float], poison: bool = False) -> list[Any]:
    def run(worker: Worker) -> tuple[list[float], float]:
        model = Statistics()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        sync = cadenza.attach(model, optimizer, strategy)
        model.x.sum().backward()
        optimizer.step()  # so that all have state
        model.mean.fill_(float(worker.rank))
        optimizer.state[model.x]["momentum_buffer"].fill_(float(worker.rank))
        if poison and worker.rank == 0:
            model.mean.fill_(torch.nan)
        for _ in range(steps[worker.rank]):
            sync.step(samples=samples[worker.rank])
        sync.drain()
        sync.finish()
        return model.mean.tolist(), optimizer.state[model.x]["momentum_buffer"].item()

    with workers(2) as pool:
        return pool.run(run)


def test_buffers_and_optimizer_state_have_the_weights_of_the_parameters() -> None:
    strategy = cadenza.local_sgd(1, weight="samples", buffers=True, optimizer_state="average")
    for mean, momentum in beside(strategy, steps=[1, 1], samples=[1.0, 3.0]):
        assert mean == pytest.approx([0.75] * 2)
        assert momentum == pytest.approx(0.75)


@pytest.mark.parametrize("poison", [False, True])
def test_statistics_of_a_worker_without_data_do_not_count(poison: bool) -> None:
    strategy = cadenza.local_sgd(1, buffers=True, optimizer_state="average")
    for mean, momentum in beside(strategy, steps=[0, 1], samples=[1.0, 1.0], poison=poison):
        assert mean == [1.0] * 2
        assert momentum == 1.0


def test_a_round_that_finds_nothing_new_takes_no_outer_step() -> None:
    """Momentum alone would carry the parameters on, for as long as somebody drains."""
    for value, rounds in run_out(cadenza.diloco(4, outer_lr=1.0, outer_momentum=0.5), [4, 4]):
        assert [step for step, _, _ in rounds] == [4, 8]
        assert value == pytest.approx(1 - 1.5 * 0.4)  # Nesterov's first step: (1 + momentum) times the difference

"""PeriodicModelAverager beside torch's: the same parameters, counters, warnings and errors after every step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from support.compare import assert_models_agree, assert_same_on_ranks, warned
from support.models import CASES
from support.ranks import RankPool, outcome
from support.sides import OURS, TORCH, Side


def fires(step: int, period: int, warmup_steps: int) -> bool:
    return step >= warmup_steps and (step - warmup_steps) % period == 0


def train_side_by_side(case_name: str, steps: int, period: int, warmup_steps: int, optimizer: str) -> int:
    """Train two copies of a model, one averaged by torch and one by us; return how often they were averaged."""
    case, rank, world = CASES[case_name], dist.get_rank(), dist.get_world_size()
    exact = case.exact and world == 2  # the sum of two numbers does not depend on their order
    theirs, ours = case.model(rank), case.model(rank)
    optimizers = [make_optimizer(optimizer, case.groups(model)) for model in (theirs, ours)]
    averagers = [side.PeriodicModelAverager(period=period, warmup_steps=warmup_steps) for side in (TORCH, OURS)]
    rounds = 0
    for step in range(steps):
        where = f"step {step}"
        for model, optim, averager in zip((theirs, ours), optimizers, averagers, strict=True):
            case.backward(model, rank, step)
            optim.step()
            averager.average_parameters(optim.param_groups if case_name == "param_groups" else model.parameters())
        # Torch's averaging loses channels_last, which changes how the next convolution rounds: give it back.
        if case_name == "conv_channels_last":
            theirs.to(memory_format=torch.channels_last)
        assert averagers[0].step == averagers[1].step == step + 1
        assert_models_agree(theirs, ours, where, exact=exact)
        if fires(step, period, warmup_steps):
            rounds += 1
            assert_same_on_ranks(where, [p for p in ours.parameters() if p.grad is not None])
        if not exact:  # each step is then compared by itself, so that the bound is that of one averaging
            ours.load_state_dict(theirs.state_dict())
        for optim in optimizers:
            optim.zero_grad()
    return rounds


def make_optimizer(name: str, groups: Any) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(groups, lr=0.05, momentum=0.9)
    return torch.optim.AdamW(groups, lr=0.01)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("case", list(CASES))
def test_parameters_agree_after_every_step(ranks: RankPool, transport: dict[str, str], world: int, case: str) -> None:
    rounds = ranks.run(world, train_side_by_side, case, 24, 4, 5, "sgd", env=transport)
    assert rounds == [5] * world


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(("period", "warmup_steps", "rounds"), [(2, 0, 9), (3, 7, 4), (5, 17, 1), (4, 99, 0)])
def test_periods_and_warm_ups_agree(ranks: RankPool, world: int, period: int, warmup_steps: int, rounds: int) -> None:
    assert ranks.run(world, train_side_by_side, "mlp", 18, period, warmup_steps, "adamw") == [rounds] * world


@pytest.mark.parametrize("case", [name for name in CASES if CASES[name].exact])
def test_four_ranks_do_not_drift_away_over_many_rounds(ranks: RankPool, case: str) -> None:
    """Without setting ours back to torch's in between: 80 steps, 40 rounds."""
    ranks.run(4, train_without_alignment, case, 80, 2)


def train_without_alignment(case_name: str, steps: int, period: int) -> None:
    case, rank = CASES[case_name], dist.get_rank()
    models = [case.model(rank), case.model(rank)]
    for model, side in zip(models, (TORCH, OURS), strict=True):
        optim = torch.optim.SGD(case.groups(model), lr=0.02)
        averager = side.PeriodicModelAverager(period=period)
        for step in range(steps):
            case.backward(model, rank, step)
            optim.step()
            averager.average_parameters(model.parameters())
            model.to(memory_format=torch.channels_last) if case_name == "conv_channels_last" else None
            optim.zero_grad()
    for (name, a), b in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def average_over_groups(side: Side) -> list[float]:
    """Two pairs average among themselves, then the even and the odd ranks."""
    parameter = torch.nn.Parameter(torch.tensor([float(dist.get_rank())]))
    parameter.grad = torch.ones(1)
    values = []
    for members in ([[0, 1], [2, 3]], [[0, 2], [1, 3]]):
        group, _ = dist.new_subgroups_by_enumeration(members)
        averager = side.PeriodicModelAverager(period=2, process_group=group)
        averager.average_parameters([parameter])
        values.append(parameter.item())
    return values


def test_averaging_over_subgroups_agrees(ranks: RankPool, transport: dict[str, str]) -> None:
    theirs = ranks.run(4, average_over_groups, TORCH)
    assert ranks.run(4, average_over_groups, OURS, env=transport) == theirs
    assert theirs[0] == [0.5, 1.5]


def construct(side: Side, arguments: dict[str, Any]) -> tuple[Any, Any]:
    def build() -> tuple[int, int, int]:
        averager = side.PeriodicModelAverager(**arguments)
        return averager.period, averager.warmup_steps, averager.step

    found: list[Any] = []
    warnings = warned(lambda: found.append(outcome(build)))
    return found[0], warnings


ARGUMENTS = [
    {"period": 4},
    {"period": 4, "warmup_steps": 0},
    {"period": 4, "warmup_steps": 100},
    {"period": 1},
    {"period": 1, "warmup_steps": 3},
    {"period": 0},
    {"period": -2},
    {"period": 4, "warmup_steps": -1},
    {"period": 0, "warmup_steps": -1},
]


def test_warnings_and_errors_of_the_constructor_agree(ranks: RankPool) -> None:
    [theirs] = ranks.run(1, construct_all, TORCH)
    [ours] = ranks.run(1, construct_all, OURS)
    for arguments, their, our in zip(ARGUMENTS, theirs, ours, strict=True):
        assert our == their, arguments


def construct_all(side: Side) -> list[Any]:
    return [construct(side, arguments) for arguments in ARGUMENTS]


def resume(side: Side) -> list[int]:
    """A program may set the counter itself, as torch's optimizer does when it loads a state dict."""
    averager = side.PeriodicModelAverager(period=3, warmup_steps=2)
    parameter = torch.nn.Parameter(torch.zeros(1))
    fired = []
    averager.step = 7
    for step in range(7, 16):
        parameter.data.fill_(float(dist.get_rank()))
        parameter.grad = torch.ones(1)
        averager.average_parameters([parameter])
        if parameter.item() == 0.5:
            fired.append(step)
    return [*fired, averager.step]


def test_a_step_set_from_outside_is_where_both_go_on(ranks: RankPool) -> None:
    assert ranks.run(2, resume, OURS) == ranks.run(2, resume, TORCH) == [[8, 11, 14, 16]] * 2

"""PostLocalSGDOptimizer beside torch's: parameters, state dicts in both directions, schedulers, warnings."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from support.compare import assert_models_agree, assert_parity, warned
from support.models import CASES
from support.ranks import RankPool
from support.sides import OURS, TORCH, Side

PERIOD, WARMUP = 4, 3


def inner(name: str, groups: Any) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(groups, lr=0.05, momentum=0.9, weight_decay=0.01)
    if name == "adamw":
        return torch.optim.AdamW(groups, lr=0.01)
    return torch.optim.RMSprop(groups, lr=0.002, momentum=0.5)


def averager(side: Side, kind: str) -> Any:
    if kind == "periodic":
        return side.PeriodicModelAverager(period=PERIOD, warmup_steps=WARMUP)
    world = dist.get_world_size()
    return side.HierarchicalModelAverager(OrderedDict([(2, world // 2), (4, world)]), warmup_steps=WARMUP)


def wrapped(side: Side, model: nn.Module, case: str, optimizer: str, kind: str = "periodic") -> Any:
    return side.PostLocalSGDOptimizer(optim=inner(optimizer, CASES[case].groups(model)), averager=averager(side, kind))


def scheduler(name: str | None, optimizer: Any) -> Any:
    if name == "step":
        return torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)
    if name == "cosine":
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
    return None


def plain(state_dict: dict[str, Any]) -> dict[str, Any]:
    """A state dict without what ours adds to the parameter groups (the step, so that checkpoints keep it)."""
    groups = [{k: v for k, v in g.items() if k != "averager_step"} for g in state_dict["param_groups"]]
    return {**state_dict, "param_groups": groups}


def assert_state_dicts_agree(theirs: dict[str, Any], ours: dict[str, Any], where: str, *, exact: bool) -> None:
    theirs, ours = plain(theirs), plain(ours)
    assert list(ours) == list(theirs), where
    assert ours["step"] == theirs["step"], where
    assert type(ours["step"]) is int
    assert ours["param_groups"] == theirs["param_groups"], where
    assert ours["state"].keys() == theirs["state"].keys(), where
    for position, state in theirs["state"].items():
        assert ours["state"][position].keys() == state.keys(), where
        for name, value in state.items():
            if value is None:
                assert ours["state"][position][name] is None
                continue
            place = f"{where}, state {position} {name}"
            assert_parity(place, value, ours["state"][position][name], exact=exact)


def train_side_by_side(case_name: str, optimizer: str, kind: str, schedule: str | None, steps: int) -> None:
    case, rank = CASES[case_name], dist.get_rank()
    exact = case.exact and dist.get_world_size() == 2
    theirs, ours = case.model(rank), case.model(rank)
    optimizers = [
        wrapped(side, model, case_name, optimizer, kind)
        for side, model in zip((TORCH, OURS), (theirs, ours), strict=True)
    ]
    schedulers = [scheduler(schedule, o) for o in optimizers]
    for step in range(steps):
        for model, optim, lr in zip((theirs, ours), optimizers, schedulers, strict=True):
            optim.zero_grad()
            case.backward(model, rank, step)
            assert optim.step() is None
            if lr is not None:
                lr.step()
        if case_name == "conv_channels_last":  # torch's averaging loses it
            theirs.to(memory_format=torch.channels_last)
        assert optimizers[0].averager.step == optimizers[1].averager.step == step + 1
        assert_models_agree(theirs, ours, f"step {step}", exact=exact)
        dicts = [o.state_dict() for o in optimizers]
        assert_state_dicts_agree(*dicts, f"step {step}", exact=exact)
        if not exact:
            ours.load_state_dict(theirs.state_dict())
            optimizers[1].optim.load_state_dict(copy.deepcopy(optimizers[0].optim.state_dict()))
    if schedule is not None:
        assert (
            optimizers[1].optim.param_groups[0]["lr"]
            != inner(optimizer, nn.Linear(1, 1).parameters()).param_groups[0]["lr"]
        )


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("case", list(CASES))
def test_parameters_and_state_dicts_agree_after_every_step(ranks: RankPool, world: int, case: str) -> None:
    ranks.run(world, train_side_by_side, case, "sgd", "periodic", "step", 16)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("kind", ["periodic", "hierarchical"])
@pytest.mark.parametrize("optimizer", ["adamw", "rmsprop"])
def test_other_optimizers_averagers_and_schedulers_agree(
    ranks: RankPool, transport: dict[str, str], world: int, kind: str, optimizer: str
) -> None:
    ranks.run(world, train_side_by_side, "mlp", optimizer, kind, "cosine", 16, env=transport)


def move_over(source: Side, target: Side, optimizer: str) -> list[Any]:
    """Train with one side, save, load into the other, train on: as long as one that never moved."""
    case, rank = CASES["param_groups"], dist.get_rank()
    steps, moved_at = 15, 6
    results = []
    for sides in ((source, source), (source, target)):
        model = case.model(rank)
        optim = wrapped(sides[0], model, case.name, optimizer)
        for step in range(steps):
            if step == moved_at:
                saved = copy.deepcopy((model.state_dict(), optim.state_dict()))
                model = case.model(rank)
                model.load_state_dict(saved[0])
                optim = wrapped(sides[1], model, case.name, optimizer)
                assert not warned(optim.load_state_dict, saved[1])
                assert optim.averager.step == moved_at
            optim.zero_grad()
            case.backward(model, rank, step)
            optim.step()
        results.append((model, optim.state_dict()))
    (theirs, their_dict), (ours, our_dict) = results
    assert_models_agree(theirs, ours, "at the end", exact=True)
    assert_state_dicts_agree(their_dict, our_dict, "at the end", exact=True)
    return [our_dict["step"], steps]


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize(("source", "target"), [(TORCH, OURS), (OURS, TORCH)], ids=["into_ours", "into_torchs"])
def test_a_state_dict_of_one_goes_on_in_the_other(ranks: RankPool, source: Side, target: Side, optimizer: str) -> None:
    assert ranks.run(2, move_over, source, target, optimizer) == [[15, 15]] * 2


def load_without_step(side: Side) -> tuple[Any, int]:
    model = nn.Linear(2, 1)
    optim = wrapped(side, model, "mlp", "sgd")
    optim.averager.step = 9
    told = warned(optim.load_state_dict, torch.optim.SGD(model.parameters(), lr=0.05).state_dict())
    return told, optim.averager.step


def test_a_state_dict_without_a_step_warns_alike_and_sets_it_to_zero(ranks: RankPool) -> None:
    [theirs] = ranks.run(1, load_without_step, TORCH)
    [ours] = ranks.run(1, load_without_step, OURS)
    assert ours == theirs
    assert theirs[1] == 0
    assert len(theirs[0]) == 1


def delegate(side: Side) -> list[Any]:
    model, more = nn.Linear(2, 1), nn.Linear(1, 1)
    optim = wrapped(side, model, "mlp", "sgd")
    model(torch.ones(2)).backward()
    optim.zero_grad(set_to_none=False)
    zeroed = [p.grad.tolist() for p in model.parameters() if p.grad is not None]
    optim.zero_grad()
    optim.add_param_group({"params": list(more.parameters()), "lr": 0.5})
    learning_rates = [[g["lr"] for g in groups] for groups in (optim.param_groups, optim.optim.param_groups)]
    cleared = [p.grad for p in model.parameters()]
    return [zeroed, cleared, learning_rates, len(optim.state), optim.optim.state is optim.state]


def test_zero_grad_add_param_group_and_state_delegate_alike(ranks: RankPool) -> None:
    assert ranks.run(1, delegate, OURS) == ranks.run(1, delegate, TORCH)


def describe(side: Side) -> tuple[str, bool]:
    optim = wrapped(side, nn.Linear(2, 1), "mlp", "sgd")
    text = "\n".join(line for line in repr(optim).splitlines() if "averager_step" not in line)
    return text, isinstance(optim, torch.optim.Optimizer)


def test_the_text_of_the_optimizer_is_that_of_the_inner_one(ranks: RankPool) -> None:
    assert ranks.run(1, describe, OURS) == ranks.run(1, describe, TORCH)


def train_mixed(optimizer_of: Side, averager_of: Side) -> list[torch.Tensor]:
    case, rank = CASES["mlp"], dist.get_rank()
    model = case.model(rank)
    optim = optimizer_of.PostLocalSGDOptimizer(inner("sgd", model.parameters()), averager(averager_of, "periodic"))
    for step in range(9):
        optim.zero_grad()
        case.backward(model, rank, step)
        optim.step()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize(("optimizer_of", "averager_of"), [(OURS, TORCH), (TORCH, OURS)])
def test_a_program_may_move_over_one_import_at_a_time(ranks: RankPool, optimizer_of: Side, averager_of: Side) -> None:
    theirs = ranks.run(2, train_mixed, TORCH, TORCH)
    ours = ranks.run(2, train_mixed, optimizer_of, averager_of)
    for rank in range(2):
        for a, b in zip(theirs[rank], ours[rank], strict=True):
            assert torch.equal(a, b)

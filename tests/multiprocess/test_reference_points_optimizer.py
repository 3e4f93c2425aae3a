"""Points 19 to 25 of the reference: PostLocalSGDOptimizer."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim.optimizer import register_optimizer_step_post_hook

from support.compare import assert_same_on_ranks, same_bits, values_of, warned
from support.ranks import RankPool, outcome
from support.sides import OURS, TORCH, Side

BOTH = pytest.mark.parametrize("side", [TORCH, OURS])


def layer_of_rank() -> nn.Linear:
    layer = nn.Linear(2, 1)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.fill_(float(dist.get_rank()))
    return layer


def optimizer_of(side: Side, layer: nn.Module, *, period: int = 4, warmup_steps: int = 0, **options: Any) -> Any:
    inner = torch.optim.SGD(layer.parameters(), **{"lr": 0.1, "momentum": 0.9, **options})
    return side.PostLocalSGDOptimizer(inner, side.PeriodicModelAverager(period, warmup_steps))


def train(layer: nn.Module, optimizer: Any, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        layer(torch.full((2,), 1.0 + dist.get_rank())).backward()
        optimizer.step()


# 19


def what_a_torch_optimizer_offers(side: Side) -> dict[str, Any]:
    layer = layer_of_rank()
    optimizer = optimizer_of(side, layer)
    train(layer, optimizer, 2)
    nothing: Any = lambda *_: None  # noqa: E731
    offers = {
        "defaults": lambda: optimizer.defaults["lr"],
        "step pre hook": lambda: optimizer.register_step_pre_hook(nothing) and None,
        "step post hook": lambda: optimizer.register_step_post_hook(nothing) and None,
        "state dict pre hook": lambda: optimizer.register_state_dict_pre_hook(nothing) and None,
        "state dict post hook": lambda: optimizer.register_state_dict_post_hook(nothing) and None,
        "load pre hook": lambda: optimizer.register_load_state_dict_pre_hook(nothing) and None,
        "load post hook": lambda: optimizer.register_load_state_dict_post_hook(nothing) and None,
        "deepcopy": lambda: len(copy.deepcopy(optimizer).state),
        "pickle": lambda: len(pickle.loads(pickle.dumps(optimizer)).state),
    }
    return {name: outcome(offer) for name, offer in offers.items()}


def test_point_19_defaults_hooks_deepcopy_and_pickle_work(ranks: RankPool) -> None:
    [theirs] = ranks.run(1, what_a_torch_optimizer_offers, TORCH)
    working = [name for name, told in theirs.items() if told[0] == "ok"]
    assert working == []
    [ours] = ranks.run(1, what_a_torch_optimizer_offers, OURS)
    assert {name: told[0] for name, told in ours.items()} == dict.fromkeys(ours, "ok")
    assert ours["defaults"] == ("ok", 0.1)
    assert ours["deepcopy"] == ours["pickle"] == ("ok", 2)


def call_hooks() -> list[Any]:
    layer = layer_of_rank()
    optimizer = optimizer_of(OURS, layer)
    calls: list[Any] = []
    optimizer.register_step_pre_hook(lambda o, args, kwargs: calls.append(("before step", o is optimizer)))
    optimizer.register_step_post_hook(lambda o, args, kwargs: calls.append(("after step", o is optimizer)))
    optimizer.optim.register_step_post_hook(lambda o, args, kwargs: calls.append(("after inner step", False)))
    train(layer, optimizer, 1)
    optimizer.register_state_dict_pre_hook(lambda o: calls.append(("before saving", o is optimizer)))
    optimizer.register_state_dict_post_hook(lambda o, saved: {**saved, "mark": 1})
    saved = optimizer.state_dict()
    calls.append(("saved", saved["mark"] == 1 and saved["step"] == 1))
    optimizer.register_load_state_dict_pre_hook(lambda o, saved: {**saved, "step": 7})
    optimizer.register_load_state_dict_post_hook(lambda o: calls.append(("after loading", o is optimizer)))
    optimizer.load_state_dict(saved)
    calls.append(("loaded", optimizer.averager.step == 7))
    return calls


def test_point_19_hooks_are_called_once_and_with_the_wrapper(ranks: RankPool) -> None:
    [calls] = ranks.run(1, call_hooks)
    assert calls == [
        ("before step", True),
        ("after inner step", False),
        ("after step", True),
        ("before saving", True),
        ("saved", True),
        ("after loading", True),
        ("loaded", True),
    ]


def call_global_hook() -> list[str]:
    called: list[str] = []
    handle = register_optimizer_step_post_hook(lambda o, args, kwargs: called.append(type(o).__name__))
    layer = layer_of_rank()
    optimizer = optimizer_of(OURS, layer)
    train(layer, optimizer, 1)
    handle.remove()
    return called


def test_point_19_hooks_for_all_optimizers_see_wrapper_and_inner_one(ranks: RankPool) -> None:
    assert ranks.run(1, call_global_hook) == [["SGD", "PostLocalSGDOptimizer"]]


def train_a_copy(way: str) -> list[bool]:
    """A copy goes on training its own parameters on its own clock, and the original is left alone."""
    layer = layer_of_rank()
    optimizer = optimizer_of(OURS, layer, period=3)
    train(layer, optimizer, 2)
    both = (layer, optimizer)
    twin, its_optimizer = copy.deepcopy(both) if way == "deepcopy" else pickle.loads(pickle.dumps(both))
    before = values_of(layer.parameters())
    train(twin, its_optimizer, 3)
    left_alone = all(map(same_bits, before, values_of(layer.parameters()))) and optimizer.averager.step == 2
    train(layer, optimizer, 3)
    same = all(map(same_bits, values_of(layer.parameters()), values_of(twin.parameters())))
    in_common = its_optimizer.averager.process_group is optimizer.averager.process_group
    return [left_alone, same, its_optimizer.averager.step == 5, in_common]


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_point_19_a_copy_trains_on_its_own_in_the_same_group(ranks: RankPool, way: str) -> None:
    assert ranks.run(2, train_a_copy, way) == [[True, True, True, True]] * 2


# 20


def step_with_closure(side: Side) -> tuple[Any, ...]:
    layer = layer_of_rank()
    optimizer = optimizer_of(side, layer)
    evaluations = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = layer(torch.ones(2)).square().sum()
        loss.backward()
        evaluations.append(loss.item())
        return loss

    told = outcome(lambda: optimizer.step(closure).item())
    return told, evaluations, optimizer.averager.step


def test_point_20_step_takes_a_closure_and_returns_its_loss(ranks: RankPool) -> None:
    for told, _, _ in ranks.run(2, step_with_closure, TORCH):
        assert told[:2] == ("error", "TypeError")
    for rank, (told, evaluations, step) in enumerate(ranks.run(2, step_with_closure, OURS)):
        assert told == ("ok", 9.0 * rank)
        assert (evaluations, step) == ([9.0 * rank], 1)


def step_of_lbfgs() -> list[Any]:
    layer = layer_of_rank()
    inner = torch.optim.LBFGS(layer.parameters(), max_iter=3)
    optimizer = OURS.PostLocalSGDOptimizer(inner, OURS.PeriodicModelAverager(2))
    evaluations = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (layer(torch.ones(2)) - 4 * dist.get_rank()).square().sum()
        loss.backward()
        evaluations.append(loss.item())
        return loss

    loss = optimizer.step(closure)
    assert_same_on_ranks("after the step", layer.parameters())
    return [loss.item() == evaluations[0], len(evaluations) >= 1, optimizer.averager.step]


def test_point_20_an_optimizer_that_needs_a_closure_can_be_wrapped(ranks: RankPool) -> None:
    assert ranks.run(2, step_of_lbfgs) == [[True, True, 1]] * 2


# 21

NO_STEP = (
    "UserWarning",
    "Loaded state dict does not contain a step counter for an averager. Setting step counter to 0.",
)


def save_and_load(side: Side) -> list[Any]:
    layer = layer_of_rank()
    optimizer = optimizer_of(side, layer)
    train(layer, optimizer, 3)
    saved = optimizer.state_dict()
    fresh = optimizer_of(side, layer)
    silent = warned(fresh.load_state_dict, saved)
    restored = fresh.averager.step
    plain = optimizer.optim.state_dict()
    for group in plain["param_groups"]:
        group.pop("averager_step", None)  # what the inner optimizer would have saved had it never been wrapped
    told = warned(fresh.load_state_dict, plain)
    return [sorted(saved), saved["step"], silent, restored, [t[:2] for t in told], fresh.averager.step]


@BOTH
def test_point_21_the_state_dict_has_a_step_and_loading_one_without_it_warns(ranks: RankPool, side: Side) -> None:
    expected = [["param_groups", "state", "step"], 3, [], 3, [NO_STEP], 0]
    assert ranks.run(2, save_and_load, side) == [expected] * 2


def reload_without_step(side: Side, path: str) -> list[Any]:
    """As PyTorch's own test of reloading does: save from rank 0, load on all, then load again without the step."""
    layer = layer_of_rank()
    optimizer, fresh = optimizer_of(side, layer), optimizer_of(side, layer)
    train(layer, optimizer, 3)
    if dist.get_rank() == 0:
        torch.save({"optimizer": optimizer.state_dict()}, path)
    dist.barrier()
    saved = torch.load(path)["optimizer"]
    fresh.load_state_dict(saved)
    restored = fresh.averager.step
    del saved["step"]
    told = warned(fresh.load_state_dict, saved)
    return [restored, [t[:2] for t in told], fresh.averager.step, "step" in saved]


@BOTH
def test_point_21_a_step_kept_elsewhere_does_not_hide_that_the_step_is_missing(
    ranks: RankPool, side: Side, tmp_path: Path
) -> None:
    assert ranks.run(2, reload_without_step, side, str(tmp_path / "saved")) == [[3, [NO_STEP], 0, False]] * 2


def save_to_a_file(side: Side) -> list[Any]:
    layer = layer_of_rank()
    optimizer = optimizer_of(side, layer)
    train(layer, optimizer, 3)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    fresh = optimizer_of(side, layer)
    fresh.load_state_dict(torch.load(file, weights_only=True))
    return [fresh.averager.step, len(fresh.state)]


@BOTH
def test_point_21_the_state_dict_goes_through_a_file_without_pickled_code(ranks: RankPool, side: Side) -> None:
    assert ranks.run(1, save_to_a_file, side) == [[3, 2]]


# 22


def schedule_after_loading(side: Side, built: str) -> list[Any]:
    layer = layer_of_rank()
    optimizer = optimizer_of(side, layer)
    train(layer, optimizer, 1)
    saved = copy.deepcopy(optimizer.state_dict())

    def build() -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)

    scheduler = build() if built == "before" else None
    optimizer.load_state_dict(saved)
    scheduler = scheduler or build()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scheduler.step()
    layer.zero_grad()
    before = layer.weight.detach().clone()
    optimizer.optim.state.clear()
    layer(torch.ones(2)).backward()
    optimizer.averager.step = 1  # this step averages nothing
    optimizer.step()
    moved = (before - layer.weight.detach()).flatten().tolist()
    shared = optimizer.param_groups is optimizer.optim.param_groups
    return [shared, optimizer.optim.param_groups[0]["lr"], [round(m, 6) for m in moved]]


@pytest.mark.parametrize("built", ["before", "after"])
def test_point_22_a_scheduler_on_the_wrapper_works_after_load_state_dict(ranks: RankPool, built: str) -> None:
    assert ranks.run(1, schedule_after_loading, TORCH, built) == [[False, 0.1, [0.1, 0.1]]]
    assert ranks.run(1, schedule_after_loading, OURS, built) == [[True, 0.05, [0.05, 0.05]]]


# 23


def checkpoint(side: Side, directory: str, flatten: bool) -> list[Any]:
    """Save through torch.distributed.checkpoint, then restore into a fresh optimizer, as its tutorial does."""
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    layer = layer_of_rank()
    optimizer = optimizer_of(side, layer, period=4, warmup_steps=2)
    train(layer, optimizer, 5)
    saved = {"optimizer": get_optimizer_state_dict(layer, optimizer, options=options)}
    dcp.save(saved, checkpoint_id=directory)

    fresh_layer = layer_of_rank()
    fresh = optimizer_of(side, fresh_layer, period=4, warmup_steps=2)
    target = {"optimizer": get_optimizer_state_dict(fresh_layer, fresh, options=options)}
    dcp.load(target, checkpoint_id=directory)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        set_optimizer_state_dict(fresh_layer, fresh, target["optimizer"], options=options)
    momentum = [s["momentum_buffer"].flatten().tolist() for s in fresh.state.values()]
    kept = [s["momentum_buffer"].flatten().tolist() for s in optimizer.state.values()]
    return [fresh.averager.step, optimizer.averager.step, momentum == kept or dist.get_rank() != 0]


@pytest.mark.parametrize("flatten", [False, True], ids=["nested", "flat"])
def test_point_23_the_step_survives_torch_distributed_checkpoint(
    ranks: RankPool, tmp_path: Path, flatten: bool
) -> None:
    theirs = ranks.run(2, outcome, checkpoint, TORCH, str(tmp_path / "torch"), flatten)
    assert all(told[0] == "error" or told[1][0] != 5 for told in theirs)
    assert ranks.run(2, checkpoint, OURS, str(tmp_path / "ours"), flatten) == [[5, 5, True]] * 2


def checkpoint_by_hand(directory: str) -> list[int]:
    layer = layer_of_rank()
    optimizer = optimizer_of(OURS, layer)
    train(layer, optimizer, 5)
    dcp.save({"optimizer": optimizer.state_dict()}, checkpoint_id=directory)
    fresh = optimizer_of(OURS, layer)
    train(layer, fresh, 1)
    target = {"optimizer": fresh.state_dict()}
    dcp.load(target, checkpoint_id=directory)
    fresh.load_state_dict(target["optimizer"])
    return [fresh.averager.step]


def test_point_23_the_step_survives_when_the_state_dict_itself_is_saved(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(2, checkpoint_by_hand, str(tmp_path)) == [[5]] * 2


# 24


def inner_for_scaling(kind: str, parameters: Any) -> torch.optim.Optimizer:
    if kind == "fused":  # such optimizers unscale and skip by themselves
        return torch.optim.SGD(parameters, lr=0.125, fused=True)
    return torch.optim.SGD(parameters, lr=0.125)


def train_with_scaler(side: Side, kind: str, period: int, unscale_first: bool) -> dict[str, Any]:
    """Five steps; at the third, rank 1's gradient overflows and its scaler skips the step."""
    layer = layer_of_rank()
    averager = side.PeriodicModelAverager(period, warmup_steps=1)
    optimizer = side.PostLocalSGDOptimizer(inner_for_scaling(kind, layer.parameters()), averager)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=1000)
    weights, scales = [], []
    for step in range(5):
        optimizer.zero_grad()
        overflow = step == 2 and dist.get_rank() == 1
        scaler.scale(layer(torch.full((2,), float("inf") if overflow else 1.0)).sum()).backward()
        if unscale_first:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(layer.parameters(), 100.0)
        scaler.step(optimizer)
        scaler.update()
        weights.append(layer.weight[0, 0].item())
        scales.append(scaler.get_scale())
    return {"weights": weights, "scales": scales, "step": averager.step}


def test_point_24_on_torch_the_averager_of_the_rank_that_skipped_falls_behind(ranks: RankPool) -> None:
    """With a period that never fires, since the next collective would hang."""
    results = ranks.run(2, train_with_scaler, TORCH, "plain", 1000, False, env={})
    assert [result["step"] for result in results] == [5, 4]


@pytest.mark.parametrize("unscale_first", [False, True], ids=["step", "unscale_clip_step"])
@pytest.mark.parametrize("kind", ["plain", "fused"])
def test_point_24_grad_scaler_skip_keeps_ranks_in_lock_step(ranks: RankPool, kind: str, unscale_first: bool) -> None:
    first, second = ranks.run(2, train_with_scaler, OURS, kind, 2, unscale_first)
    assert (first["step"], second["step"]) == (5, 5)
    # The gradient is 1, the rate 1/8; averaging at steps 1 and 3; rank 1 skips step 2.
    assert first["weights"] == [-0.125, 0.25, 0.125, 0.0625, -0.0625]
    assert second["weights"] == [0.875, 0.25, 0.25, 0.0625, -0.0625]
    assert first["scales"] == [256.0] * 5
    assert second["scales"] == [256.0, 256.0, 128.0, 128.0, 128.0]


def scale_like_torch(side: Side, kind: str, unscale_first: bool) -> list[torch.Tensor]:
    layer = layer_of_rank()
    if kind == "adam":
        inner: torch.optim.Optimizer = torch.optim.AdamW(layer.parameters(), lr=0.01)
    else:
        inner = inner_for_scaling(kind, layer.parameters())
    optimizer = side.PostLocalSGDOptimizer(inner, side.PeriodicModelAverager(3, warmup_steps=1))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for step in range(8):
        optimizer.zero_grad()
        batch = torch.full((2,), 1.0 + step + dist.get_rank())
        scaler.scale(layer(batch).square().sum() / 100).backward()
        if unscale_first:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(layer.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
    return [p.detach() for p in layer.parameters()]


@pytest.mark.parametrize("unscale_first", [False, True], ids=["step", "unscale_clip_step"])
@pytest.mark.parametrize("kind", ["plain", "fused", "adam"])
def test_point_24_without_overflow_a_scaler_trains_as_on_torch(ranks: RankPool, kind: str, unscale_first: bool) -> None:
    theirs = ranks.run(2, scale_like_torch, TORCH, kind, unscale_first)
    ours = ranks.run(2, scale_like_torch, OURS, kind, unscale_first)
    for rank in range(2):
        assert all(map(same_bits, theirs[rank], ours[rank]))


def skip_under_hierarchy() -> list[int]:
    layer = layer_of_rank()
    averager = OURS.HierarchicalModelAverager({2: 2, 4: 4})
    optimizer = OURS.PostLocalSGDOptimizer(inner_for_scaling("plain", layer.parameters()), averager)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for step in range(9):
        optimizer.zero_grad()
        overflow = step in (1, 5) and dist.get_rank() == step % 4
        scaler.scale(layer(torch.full((2,), float("nan") if overflow else 1.0)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert_same_on_ranks("after step 8", layer.parameters())
    return [averager.step]


def test_point_24_lock_step_holds_under_a_hierarchy(ranks: RankPool) -> None:
    assert ranks.run(4, skip_under_hierarchy) == [[9]] * 4


# 25


def delegate(side: Side) -> list[Any]:
    layer, more = layer_of_rank(), nn.Linear(1, 1)
    optimizer = optimizer_of(side, layer)
    layer(torch.ones(2)).backward()
    optimizer.zero_grad(set_to_none=False)
    zeros = [p.grad.abs().sum().item() for p in layer.parameters() if p.grad is not None]
    optimizer.zero_grad(set_to_none=True)
    cleared = [p.grad for p in layer.parameters()]
    optimizer.add_param_group({"params": list(more.parameters()), "lr": 0.5})
    in_inner = [group["lr"] for group in optimizer.optim.param_groups]
    return [zeros, cleared, in_inner, [group["lr"] for group in optimizer.param_groups]]


@BOTH
def test_point_25_zero_grad_and_add_param_group_delegate(ranks: RankPool, side: Side) -> None:
    assert ranks.run(1, delegate, side) == [[[0.0, 0.0], [None, None], [0.1, 0.5], [0.1, 0.5]]]


def average_added_group(side: Side) -> list[float]:
    layer, more = layer_of_rank(), layer_of_rank()
    optimizer = optimizer_of(side, layer, lr=0.0)
    optimizer.add_param_group({"params": list(more.parameters())})
    optimizer.zero_grad()
    (layer(torch.ones(2)) + more(torch.ones(2))).backward()
    optimizer.step()
    return [p.flatten()[0].item() for p in (*layer.parameters(), *more.parameters())]


@BOTH
def test_point_25_an_added_group_is_averaged_too(ranks: RankPool, side: Side) -> None:
    assert ranks.run(2, average_added_group, side) == [[0.5, 0.5, 0.5, 0.5]] * 2

"""Anchors, fragments and residuals belong to parameters by name: what freezes, unfreezes, joins or is reordered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import cadenza
from cadenza import LevelPlan, Strategy, codecs
from cadenza.errors import CadenzaError, DisagreementError, UnsupportedModelError
from cadenza.reports import RoundReport
from cadenza.testing import Worker, workers


def build(seed: int = 0) -> nn.Sequential:
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    return model


def gradients(model: nn.Module, worker: Worker) -> None:
    """Random gradients of this worker's own, for what is trained now."""
    for parameter in model.parameters():
        drawn = torch.randn(parameter.shape, generator=worker.generator)
        parameter.grad = drawn if parameter.requires_grad else None


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def assert_alike(found: list[dict[str, torch.Tensor]]) -> None:
    for name, first in found[0].items():
        for other in found[1:]:
            assert torch.equal(first, other[name]), f"{name} differs between workers"


def toggled(worker: Worker, strategy: Strategy, events: dict[int, Callable[[nn.Module], None]]) -> Any:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    sync = cadenza.attach(model, optimizer, strategy)
    for step in range(1, 19):
        events.get(step, lambda _: None)(model)
        gradients(model, worker)
        optimizer.step()
        sync.step()
    sync.finish()
    return values(model)


def freeze(layer: int) -> Callable[[nn.Module], None]:
    return lambda model: model[layer].requires_grad_(False)  # type: ignore[index]


def unfreeze(layer: int) -> Callable[[nn.Module], None]:
    return lambda model: model[layer].requires_grad_(True)  # type: ignore[index]


STRATEGIES = {
    "local_sgd": cadenza.local_sgd(4),
    "diloco": cadenza.diloco(4, outer_lr=0.5),
    "int8": cadenza.diloco(4, outer_lr=0.5, codec=codecs.error_feedback(codecs.int8(block=16))),
    "streaming": cadenza.streaming_diloco(6, layers=1, delay=1),
    "by bytes": cadenza.diloco(4, outer_lr=0.5, fragments=cadenza.by_bytes(80)),
    "hierarchical": cadenza.hierarchical({2: ((0, 1), (2,)), 6: "all"}),
}
EVENTS = {
    "frozen between rounds": {3: freeze(0)},
    "frozen and thawed": {3: freeze(1), 10: unfreeze(1)},
    "unfrozen in mid-period": {1: freeze(2), 7: unfreeze(2)},
    "toggled in every step": {step: (freeze if step % 2 else unfreeze)(0) for step in range(2, 19)},
}


@pytest.mark.parametrize("events", EVENTS)
@pytest.mark.parametrize("name", STRATEGIES)
def test_ranks_end_equal_whatever_is_frozen_or_unfrozen_on_the_way(name: str, events: str) -> None:
    with workers(3) as pool:
        assert_alike(pool.run(toggled, STRATEGIES[name], EVENTS[events]))


def test_what_was_trained_before_it_was_frozen_is_averaged() -> None:
    def run(worker: Worker) -> tuple[torch.Tensor, torch.Tensor]:
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        sync = cadenza.attach(model, optimizer, cadenza.local_sgd(2))
        before = model[0].bias.detach().clone()
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, float(worker.rank))
        optimizer.step()
        sync.step()
        model[0].requires_grad_(False)
        optimizer.zero_grad()
        sync.step()
        return before, model[0].bias.detach().clone()

    with workers(2) as pool:
        for before, after in pool.run(run):
            torch.testing.assert_close(after, before - 0.5)


def test_a_network_that_is_always_frozen_at_the_step_is_averaged_too() -> None:
    """A GAN's loop trains the discriminator, then freezes it while it trains the generator and calls `sync.step()`."""

    def run(worker: Worker) -> dict[str, torch.Tensor]:
        model = nn.ModuleDict({"generator": build(1), "discriminator": build(2)})
        optimizers = [torch.optim.SGD(network.parameters(), lr=0.1) for network in model.values()]
        sync = cadenza.attach(model, optimizers, cadenza.diloco(3, outer_lr=0.7))
        for _ in range(7):
            for network, optimizer in zip(model.values(), optimizers, strict=True):
                model.requires_grad_(False)
                network.requires_grad_(True)
                gradients(model, worker)
                optimizer.step()
            model["discriminator"].requires_grad_(False)
            sync.step()
        sync.finish()
        return values(model)

    with workers(2) as pool:
        assert_alike(pool.run(run))


def test_a_parameter_that_joins_moves_no_other_to_another_fragment() -> None:
    def run(worker: Worker) -> tuple[dict[str, int], dict[str, int], dict[str, torch.Tensor]]:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        for parameter in model.parameters():
            nn.init.constant_(parameter, 0.5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        sync = cadenza.attach(model, optimizer, cadenza.diloco(4, outer_lr=0.5, fragments=cadenza.by_bytes(80)))
        before = dict(sync.replica.state.fragments)
        for step in range(1, 14):
            if step == 6:
                model.insert(0, nn.Linear(4, 4))
                model[0].weight.data.normal_(generator=worker.generator)
                optimizer.add_param_group({"params": model[0].parameters()})
                model.add_module("more", nn.Linear(4, 4))
            gradients(model, worker)
            optimizer.step()
            sync.step()
        sync.finish()
        return before, sync.replica.state.fragments, values(model)

    with workers(2) as pool:
        found = pool.run(run)
    for before, after, _ in found:
        assert all(after[name] == fragment for name, fragment in before.items())
        assert len(after) > len(before)
    assert_alike([result for *_, result in found])


def test_experts_of_one_shape_are_not_averaged_with_each_other() -> None:
    def run(worker: Worker) -> str:
        model = nn.ModuleDict({"first": nn.Linear(3, 3), "second": nn.Linear(3, 3)})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sync = cadenza.attach(model, optimizer, cadenza.post_local_sgd(2, warmup_steps=4))
        for parameter in model["first" if worker.rank == 0 else "second"].parameters():
            parameter.grad = torch.ones_like(parameter)
        with pytest.raises(DisagreementError) as error:
            sync.average_gradients()
        return str(error.value)

    with workers(2) as pool:
        told = pool.run(run)
    assert told[0] == told[1]
    assert "first.weight" in told[0]
    assert "second.weight" in told[0]


def test_ranks_that_unfreeze_different_parameters_are_told_so_by_name() -> None:
    def run(worker: Worker) -> str:
        model = build()
        model[1].requires_grad_(False)
        model[2].requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sync = cadenza.attach(model, optimizer, cadenza.local_sgd(1))
        model[1 + worker.rank].requires_grad_(True)
        with pytest.raises(DisagreementError) as error:
            sync.step()
        return str(error.value)

    with workers(2) as pool:
        told = pool.run(run)
    assert "1.weight" in told[0]
    assert "2.weight" in told[1]


@pytest.mark.parametrize("groups", [((3, 0), (1, 2)), ((0, 3), (2, 1)), ((2, 3), (1, 0))])
def test_the_order_in_which_a_group_is_written_changes_nothing(groups: tuple[tuple[int, ...], ...]) -> None:
    def run(worker: Worker) -> torch.Tensor:
        model = nn.Linear(31, 7)
        for parameter in model.parameters():
            nn.init.constant_(parameter, 0.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        sync = cadenza.attach(model, optimizer, cadenza.hierarchical({1: groups, 2: "all"}))
        for step in range(2):
            for i, parameter in enumerate(model.parameters()):
                ramp = torch.arange(parameter.numel(), dtype=torch.float32).view_as(parameter)
                parameter.grad = ramp * (worker.rank + 1) + i + step
            optimizer.step()
            sync.step()
        sync.finish()
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    with workers(4) as pool:
        found = pool.run(run)
    ramps = [torch.arange(31 * 7.0), torch.arange(7.0)]
    expected = torch.cat([-(2 * 2.5 * ramp + 2 * i + 1) for i, ramp in enumerate(ramps)])
    for result in found:
        torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("auto", [True, False])
def test_local_steps_begin_from_one_value_also_if_a_gradient_was_not_averaged(
    auto: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def run(worker: Worker) -> tuple[dict[str, torch.Tensor], list[float | None]]:
        model = nn.ModuleDict({"one": build(1), "two": build(2)})
        optimizers = [torch.optim.SGD(network.parameters(), lr=0.1) for network in model.values()]
        reports: list[RoundReport] = []
        strategy = cadenza.diloco(2, outer_lr=0.7, warmup_steps=3)
        sync = cadenza.attach(model, optimizers, strategy, auto=auto, observers=[reports.append])
        for _ in range(7):
            for network, optimizer in zip(model.values(), optimizers, strict=True):
                gradients(network, worker)
                if not auto and network is model["one"]:
                    sync.average_gradients()
                optimizer.step()
            if not auto:
                sync.step()
        sync.finish()
        return values(model), [report.drift for report in reports]

    with workers(2) as pool:
        found = pool.run(run)
    assert_alike([result for result, _ in found])
    assert ("hold different values, of two.0.weight" in caplog.text) == (not auto)


def test_slowmo_takes_one_learning_rate_where_ranks_differ() -> None:
    def run(worker: Worker) -> dict[str, torch.Tensor]:
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1 / (1 + worker.rank))
        sync = cadenza.attach(model, optimizer, cadenza.slowmo(2, beta=0.5))
        for _ in range(6):
            gradients(model, worker)
            optimizer.step()
            sync.step()
        sync.finish()
        return {**values(model), **{k: v for k, v in sync.state_dict().items() if isinstance(v, torch.Tensor)}}

    with workers(3) as pool:
        found = pool.run(run)
    shared = [{key: value for key, value in one.items() if not key.startswith("worker/")} for one in found]
    assert_alike(shared)


# ---- values that were replaced, optimizers of something else -----------------------------------------------------


def loaded(worker: Worker, strategy: Strategy, mend: Callable[[cadenza.Synchronizer], None]) -> dict[str, torch.Tensor]:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    sync = cadenza.attach(model, optimizer, strategy)
    model.load_state_dict(build(7).state_dict())
    mend(sync)
    for _ in range(4):
        gradients(model, worker)
        optimizer.step()
        sync.step()
    return values(model)


def test_values_loaded_after_attach_are_not_taken_for_progress() -> None:
    with workers(2) as pool, pytest.raises(CadenzaError, match=r"load_state_dict\(\) after attach.*sync\.restart"):
        pool.run(loaded, cadenza.diloco(2), lambda _: None)


def test_a_restart_goes_on_from_loaded_values() -> None:
    with workers(2) as pool:
        for found in pool.run(loaded, cadenza.diloco(2), lambda sync: sync.restart()):
            for name, value in build(7).named_parameters():
                assert torch.equal(found[name], value), "one round at learning rate 0 moves nothing"


def test_where_nothing_is_remembered_values_may_be_loaded() -> None:
    with workers(2) as pool:
        assert_alike(pool.run(loaded, cadenza.local_sgd(2), lambda _: None))


@pytest.mark.parametrize("first", ["model", "sync"])
def test_a_state_is_restored_in_either_order(first: str) -> None:
    def run(worker: Worker) -> int:
        model, sync = build(), None
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sync = cadenza.attach(model, optimizer, cadenza.diloco(2))
        state, kept = sync.state_dict(), build(3).state_dict()
        for what in (first, "sync" if first == "model" else "model"):
            (model.load_state_dict(kept) if what == "model" else sync.load_state_dict(state))
        sync.step()
        return sync.clock

    with workers(2) as pool:
        assert pool.run(run) == [1, 1]


def test_an_optimizer_of_another_model_is_refused() -> None:
    def run(worker: Worker) -> None:
        optimizer = torch.optim.SGD(build().parameters(), lr=0.1)
        with pytest.raises(UnsupportedModelError, match="holds none of the model's parameters"):
            cadenza.attach(build(), optimizer, cadenza.local_sgd(2))

    with workers(2) as pool:
        pool.run(run)


def test_workers_that_never_move_apart_are_pointed_out_once(caplog: pytest.LogCaptureFixture) -> None:
    def run(worker: Worker) -> None:
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sync = cadenza.attach(model, optimizer, cadenza.diloco(1))
        for step in range(8):
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, float(step))
            optimizer.step()
            sync.step()

    with workers(2) as pool:
        pool.run(run)
    assert caplog.text.count("exactly the same values at the round of step 1") == 2, "once on each worker"


# ---- what encoding loses, and what rounding takes back ------------------------------------------------------------


def arrives(worker: Worker, strategy: Strategy, unfreeze_at: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Move by a known amount in every step; return what arrived and what was still owed at the end."""
    model = nn.ModuleDict({"first": nn.Linear(40, 1, bias=False), "late": nn.Linear(8, 1, bias=False)})
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.0)
    model["late"].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    sync = cadenza.attach(model, optimizer, strategy)
    weight = model["first"].weight
    scale = torch.arange(1, 41, dtype=torch.float32).pow(2) / 1000
    for step in range(1, 13):
        if step == unfreeze_at:
            model["late"].requires_grad_(True)
        optimizer.zero_grad()
        weight.grad = -(scale * (1 + worker.rank)).view_as(weight)
        optimizer.step()
        sync.step()
    sync.replica.state.wait_for_pending()
    owed = torch.zeros(40)
    for state in sync.replica.state.levels.values():
        lost = state._lost_so_far()
        if lost is not None:
            where = state._layout.places["first.weight"][1]  # type: ignore[union-attr]
            owed -= lost[0][where]
    return weight.detach().flatten().clone(), owed


@pytest.mark.parametrize("unfreeze_at", [None, 5])
def test_what_a_codec_has_lost_arrives_later_also_when_a_parameter_joins(unfreeze_at: int | None) -> None:
    codec = codecs.error_feedback(codecs.topk(density=0.1, chunk=16))
    strategy = Strategy(levels=(LevelPlan(1, codec=codec),))
    with workers(2) as pool:
        found = pool.run(arrives, strategy, unfreeze_at)
    scale = torch.arange(1, 41, dtype=torch.float32).pow(2) / 1000
    expected = 12 * 1.5 * scale
    total = found[0][0] + sum(owed for _, owed in found) / 2
    torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-4)


def test_what_an_inner_level_has_lost_survives_the_landing_of_an_outer_one() -> None:
    codec = codecs.error_feedback(codecs.topk(density=0.1, chunk=16))
    strategy = Strategy(levels=(LevelPlan(1, codec=codec), LevelPlan(3)))
    with workers(2) as pool:
        found = pool.run(arrives, strategy, None)
    scale = torch.arange(1, 41, dtype=torch.float32).pow(2) / 1000
    total = found[0][0] + sum(owed for _, owed in found) / 2
    torch.testing.assert_close(total, 12 * 1.5 * scale, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_does_not_take_small_outer_steps_back(dtype: torch.dtype) -> None:
    """A thousand rounds, each of which moves the anchor by less than half precision can tell."""

    def run(worker: Worker, precision: torch.dtype) -> torch.Tensor:
        model = nn.Linear(8, 1, bias=False).to(precision)
        nn.init.constant_(model.weight, 1.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        strategy = Strategy(levels=(LevelPlan(1, outer=cadenza.outer.sgd(lr=0.01)),))
        sync = cadenza.attach(model, optimizer, strategy)
        for _ in range(1000):
            model.weight.grad = torch.full_like(model.weight, 2.0**-6)
            optimizer.step()
            sync.step()
        return model.weight.detach().float()

    with workers(2) as pool:
        [half, _], [full, _] = pool.run(run, dtype), pool.run(run, torch.float32)
    torch.testing.assert_close(half, full, rtol=torch.finfo(dtype).eps, atol=0)
    assert (full < 0.9).all()

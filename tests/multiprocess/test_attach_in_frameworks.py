"""What frameworks do around a model, and `attach` has to see: wrappers, closures, meshes, parts of other systems."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import cadenza
from support.ranks import RankPool, outcome
from support.training import everyone


class Wrapper:
    """A framework's optimizer: not torch's class, and it leaves every other step out."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.calls = 0

    def step(self) -> None:
        self.calls += 1
        if self.calls % 2 == 0:
            self.optimizer.step()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def all_equal(model: nn.Module) -> bool:
    first, *others = everyone([p.detach().clone() for p in model.parameters()])
    return all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


# ---- DDP, wherever it is -------------------------------------------------------------------------------------------


class Framework(nn.Module):
    """A module around a DDP, as Fabric makes one, with or without a part that is outside of it."""

    def __init__(self, head: bool) -> None:
        super().__init__()
        self.forward_module = DistributedDataParallel(nn.Linear(3, 2))
        self.head = nn.Linear(2, 1) if head else nn.Identity()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.forward_module(inputs))


def ddp_inside(head: bool, warmup_steps: int) -> Any:
    torch.manual_seed(0)
    model = Framework(head)
    optimizer = sgd(model)
    strategy = cadenza.local_sgd(2, warmup_steps=warmup_steps)
    sync = cadenza.attach(model, optimizer, strategy, auto=True)
    equal = []
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.full((1, 3), float(dist.get_rank() + 1))).sum().backward()
        optimizer.step()
        equal.append(all_equal(model))
    names = list(sync.replica.view.parameters())
    sync.finish()
    return equal, model.forward_module.require_backward_grad_sync, names[0]


def test_ddp_inside_the_model_falls_silent_too(ranks: RankPool) -> None:
    for head in (False, True):
        for equal, syncs, name in ranks.run(2, ddp_inside, head, 0):
            assert (equal, syncs) == ([False, True, False, True], False)
            assert name == "forward_module.weight", "its own name, without DDP's part of it"
        for equal, syncs, _ in ranks.run(2, ddp_inside, head, 2):
            assert (equal, syncs) == ([True, True, False, True], False), "averaged in the warm-up, head included"


def ddp_made_after_attach() -> Any:
    model = nn.Linear(3, 2)
    optimizer = sgd(model)
    sync = cadenza.attach(model, optimizer, cadenza.local_sgd(4))
    wrapped = DistributedDataParallel(model)
    wrapped(torch.ones(3)).sum().backward()
    optimizer.step()
    return outcome(sync.step)


def test_ddp_that_is_made_after_attach_is_found_at_the_first_step(ranks: RankPool) -> None:
    for kind, name, text in ranks.run(2, ddp_made_after_attach):
        assert (kind, name) == ("error", "UnsupportedModelError")
        assert "attach what that gave back, afterwards" in text


def attach_to_parts(close: bool) -> Any:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    optimizer = sgd(model)
    first = cadenza.attach(model, optimizer, cadenza.local_sgd(4))
    if close:
        first.close()
    second = outcome(lambda: cadenza.attach(model[0], optimizer, cadenza.diloco(4)).clock)
    return second, first.closed


def test_a_second_synchronizer_on_a_model_or_a_part_of_it_is_refused(ranks: RankPool) -> None:
    for (kind, name, text), closed in ranks.run(2, attach_to_parts, False):
        assert (kind, name, closed) == ("error", "CadenzaError", False)
        assert "Call finish() or close() on the first one" in text
    assert ranks.run(2, attach_to_parts, True) == [(("ok", 0), True)] * 2


# ---- optimizers in wrappers, closures --------------------------------------------------------------------------------


def wrapped_optimizer() -> Any:
    model = nn.Linear(3, 2)
    optimizer = Wrapper(sgd(model))
    sync = cadenza.attach(model, optimizer, cadenza.local_sgd(2), auto=True)  # type: ignore[arg-type]
    for _ in range(6):
        model(torch.ones(3)).sum().backward()
        optimizer.step()
    return sync.clock


def test_the_clock_counts_the_steps_of_the_optimizer_inside_a_wrapper(ranks: RankPool) -> None:
    assert ranks.run(2, wrapped_optimizer) == [3, 3]


def with_closures(kind: str) -> Any:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1) if kind == "LBFGS" else sgd(model)
    sync = cadenza.attach(model, optimizer, cadenza.local_sgd(2, warmup_steps=2), auto=True)
    inputs = torch.full((1, 3), float(dist.get_rank() + 1))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(inputs).square().sum()
        loss.backward()
        return loss

    def step() -> float:
        loss = optimizer.step(closure=closure) if kind == "by keyword" else optimizer.step(closure)
        return float(loss.detach())

    results, equal = [], []
    for _ in range(3):
        results.append(outcome(step))
        equal.append(all_equal(model))
    sync.close()
    return results, equal


@pytest.mark.parametrize("kind", ["by position", "by keyword"])
def test_gradients_made_in_a_closure_are_averaged_before_the_update(ranks: RankPool, kind: str) -> None:
    (losses, equal), (others, _) = ranks.run(2, with_closures, kind)
    assert equal == [True, True, False]
    assert [kind for kind, _ in losses] == ["ok"] * 3
    assert losses != others, "each has the loss of its own batch"


def test_an_optimizer_that_evaluates_its_closure_again_is_refused_in_a_warm_up(ranks: RankPool) -> None:
    for results, _ in ranks.run(2, with_closures, "LBFGS"):
        assert results[0][:2] == ("error", "CadenzaError")
        assert "more than once in a step" in results[0][2]


# ---- pipelines, torchft, DeepSpeed -----------------------------------------------------------------------------------


def pipeline(told: bool) -> Any:
    """Two stages of different shapes, two replicas of each."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    model = nn.Linear(3, 2) if mesh["pp"].get_local_rank() == 0 else nn.Linear(2, 5)
    group = {"process_group": mesh["dp"].get_group()} if told else {}

    def train() -> list[float]:
        optimizer = sgd(model)
        topology = cadenza.Topology.from_mesh(mesh, ["dp"])
        sync = cadenza.attach(model, optimizer, cadenza.local_sgd(1), topology=topology, **group)  # type: ignore[arg-type]
        model(torch.full((model.in_features,), float(dist.get_rank()))).sum().backward()
        optimizer.step()
        sync.step()
        sync.finish()
        return [float(value) for value in model.weight.detach().flatten()]

    return outcome(train)


def test_stages_of_a_pipeline_are_told_which_group_to_pass(ranks: RankPool) -> None:
    results = ranks.run(4, pipeline, False)
    assert len(set(results)) == 1
    assert results[0][:2] == ("error", "DisagreementError")
    assert 'process_group=mesh["dp"].get_group()' in results[0][2]
    a, b, c, d = ranks.run(4, pipeline, True)
    assert (a[0], c[0]) == ("ok", "ok")
    assert (a, c) == (b, d)
    assert len(a[1]) != len(c[1])


def parts_of_others() -> list[Any]:
    """Classes and marks as those systems make them; what is looked at is where a class comes from, and the marks."""

    class ManagedProcessGroup(dist.ProcessGroup):
        __module__ = "torchft.process_group"

    class DeepSpeedZeroOptimizer(torch.optim.SGD):
        __module__ = "deepspeed.runtime.zero.stage_1_and_2"

    class DeepSpeedCPUAdam(torch.optim.SGD):
        __module__ = "deepspeed.ops.adam.cpu_adam"

    model, sharded = nn.Linear(3, 2), nn.Linear(3, 2)
    sharded.weight.ds_id = 0  # type: ignore[attr-defined]
    strategy = cadenza.local_sgd(4)
    zero, plain = DeepSpeedZeroOptimizer(model.parameters(), lr=0.1), DeepSpeedCPUAdam(model.parameters(), lr=0.1)
    managed = ManagedProcessGroup(dist.get_rank(), 2)
    return [
        outcome(cadenza.attach, model, sgd(model), strategy, process_group=managed),
        outcome(cadenza.attach, model, Wrapper(zero), strategy),
        outcome(cadenza.attach, sharded, sgd(sharded), strategy),
        outcome(lambda: cadenza.attach(model, plain, strategy).clock),
    ]


def test_torchft_and_deepspeed_are_refused_by_name(ranks: RankPool) -> None:
    for torchft, zero, sharded, plain in ranks.run(2, parts_of_others):
        assert "ManagedProcessGroup is torchft's" in torchft[2]
        assert "DeepSpeed trains this model (DeepSpeedZeroOptimizer)" in zero[2]
        assert "DeepSpeed trains this model (weight)" in sharded[2]
        assert plain == ("ok", 0)

"""Points 26 to 30 of the reference: the post-local SGD hook and its state."""

import contextlib
import io
import os
import socket
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cadenza.errors import CadenzaError
from support.ranks import RankPool, outcome
from support.sides import OURS, TORCH, Side

BOTH = pytest.mark.parametrize("side", [TORCH, OURS])

SMALL_BUCKETS = {"bucket_cap_mb": 0.00001}


def chain(layers: int = 3) -> nn.Module:
    """Weights of one, so that the gradient of every weight is the input."""
    model = nn.Sequential(*(nn.Linear(1, 1, bias=False) for _ in range(layers)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
    return model


def under_hook(side: Side, state: Any, **options: Any) -> DistributedDataParallel:
    ddp = DistributedDataParallel(chain(), **options)
    ddp.register_comm_hook(state, side.post_localSGD_hook)
    return ddp


def gradient_after_backward(ddp: nn.Module, value: float) -> float:
    """The gradient that every weight got from an input that is the rank's number plus `value`."""
    ddp.zero_grad()
    ddp(torch.tensor([[dist.get_rank() + value]])).sum().backward()
    [gradient] = {p.grad.item() for p in ddp.parameters() if p.grad is not None}
    return gradient


# 26


@BOTH
def test_point_26_the_state_has_torchs_fields_in_slots_and_starts_at_zero(side: Side) -> None:
    state = side.PostLocalSGDState("group", "subgroup", 10)
    assert [getattr(state, name) for name in TORCH.PostLocalSGDState.__slots__] == [
        "group",
        "subgroup",
        10,
        True,
        0,
    ]
    with pytest.raises(AttributeError):
        state.another = 1


def count_iterations(side: Side, start: int) -> list[int]:
    state = side.PostLocalSGDState(None, dist.group.WORLD, start)
    ddp = under_hook(side, state, **SMALL_BUCKETS)
    counts = []
    for step in range(6):
        gradient_after_backward(ddp, float(step))
        counts.append(state.iter)
    return counts


@BOTH
def test_point_26_the_last_bucket_of_a_backward_pass_counts_until_the_start(ranks: RankPool, side: Side) -> None:
    assert ranks.run(2, count_iterations, side, 4) == [[1, 2, 3, 4, 4, 4]] * 2
    assert ranks.run(2, count_iterations, side, 0) == [[0] * 6] * 2


# 27


def gradients_over_time(side: Side, allreduce: bool) -> list[float]:
    subgroup, _ = dist.new_subgroups(2)
    state = side.PostLocalSGDState(None, subgroup, 2, allreduce)
    ddp = under_hook(side, state, **SMALL_BUCKETS)
    return [gradient_after_backward(ddp, 0.0) for _ in range(4)]


@BOTH
def test_point_27_gradients_are_averaged_over_the_world_then_over_the_subgroup(ranks: RankPool, side: Side) -> None:
    results = ranks.run(4, gradients_over_time, side, True)
    assert results == [[1.5, 1.5, pair, pair] for pair in (0.5, 0.5, 2.5, 2.5)]


@BOTH
def test_point_27_without_allreduce_the_gradient_stays_local(ranks: RankPool, side: Side) -> None:
    results = ranks.run(4, gradients_over_time, side, False)
    assert results == [[1.5, 1.5, local, local] for local in (0.0, 1.0, 2.0, 3.0)]


def call_directly(side: Side) -> list[Any]:
    class Bucket:
        def __init__(self) -> None:
            self.values = torch.full((2,), float(dist.get_rank()))

        def buffer(self) -> torch.Tensor:
            return self.values

        def is_last(self) -> bool:
            return True

    group = dist.new_group([0, 1])
    bucket = Bucket()
    future = side.post_localSGD_hook(side.PostLocalSGDState(group, None, 1, False), bucket)
    averaged = future.wait().tolist()
    local = Bucket()
    completed = side.post_localSGD_hook(side.PostLocalSGDState(group, None, 0, False), local)
    return [averaged, completed.done(), completed.value() is local.values, local.values.tolist()]


@BOTH
def test_point_27_the_local_gradient_comes_as_a_completed_future(ranks: RankPool, side: Side) -> None:
    assert ranks.run(2, call_directly, side) == [
        [[0.5, 0.5], True, True, [0.0, 0.0]],
        [[0.5, 0.5], True, True, [1.0, 1.0]],
    ]


# 28


@contextlib.contextmanager
def on_host(name: int, by: str) -> Any:
    """Pretend to run on one of several hosts, as a launcher's variables or the host's name tell."""
    launcher = {"GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "SLURM_NODEID"}
    kept = {key: value for key, value in os.environ.items() if key not in launcher}
    if by == "torchrun":
        kept.update(GROUP_RANK=str(name), LOCAL_WORLD_SIZE="2", LOCAL_RANK=str(dist.get_rank() % 2))
    elif by == "slurm":
        kept.update(SLURM_NODEID=str(name))
    host = mock.patch.object(socket, "gethostname", return_value=f"host{name}")
    with mock.patch.dict(os.environ, kept, clear=True), host:
        yield


def gradients_without_subgroup(side: Side, by: str, hosts: list[int]) -> list[Any]:
    with on_host(hosts[dist.get_rank()], by):
        state = side.PostLocalSGDState(None, None, 1)
        ddp = under_hook(side, state, **SMALL_BUCKETS)
        gradients = [gradient_after_backward(ddp, 0.0) for _ in range(3)]
        return [gradients, dist.get_process_group_ranks(state.subgroup)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch counts the machine's CUDA devices instead")
def test_point_28_torch_still_raises_on_a_machine_without_cuda(ranks: RankPool) -> None:
    for told in ranks.run(2, outcome, gradients_without_subgroup, TORCH, "torchrun", [0, 0]):
        assert told[0] == "error"
        assert "CUDA" in told[2]


@pytest.mark.parametrize("by", ["torchrun", "slurm", "host name"])
def test_point_28_without_a_subgroup_the_ranks_of_one_host_average(ranks: RankPool, by: str) -> None:
    results = ranks.run(4, gradients_without_subgroup, OURS, by, [0, 0, 1, 1])
    assert results == [
        [[1.5, 0.5, 0.5], [0, 1]],
        [[1.5, 0.5, 0.5], [0, 1]],
        [[1.5, 2.5, 2.5], [2, 3]],
        [[1.5, 2.5, 2.5], [2, 3]],
    ]


@pytest.mark.parametrize(
    ("hosts", "means"),
    [
        ([0, 1, 0, 1], [1.0, 2.0, 1.0, 2.0]),
        ([0, 0, 0, 1], [1.0, 1.0, 1.0, 3.0]),
        ([0, 0, 0, 0], [1.5, 1.5, 1.5, 1.5]),
        ([0, 1, 2, 3], [0.0, 1.0, 2.0, 3.0]),
    ],
    ids=["interleaved", "unequal", "one_host", "a_host_each"],
)
def test_point_28_hosts_may_be_interleaved_and_of_unequal_size(
    ranks: RankPool, hosts: list[int], means: list[float]
) -> None:
    results = ranks.run(4, gradients_without_subgroup, OURS, "host name", hosts)
    for rank, (gradients, members) in enumerate(results):
        assert gradients == [1.5, means[rank], means[rank]]
        assert members == [r for r in range(4) if hosts[r] == hosts[rank]]


# 29


def resume(side: Side, restore: bool) -> list[Any]:
    """Train past the warm-up, then build everything anew, as a restarted job does."""
    subgroup, _ = dist.new_subgroups(1)
    first = side.PostLocalSGDState(None, subgroup, 2)
    ddp = under_hook(side, first)
    for _ in range(3):
        gradient_after_backward(ddp, 0.0)
    second = side.PostLocalSGDState(None, subgroup, 2)
    if restore:
        file = io.BytesIO()
        torch.save(first.state_dict(), file)
        file.seek(0)
        second.load_state_dict(torch.load(file, weights_only=True))
    ddp = under_hook(side, second)
    return [gradient_after_backward(ddp, 0.0), second.iter]


def test_point_29_a_resumed_state_does_not_warm_up_again(ranks: RankPool) -> None:
    assert not hasattr(TORCH.PostLocalSGDState, "state_dict")
    assert ranks.run(2, resume, TORCH, False) == [[0.5, 1]] * 2
    assert ranks.run(2, resume, OURS, True) == [[0.0, 2], [1.0, 2]]


def test_point_29_the_state_dict_is_of_the_state_alone() -> None:
    state = OURS.PostLocalSGDState(None, None, 10)
    state.iter = 7
    saved = state.state_dict()
    assert saved["iter"] == 7
    other = OURS.PostLocalSGDState("group", "subgroup", 20, False)
    other.load_state_dict(saved)
    assert (other.iter, other.process_group, other.subgroup) == (7, "group", "subgroup")
    assert (other.start_localSGD_iter, other.post_local_gradient_allreduce) == (20, False)


# 30


def count_with_accumulation(side: Side, quiet: bool) -> list[int]:
    """Two backward passes a step: the hook sees those outside no_sync, the averager every step."""
    state = side.PostLocalSGDState(None, dist.group.WORLD, 100)
    ddp = under_hook(side, state)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    averager = side.PeriodicModelAverager(period=4, warmup_steps=100)
    for _ in range(5):
        optimizer.zero_grad()
        with ddp.no_sync() if quiet else contextlib.nullcontext():
            ddp(torch.ones(1, 1)).sum().backward()
        ddp(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        averager.average_parameters(ddp.parameters())
    return [state.iter, averager.step]


@BOTH
def test_point_30_the_hook_counts_backward_passes_and_the_averager_calls(ranks: RankPool, side: Side) -> None:
    assert ranks.run(2, count_with_accumulation, side, False) == [[10, 5]] * 2
    assert ranks.run(2, count_with_accumulation, side, True) == [[5, 5]] * 2


# Beyond the points: what DDP itself fails at is explained.


def first_backward_under_no_sync(side: Side) -> tuple[Any, ...]:
    state = side.PostLocalSGDState(None, dist.group.WORLD, 100)
    ddp = under_hook(side, state, static_graph=True)

    def accumulate() -> None:
        with ddp.no_sync():
            ddp(torch.ones(1, 1)).sum().backward()
        ddp(torch.ones(1, 1)).sum().backward()

    return outcome(accumulate)


def test_a_static_graph_whose_first_backward_is_under_no_sync_is_explained(ranks: RankPool) -> None:
    for told in ranks.run(2, first_backward_under_no_sync, TORCH):
        assert told[0] == "error"
        assert "no_sync" not in told[2]
    for kind, name, text in ranks.run(2, first_backward_under_no_sync, OURS):
        assert kind == "error"
        assert issubclass(error_class(name), CadenzaError)
        assert "no_sync" in text
        assert "static_graph" in text


def error_class(name: str) -> Any:
    import cadenza.errors

    return getattr(cadenza.errors, name)


@pytest.mark.parametrize(("start", "kind"), [(-1, ValueError), (2.5, TypeError), (None, TypeError), ("3", TypeError)])
def test_a_start_that_is_no_number_of_iterations_is_refused(start: Any, kind: type[Exception]) -> None:
    build: Callable[..., Any] = OURS.PostLocalSGDState
    with pytest.raises(kind, match="start_localSGD_iter"):
        build(None, None, start)

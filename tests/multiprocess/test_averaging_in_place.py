"""Large tensors travel without packing where there is no shared memory; what is kept between rounds is never stale."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import cadenza.engine.in_place_mean
from cadenza.engine.bucket import Bucket
from cadenza.engine.packing import Fragment
from cadenza.model_averaging import plans
from cadenza.transports import c10d
from cadenza.transports.faulty import FaultyTransport
from support.compare import same_bits, values_of
from support.ranks import RankPool, outcome
from support.sides import OURS

BETWEEN_MACHINES = {"CADENZA_SHARED_MEMORY": "0"}
LARGE = 300


@contextmanager
def in_place_from(values: int = LARGE, most: int = 1000) -> Iterator[None]:
    """Tensors of so many fp32 values or more travel in place, in messages of at most `most`."""
    with mock.patch.object(c10d, "IN_PLACE_BYTES", (4 * values, 4 * most)):
        yield


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Values of this rank that add up exactly in any order."""
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    return (torch.randint(-50, 50, shape, generator=generator) * dist.get_world_size()).to(dtype)


def mean_of(tensor: torch.Tensor) -> torch.Tensor:
    """The mean by a gather, which changes nothing."""
    mine = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    everyones = [torch.empty(mine.shape, dtype=torch.float64) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, mine.double().contiguous())
    mean = sum(everyones) / len(everyones)
    return (torch.view_as_complex(mean) if tensor.is_complex() else mean).to(tensor.dtype)


def kinds() -> dict[str, list[torch.Tensor]]:
    memory, columns = random(900), random(40, 40, seed=1)
    tied = nn.Parameter(random(400, seed=2))
    return {
        "small": [random(3), random(7, seed=1)],
        "large": [random(400), random(20, 30, seed=1), random(2500, seed=2)],
        "mixed": [random(3), random(400), random(5, seed=1), random(1001, seed=2), random(299, seed=3)],
        "channels_last": [random(2, 5, 8, 8).to(memory_format=torch.channels_last)],
        "transposed": [random(30, 20).t()],
        "columns": [columns[:, :20], columns[:, 20:]],
        "overlapping": [memory[:600], memory[300:]],
        "neighbours": [memory[:450].clone(), memory[450:].clone()],
        "tied": [tied, tied, nn.Parameter(tied.data)],
        "dtypes": [random(500, dtype=d) for d in (torch.float64, torch.bfloat16, torch.complex64, torch.float16)],
        "fp8": [torch.ones(500).to(torch.float8_e4m3fn)],
        "0-dim": [random(), random(400)],
        "leaves": [nn.Parameter(random(400)), random(500).requires_grad_()],
        "inference": [inference(random(400))],
    }


def inference(tensor: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return tensor.clone()


@in_place_from()
def average_kinds() -> list[str]:
    """The kinds of tensors of which some do not hold the mean, or have moved."""
    wrong = []
    for name, tensors in kinds().items():
        means, places = [mean_of(t.float() if t.dtype.itemsize == 1 else t) for t in tensors], addresses(tensors)
        for _ in range(2):  # the mean of means is the mean
            OURS.average_parameters(iter(tensors), None)
        right = all(torch.equal(t.detach().to(m.dtype), m) for t, m in zip(tensors, means, strict=True))
        wrong += [] if right and addresses(tensors) == places else [name]
    return wrong


def addresses(tensors: list[torch.Tensor]) -> list[tuple[int, ...]]:
    return [(t.data_ptr(), *t.stride()) for t in tensors]


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("env", [BETWEEN_MACHINES, {}], ids=["c10d", "shared_memory"])
def test_every_kind_of_tensor_gets_the_mean_in_its_own_memory(ranks: RankPool, world: int, env: Any) -> None:
    assert ranks.run(world, average_kinds, env=env) == [[]] * world


@in_place_from()
def average_unlike_memory() -> list[bool]:
    """One rank's tensor lies in a row, the other's does not: the messages are the same all the same."""
    wide = random(20, 60)
    tensor = wide[:, :30] if dist.get_rank() else wide[:, :30].contiguous()
    mean = mean_of(tensor)
    OURS.average_parameters([random(2), tensor], None)
    return [torch.equal(tensor, mean)]


def test_ranks_whose_tensors_lie_differently_in_memory_average_them(ranks: RankPool) -> None:
    assert ranks.run(2, average_unlike_memory, env=BETWEEN_MACHINES) == [[True]] * 2


@in_place_from()
def count_packed_values(atomic: bool) -> int:
    packed: list[int] = []
    pack = Bucket.pack

    def counted(bucket: Bucket, memory: torch.Tensor) -> None:
        packed.append(bucket.numel)
        pack(bucket, memory)

    tensors = [random(10), random(5000), random(299), random(30, 30)]
    with mock.patch.object(Bucket, "pack", counted):
        OURS.average_parameters(tensors, None, atomic=atomic)
    return sum(packed)


def test_large_tensors_are_not_packed_unless_the_round_is_atomic(ranks: RankPool) -> None:
    assert ranks.run(2, count_packed_values, False, env=BETWEEN_MACHINES) == [309] * 2
    assert ranks.run(2, count_packed_values, True, env=BETWEEN_MACHINES) == [309 + 5900] * 2
    assert ranks.run(2, count_packed_values, False) == [309 + 5900] * 2


@in_place_from()
def disagree() -> list[Any]:
    tensors = [random(400), random(500 + dist.get_rank())]
    before = values_of(tensors)
    told = outcome(OURS.average_parameters, tensors, None)
    return [told[:2], all(map(same_bits, before, tensors))]


def test_nothing_is_changed_before_the_ranks_agree(ranks: RankPool) -> None:
    assert ranks.run(2, disagree, env=BETWEEN_MACHINES) == [[("error", "DisagreementError"), True]] * 2


@in_place_from()
def fail_in_mid_round(atomic: bool) -> list[Any]:
    group = dist.new_group(timeout=timedelta(seconds=3))
    OURS.average_parameters([torch.ones(1)], group)
    connect = cadenza.engine.in_place_mean.connect
    tensors = [random(400, seed=i) for i in range(6)]
    before = values_of(tensors)
    if dist.get_rank() == 1:
        faulty = FaultyTransport(connect(group), fail_at="launch", bucket=3 if not atomic else 0)
        with mock.patch.object(cadenza.engine.in_place_mean, "connect", return_value=faulty):
            told = outcome(OURS.average_parameters, tensors, group, atomic=atomic)
    else:
        told = outcome(OURS.average_parameters, tensors, group, atomic=atomic)
    return [*told[:2], "parts of a sum" in told[2], all(map(same_bits, before, tensors))]


def test_a_failure_in_mid_round_says_that_large_tensors_hold_parts_of_a_sum(ranks: RankPool) -> None:
    found = ranks.run(2, fail_in_mid_round, False, env=BETWEEN_MACHINES, discard=True)
    assert found == [["error", "MixedParametersError", True, False]] * 2


def test_a_failed_atomic_round_leaves_large_tensors_as_they_were(ranks: RankPool) -> None:
    found = ranks.run(2, fail_in_mid_round, True, env=BETWEEN_MACHINES, discard=True)
    assert found == [["error", "RoundAbortedError", False, True]] * 2


# ---- what is kept between rounds ----------------------------------------------------------------------------------


def rebind(tensors: list[nn.Parameter]) -> None:
    tensors[0].data = random(*tensors[0].shape, seed=7)


def turn(tensors: list[nn.Parameter]) -> None:
    tensors[1].data = tensors[1].data.t()


def change_dtype(tensors: list[nn.Parameter]) -> None:
    tensors[1].data = tensors[1].data.to(torch.bfloat16)


def lose_a_gradient(tensors: list[nn.Parameter]) -> None:
    tensors[0].grad = None


def add_one(tensors: list[nn.Parameter]) -> None:
    tensors.append(nn.Parameter(random(6, seed=8)))
    tensors[-1].grad = torch.zeros(6)


def tie(tensors: list[nn.Parameter]) -> None:
    tensors[2].data = tensors[3].data


def replace_one(tensors: list[nn.Parameter]) -> None:
    tensors[2] = nn.Parameter(random(*tensors[2].shape, seed=9))
    tensors[2].grad = torch.zeros_like(tensors[2])


def swap(tensors: list[nn.Parameter]) -> None:
    tensors[2], tensors[3] = tensors[3], tensors[2]


CHANGES = [rebind, turn, change_dtype, lose_a_gradient, add_one, tie, replace_one, swap]


@in_place_from()
def average_before_and_after(change: Callable[[list[nn.Parameter]], None]) -> list[bool]:
    averager = OURS.PeriodicModelAverager(period=1000)
    tensors = [nn.Parameter(random(*shape)) for shape in ((400,), (20, 20), (5,), (5,))]
    for tensor in tensors:
        tensor.grad = torch.zeros_like(tensor)
    averager.average_parameters(tensors)
    change(tensors)
    with torch.no_grad():
        for tensor in tensors:
            tensor.add_(random(*tensor.shape, seed=5))
    expected = [mean_of(t) if t.grad is not None else t.detach().clone() for t in tensors]
    averager.step = 0
    averager.average_parameters(tensors)
    return [torch.equal(t, e) for t, e in zip(tensors, expected, strict=True)]


@pytest.mark.filterwarnings("ignore:When period is 1")
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("env", [BETWEEN_MACHINES, {}], ids=["c10d", "shared_memory"])
def test_a_change_between_rounds_is_noticed(ranks: RankPool, change: Any, env: Any) -> None:
    for found in ranks.run(2, average_before_and_after, change, env=env):
        assert all(found)


def read_fragments() -> int:
    """How often the tensors are read in four rounds of a model that stays as it is."""
    reads = []

    class Counted(Fragment):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            reads.append(1)
            super().__init__(*args, **kwargs)

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    averager = OURS.PeriodicModelAverager(period=2)
    with mock.patch.object(plans, "Fragment", Counted):
        for _ in range(8):
            model(torch.ones(4)).backward()
            averager.average_parameters(model.parameters())
    return len(reads)


def test_a_model_that_stays_as_it_is_is_read_once(ranks: RankPool) -> None:
    assert ranks.run(2, read_fragments) == [1, 1]


@in_place_from()
def is_freed() -> list[bool]:
    memories = [np.zeros(size, dtype=np.float32) for size in (5, 400)]
    alive = [weakref.ref(memory) for memory in memories]
    model = [nn.Parameter(torch.from_numpy(memory)) for memory in memories]
    OURS.average_parameters(iter(model), None)
    del model, memories
    deadline = time.monotonic() + 5  # the backend's thread may hold what it has just sent for a moment
    while any(memory() is not None for memory in alive) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    return [memory() is None for memory in alive]


@pytest.mark.parametrize("env", [BETWEEN_MACHINES, {}], ids=["c10d", "shared_memory"])
def test_nothing_that_is_kept_keeps_a_model_alive(ranks: RankPool, env: Any) -> None:
    assert ranks.run(2, is_freed, env=env) == [[True, True]] * 2

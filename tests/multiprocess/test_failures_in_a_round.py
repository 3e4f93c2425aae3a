"""A rank that dies, stops or raises in the middle of an averaging: what the others see, and what becomes of values."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import cadenza.engine.in_place_mean
from cadenza.errors import MixedParametersError, RoundAbortedError, RoundError
from cadenza.transports import c10d, shared_memory
from cadenza.transports.faulty import FaultyTransport
from support.compare import assert_same_on_ranks, same_bits, values_of
from support.models import CASES
from support.ranks import RankPool, outcome
from support.sides import OURS

TRANSPORTS = pytest.mark.parametrize(
    "env",
    [{"CADENZA_SHARED_MEMORY": "1"}, {"CADENZA_SHARED_MEMORY": "0"}],
    ids=["shared_memory", "c10d"],
)
DOOMED = 1
NUMEL = 150_000
TIMEOUT = timedelta(seconds=2)


@contextmanager
def small_buckets() -> Iterator[None]:
    """Lanes of 64 KiB, so that a small model goes through many buckets."""
    lanes = mock.patch.object(c10d, "LANE_BYTES", 1 << 16)
    segment = mock.patch.object(shared_memory, "SEGMENT_BYTES", (1 << 16) * shared_memory.LANES * 4)
    with lanes, segment:
        yield


def model_of_many_buckets() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    sizes = (10, 100_000, 3, NUMEL - 100_013)
    return [nn.Parameter(torch.randn(n, generator=generator)) for n in sizes]


def fault_here(phase: Any, bucket: int, fault: Any) -> None:
    """Let this rank's next averaging fail at a phase of a bucket; -1 is the last one."""
    connect = cadenza.engine.in_place_mean.connect

    def faulty(group: dist.ProcessGroup) -> Any:
        below = connect(group)
        device = torch.device("cpu")
        last = -(-NUMEL // below.capacity(device, torch.float32)) - 1
        assert last >= 8
        cadenza.engine.in_place_mean.connect = connect  # type: ignore[attr-defined]
        return FaultyTransport(below, fail_at=phase, bucket=last if bucket < 0 else bucket, fault=fault)

    cadenza.engine.in_place_mean.connect = faulty  # type: ignore[attr-defined]


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop_until_others_gave_up() -> None:
    subprocess.Popen(["sh", "-c", f"sleep 3.5; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


def run_out_of_memory() -> None:
    raise MemoryError("no memory for this bucket")


FAULTS = {"kill": kill, "stop": stop_until_others_gave_up, "raise": run_out_of_memory}


@small_buckets()
def average_with_fault(phase: str, bucket: int, fault: str, atomic: bool) -> list[Any]:
    """The outcome, and whether every parameter is as it was, or holds the mean."""
    parameters = model_of_many_buckets()
    means = [mean_of(p) for p in parameters]
    before = values_of(parameters)
    group = dist.new_group(timeout=TIMEOUT)
    OURS.average_parameters([nn.Parameter(torch.ones(1))], group)  # the transport is there before anything goes wrong
    if dist.get_rank() == DOOMED:
        fault_here(phase, bucket, FAULTS[fault])
    told = outcome(OURS.average_parameters, parameters, group, atomic=atomic)
    untouched = all(map(same_bits, before, parameters))
    averaged = all(torch.allclose(p, m, atol=1e-6) for p, m in zip(parameters, means, strict=True))
    now = values_of(parameters)
    again = outcome(OURS.average_parameters, parameters, group)
    return [told, untouched, averaged, again[0], all(map(same_bits, now, parameters))]


def mean_of(parameter: torch.Tensor) -> torch.Tensor:
    total = parameter.detach().clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


@TRANSPORTS
@pytest.mark.parametrize(("phase", "bucket"), [("exchange", 0), ("launch", 2)])  # the others: test_rounds.py
def test_an_atomic_round_leaves_the_survivors_of_a_kill_as_they_were(
    ranks: RankPool, env: dict[str, str], phase: str, bucket: int
) -> None:
    results = ranks.run(3, average_with_fault, phase, bucket, "kill", True, expect_dead={DOOMED}, env=env)
    for told, untouched, _, again, unchanged in (results[0], results[2]):
        assert told[:2] == ("error", "RoundAbortedError")
        assert "as they were" in told[2]
        assert untouched
        assert again == "error", "a group with a dead member does not work on in silence"
        assert unchanged
    assert issubclass(RoundAbortedError, RoundError)
    assert issubclass(RoundError, RuntimeError)


@TRANSPORTS
@pytest.mark.parametrize(("phase", "bucket"), [("launch", 2), ("land", 1)])
def test_without_atomic_the_survivors_of_a_kill_are_told_what_their_parameters_hold(
    ranks: RankPool, env: dict[str, str], phase: str, bucket: int
) -> None:
    results = ranks.run(3, average_with_fault, phase, bucket, "kill", False, expect_dead={DOOMED}, env=env)
    for told, untouched, averaged, again, unchanged in (results[0], results[2]):
        if told[0] == "ok":  # everything had arrived before the other one died
            assert averaged
        elif told[1] == "RoundAbortedError":
            assert untouched
        else:
            assert told[1] == "MixedParametersError"
            assert "checkpoint" in told[2]
            assert "atomic=True" in told[2]
        assert again == "error"
        assert unchanged
    assert issubclass(MixedParametersError, RoundError)


@TRANSPORTS
def test_a_rank_that_comes_back_after_the_others_gave_up_obeys_the_vote(ranks: RankPool, env: dict[str, str]) -> None:
    results = ranks.run(3, average_with_fault, "land", -1, "stop", True, env=env, discard=True)
    for told, untouched, *_ in results:
        assert told[:2] == ("error", "RoundAbortedError")
        assert untouched


@TRANSPORTS
@pytest.mark.parametrize("atomic", [True, False], ids=["atomic", "plain"])
@pytest.mark.parametrize(("phase", "bucket"), [("pack", 0), ("land", 1)])
def test_an_exception_on_one_rank_reaches_the_others_as_a_failed_round(
    ranks: RankPool, env: dict[str, str], phase: str, bucket: int, atomic: bool
) -> None:
    results = ranks.run(3, average_with_fault, phase, bucket, "raise", atomic, env=env, discard=True)
    for rank, (told, untouched, _, again, unchanged) in enumerate(results):
        expected = ("MemoryError",) if rank == DOOMED else ("RoundAbortedError", "MixedParametersError")
        assert told[0] == "error"
        assert told[1] in expected
        if atomic or told[1] == "RoundAbortedError":
            assert untouched
        if atomic and rank != DOOMED:
            assert told[1] == "RoundAbortedError"
        assert again == "error"
        assert unchanged


@small_buckets()
def recover() -> list[float]:
    """After a failed round nobody died in: a new group works where the old one refuses."""
    group = dist.new_group([0, 1, 2], timeout=TIMEOUT)
    parameter = nn.Parameter(torch.tensor([float(dist.get_rank())]))
    OURS.average_parameters([parameter], group)
    first = parameter.item()
    if dist.get_rank() == DOOMED:
        fault_here("pack", 0, run_out_of_memory)
    assert outcome(OURS.average_parameters, [parameter], group, atomic=True)[0] == "error"
    assert outcome(OURS.average_parameters, [parameter], group, atomic=True)[0] == "error"
    fresh = dist.new_group([0, 1, 2])
    with torch.no_grad():
        parameter.fill_(3.0 * dist.get_rank())
    OURS.average_parameters([parameter], fresh, atomic=True)
    return [first, parameter.item()]


@TRANSPORTS
def test_a_new_group_works_after_a_failed_round(ranks: RankPool, env: dict[str, str]) -> None:
    assert ranks.run(3, recover, env=env, discard=True) == [[1.0, 3.0]] * 3


def average_atomically(case_name: str) -> None:
    case, rank = CASES[case_name], dist.get_rank()
    plain, atomic = case.model(rank), case.model(rank)
    for model in (plain, atomic):
        case.backward(model, rank, 0)
    addresses = [p.data_ptr() for p in atomic.parameters()]
    OURS.average_parameters_or_parameter_groups(plain.parameters(), None)
    OURS.average_parameters_or_parameter_groups(atomic.parameters(), None, atomic=True)
    for a, b in zip(plain.parameters(), atomic.parameters(), strict=True):
        assert same_bits(a, b)
        assert a.stride() == b.stride()
    assert [p.data_ptr() for p in atomic.parameters()] == addresses
    assert_same_on_ranks(case_name, [p for p in atomic.parameters() if p.grad is not None])


@TRANSPORTS
@pytest.mark.parametrize("case", list(CASES))
def test_an_atomic_round_that_succeeds_gives_the_same_bits(ranks: RankPool, env: dict[str, str], case: str) -> None:
    ranks.run(4, average_atomically, case, env=env)


def train_atomically(kind: str) -> list[Any]:
    case, rank = CASES["mlp"], dist.get_rank()
    models = [case.model(rank), case.model(rank)]
    for model, atomic in zip(models, (False, True), strict=True):
        averager = (
            OURS.PeriodicModelAverager(2, 1, atomic=atomic)
            if kind == "periodic"
            else OURS.HierarchicalModelAverager({2: 2, 4: 4}, 1, atomic=atomic)
        )
        optimizer = OURS.PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), averager)
        for step in range(10):
            optimizer.zero_grad()
            case.backward(model, rank, step)
            optimizer.step()
    return [same_bits(a, b) for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True)]


@pytest.mark.parametrize("kind", ["periodic", "hierarchical"])
def test_averagers_train_alike_with_atomic(ranks: RankPool, kind: str) -> None:
    assert ranks.run(4, train_atomically, kind) == [[True] * 6] * 4


def keys_after_rounds(rounds: int) -> int:
    store = dist.distributed_c10d._get_default_store()
    parameter = nn.Parameter(torch.ones(1))
    OURS.average_parameters([parameter], None, atomic=True)
    dist.barrier()
    before = store.num_keys()
    dist.barrier()
    for _ in range(rounds):
        OURS.average_parameters([parameter], None, atomic=True)
    dist.barrier()
    return store.num_keys() - before


def test_votes_do_not_pile_up_in_the_store(ranks: RankPool) -> None:
    few, many = max(ranks.run(2, keys_after_rounds, 5)), max(ranks.run(2, keys_after_rounds, 50))
    assert many <= few + 4

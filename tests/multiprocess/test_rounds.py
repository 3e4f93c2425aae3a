"""One round on real ranks: what disagreeing, failing, dying and sleeping members leave behind."""

from __future__ import annotations

import gc
import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from cadenza.engine.in_place_mean import average, average_in_place
from cadenza.engine.packing import Fragment
from cadenza.participants.vote import Vote
from cadenza.transports import Transport, connect
from cadenza.transports.faulty import FaultyTransport, Phase
from support.compare import same_bits
from support.ranks import RankPool, outcome

EVERY_TRANSPORT = pytest.mark.parametrize(
    "env",
    [{"CADENZA_SHARED_MEMORY": "1"}, {"CADENZA_SHARED_MEMORY": "0"}],
    ids=["shared_memory", "c10d"],
)
ATOMIC_OR_NOT = pytest.mark.parametrize("atomic", [False, True], ids=["plain", "atomic"])
RANKS = 3
DOOMED = 1
CAPACITY = 64  # values: small buckets, so that small models go through many of them


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def small_buckets(group: dist.ProcessGroup) -> Transport:
    transport = connect(group)
    transport.capacity = lambda device, dtype: CAPACITY  # type: ignore[method-assign]
    return transport


# --- disagreements ----------------------------------------------------------------------------------------------------


@dataclass
class Side:
    """What one rank brings to a round."""

    tensors: list[torch.Tensor]
    taking: list[bool] | None = None
    step: int = 4


def usual() -> Side:
    return Side([torch.ones(2, 3), torch.ones(4, 3), torch.ones(5, dtype=torch.float64)])


def other_shape() -> Side:
    return Side([torch.ones(2, 3), torch.ones(3, 4), torch.ones(5, dtype=torch.float64)])


def other_dtype() -> Side:
    return Side([torch.ones(2, 3), torch.ones(4, 3, dtype=torch.bfloat16), torch.ones(5, dtype=torch.float64)])


def other_order() -> Side:
    return Side([torch.ones(4, 3), torch.ones(2, 3), torch.ones(5, dtype=torch.float64)])


def without_a_gradient() -> Side:
    return Side(usual().tensors, taking=[True, False, True])


def without_any_gradient() -> Side:
    return Side(usual().tensors, taking=[False, False, False])


def one_fewer() -> Side:
    return Side(usual().tensors[:-1])


def none_at_all() -> Side:
    return Side([])


def other_step() -> Side:
    return Side(usual().tensors, step=5)


def other_strides() -> Side:
    return Side([torch.ones(2, 3), torch.ones(3, 4).t(), torch.ones(5, dtype=torch.float64)])


def integers() -> Side:
    return Side([torch.ones(2, 3), torch.ones(4, 3, dtype=torch.int64), torch.ones(5, dtype=torch.float64)])


def two_alike() -> Side:
    return Side([torch.ones(6), torch.ones(6)])


def tied() -> Side:
    weight = torch.ones(6)
    return Side([nn.Parameter(weight), nn.Parameter(weight)])


def very_many() -> Side:
    return Side([torch.ones(3) for _ in range(1000)])


def very_many_but_one() -> Side:
    return Side([torch.ones(4 if i == 700 else 3) for i in range(1000)])


HERE, THERE = "on ranks 0, 2", "on rank 1"
DISAGREEMENTS: list[tuple[Callable[[], Side], Callable[[], Side], list[str]]] = [
    (
        usual,
        other_shape,
        [f"parameter 1: (4, 3) float32 on cpu, takes part {HERE}", f"(3, 4) float32 on cpu, takes part {THERE}"],
    ),
    (usual, other_dtype, [f"(4, 3) float32 on cpu, takes part {HERE}", f"(4, 3) bfloat16 on cpu, takes part {THERE}"]),
    (usual, other_order, [f"parameter 0: (2, 3) float32 on cpu, takes part {HERE}", "2 parameters differ in all"]),
    (
        usual,
        without_a_gradient,
        [f"takes part {HERE}", f"parameter 1: (4, 3) float32 on cpu, has no gradient {THERE}", "zero_grad()"],
    ),
    (usual, without_any_gradient, [f"has no gradient {THERE}", "3 parameters differ in all", "zero_grad()"]),
    (usual, one_fewer, [f"parameter 2: (5,) float64 on cpu, takes part {HERE}", f"nothing at position 2 {THERE}"]),
    (usual, none_at_all, [f"nothing at position 0 {THERE}", "3 parameters differ in all"]),
    (usual, other_step, [f"step 4 {HERE}", f"step 5 {THERE}", "once per step"]),
    (usual, other_strides, [f"with strides (1, 4), takes part {THERE}"]),
    (usual, integers, ["On rank 1: parameter 1 has dtype int64"]),
    (two_alike, tied, ["how the parameters lie in memory", "tied"]),
    (very_many, very_many_but_one, [f"parameter 700: (3,) float32 on cpu, takes part {HERE}"]),
]


def disagree(most: Callable[[], Side], one: Callable[[], Side], atomic: bool) -> tuple[Any, ...]:
    side = one() if dist.get_rank() == DOOMED else most()
    before = [tensor.clone() for tensor in side.tensors]
    for _ in range(2):  # the second time no worse than the first
        told = outcome(average, Fragment(side.tensors, taking=side.taking), world(), step=side.step, atomic=atomic)
        assert all(map(torch.equal, side.tensors, before)), "changed"
    good = torch.full((1000,), 3.0 * dist.get_rank())
    average(Fragment([good]), world(), atomic=atomic)
    assert good.eq(3.0).all(), "the group is still of use"
    return told


@EVERY_TRANSPORT
@ATOMIC_OR_NOT
@pytest.mark.parametrize(("most", "one", "words"), DISAGREEMENTS, ids=[one.__name__ for _, one, _ in DISAGREEMENTS])
def test_a_disagreement_is_told_in_the_same_words_on_every_rank_and_changes_nothing(
    ranks: RankPool,
    env: dict[str, str],
    atomic: bool,
    most: Callable[[], Side],
    one: Callable[[], Side],
    words: list[str],
) -> None:
    results = ranks.run(RANKS, disagree, most, one, atomic, env=env)
    assert len(set(results)) == 1
    kind, error, text = results[0]
    assert kind == "error"
    assert error == ("UnsupportedTensorError" if one is integers else "DisagreementError")
    assert all(word in text for word in words), text
    assert text.endswith("Nothing was sent and no parameter was changed.")


def everyone_differs() -> tuple[Any, ...]:
    return outcome(average, Fragment([torch.ones(dist.get_rank() + 1)]), world())


def test_every_side_of_a_disagreement_is_told(ranks: RankPool) -> None:
    results = ranks.run(4, everyone_differs)
    assert len(set(results)) == 1
    assert all(f"({rank + 1},) float32 on cpu, takes part on rank {rank}" in results[0][2] for rank in range(4))


def nothing_on_any_rank(tensors: int) -> list[tuple[Any, ...]]:
    told = outcome(average, Fragment([torch.ones(2)] * tensors, taking=[False] * tensors), world())
    good = torch.tensor([2.0 * dist.get_rank()])
    average(Fragment([good]), world())
    return [told, ("mean", good.item())]


@EVERY_TRANSPORT
@pytest.mark.parametrize(
    ("tensors", "words"), [(0, "no parameter was given"), (5, "none of the 5 given parameters has a gradient")]
)
def test_nothing_to_average_is_an_error_and_the_group_works_on(
    ranks: RankPool, env: dict[str, str], tensors: int, words: str
) -> None:
    for told, mean in ranks.run(RANKS, nothing_on_any_rank, tensors, env=env):
        assert told[:2] == ("error", "NothingToAverageError")
        assert words in told[2]
        assert mean == ("mean", 2.0)


def alone() -> list[tuple[Any, ...]]:
    mine = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    assert isinstance(mine, dist.ProcessGroup)
    values = torch.tensor([1.5])
    return [
        outcome(average, Fragment([values]), mine),
        outcome(average, Fragment([]), mine),
        outcome(average, Fragment([torch.ones(2, dtype=torch.int64)]), mine),
        ("values", values.tolist()),
    ]


def test_a_group_of_one_keeps_its_values_and_its_errors(ranks: RankPool) -> None:
    for fine, empty, unfit, values in ranks.run(2, alone):
        assert fine == ("ok", None)
        assert empty[1] == "NothingToAverageError"
        assert unfit[1] == "UnsupportedTensorError"
        assert "parameter 0 has dtype int64" in unfit[2]
        assert values == ("values", [1.5])


def differently_strided(atomic: bool) -> list[list[float]]:
    transport = small_buckets(world())
    tensors = []
    for shape in ((40, 3), (7,), (5, 6, 7)):
        # Multiples of the number of ranks, so that the mean is exact.
        values = (torch.arange(float(torch.Size(shape).numel())).view(shape) + 3 * dist.get_rank()) * RANKS
        if dist.get_rank() == DOOMED:  # every second column of a larger tensor
            values = torch.zeros(*shape[:-1], shape[-1] * 2)[..., ::2].copy_(values)
        tensors.append(values)
    average_in_place(Fragment(tensors), transport, atomic=atomic)
    return [tensor.flatten().tolist() for tensor in tensors]


@EVERY_TRANSPORT
@ATOMIC_OR_NOT
def test_a_sliced_tensor_is_averaged_with_contiguous_ones_of_other_ranks(
    ranks: RankPool, env: dict[str, str], atomic: bool
) -> None:
    results = ranks.run(RANKS, differently_strided, atomic, env=env, group_timeout_s=4, timeout_s=15)
    expected = [[RANKS * (float(i) + 3 * (RANKS - 1) / 2) for i in range(numel)] for numel in (120, 7, 210)]
    assert results == [expected] * RANKS


# --- DTensor ----------------------------------------------------------------------------------------------------------


def average_shards(over: str) -> tuple[Any, ...]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    replica = dist.get_rank() // 2
    weight = distribute_tensor(torch.arange(6.0) + 10 * replica, mesh["shard"], [Shard(0)])
    parameter = nn.Parameter(weight)
    address = parameter.to_local().data_ptr()  # type: ignore[attr-defined]
    told = outcome(average, Fragment([parameter]), mesh.get_group(over))
    local = parameter.to_local()  # type: ignore[attr-defined]
    return told, local.tolist(), local.data_ptr() == address


def test_shards_are_averaged_in_place_along_the_replicate_dimension(ranks: RankPool) -> None:
    first, second = [5.0, 6.0, 7.0], [8.0, 9.0, 10.0]
    expected = [(("ok", None), values, True) for values in (first, second, first, second)]
    assert ranks.run(4, average_shards, "replicate") == expected


def test_averaging_shards_of_one_copy_is_refused_with_the_group_to_use_instead(ranks: RankPool) -> None:
    for rank, (told, local, _) in enumerate(ranks.run(4, average_shards, "shard")):
        assert told[:2] == ("error", "UnsupportedTensorError")
        assert "parameter 0 is a DTensor whose shards live on ranks" in told[2]
        assert "mesh.get_group('replicate')" in told[2]
        start = 10.0 * (rank // 2) + 3 * (rank % 2)
        assert local == [start, start + 1, start + 2]


# --- failures ---------------------------------------------------------------------------------------------------------


def model(rank: int) -> list[nn.Parameter]:
    """Values whose mean is exact in any order of summation, in 5 buckets of fp32 and 3 of bf16."""
    generator = torch.Generator().manual_seed(rank)

    def values(*shape: int) -> torch.Tensor:
        return torch.randint(-20, 20, shape, generator=generator) * float(RANKS)

    return [
        nn.Parameter(values(10)),
        nn.Parameter(values(100).to(torch.bfloat16)),
        nn.Parameter(values(20, 10)),
        nn.Parameter(values(5, 30)[:, ::2]),
        nn.Parameter(values(60).to(torch.bfloat16)),
    ]


BUCKETS = 5 + 3
FIRST, MIDDLE, LAST = 0, BUCKETS // 2, BUCKETS - 1


def packed(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    buckets = Fragment(tensors).buckets(lambda device, dtype: CAPACITY)
    memories = [torch.empty(bucket.numel, dtype=bucket.dtype) for bucket in buckets]
    for bucket, memory in zip(buckets, memories, strict=True):
        bucket.pack(memory)
    return memories


@torch.no_grad()
def means() -> list[nn.Parameter]:
    models = [model(rank) for rank in range(RANKS)]
    for parameters in zip(*models, strict=True):
        parameters[0].copy_(sum(p.float() for p in parameters) / RANKS)
    return models[0]


def what_buckets_hold(parameters: list[nn.Parameter]) -> str:
    """A letter for each bucket: L for the rank's own values, M for the mean, X for anything else."""
    rank = dist.get_rank()
    rows = zip(packed(parameters), packed(model(rank)), packed(means()), strict=True)
    letters = ["L" if same_bits(now, local) else "M" if same_bits(now, mean) else "X" for now, local, mean in rows]
    assert len(letters) == BUCKETS
    return "".join(letters)


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def interrupt() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(10)


def oversleep() -> None:
    time.sleep(3.5)


FAULTS: dict[str, Callable[[], None] | None] = {
    "raise": None,
    "kill": kill,
    "interrupt": interrupt,
    "oversleep": oversleep,
}


@dataclass(frozen=True)
class Seen:
    """What one rank saw of a round."""

    told: tuple[Any, ...]
    holds: str
    again: tuple[Any, ...]
    holds_then: str


def attempt(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    try:
        return outcome(function, *args, **kwargs)
    except KeyboardInterrupt:
        return ("error", "KeyboardInterrupt", "")


def fail(phase: Phase | str, bucket: int, fault: str, atomic: bool) -> Seen:
    """Run a round in which one rank fails, then try once more."""
    rank = dist.get_rank()
    transport = small_buckets(world())
    parameters = model(rank)
    if rank == DOOMED:
        act = FAULTS[fault]
        if phase == "vote":
            fail_at_the_vote(act)
        elif phase == "voted":
            fail_after_the_vote(act)
        else:
            transport = FaultyTransport(transport, fail_at=phase, bucket=bucket, fault=act)  # type: ignore[arg-type]
    told = attempt(average_in_place, Fragment(parameters), transport, step=12, atomic=atomic)
    holds = what_buckets_hold(parameters)
    again = attempt(average, Fragment(parameters), world(), step=13)
    seen = Seen(told, holds, again, what_buckets_hold(parameters))
    if rank == DOOMED and fault in ("raise", "interrupt"):
        del transport
        gc.collect()
        dist.destroy_process_group()  # as at the end of a program, so that nobody waits for the time-out
    return seen


def fail_at_the_vote(act: Callable[[], None] | None) -> None:
    cast = Vote.ready

    def ready(self: Vote) -> bool:
        Vote.ready = cast  # type: ignore[method-assign]
        assert act is not None
        act()
        return cast(self)

    Vote.ready = ready  # type: ignore[method-assign]


def fail_after_the_vote(act: Callable[[], None] | None) -> None:
    def ready(self: Vote) -> bool:
        self._store.add(self._ready_key, 1)
        assert act is not None
        act()
        return False

    Vote.ready = ready  # type: ignore[method-assign]


POINTS: list[tuple[Phase, int]] = [
    ("exchange", FIRST),
    *((phase, bucket) for phase in ("pack", "launch", "combine", "land") for bucket in (FIRST, MIDDLE, LAST)),
]  # type: ignore[list-item]
EVERY_POINT = pytest.mark.parametrize(("phase", "bucket"), POINTS)


def run_failing(
    ranks: RankPool, env: dict[str, str], phase: str, bucket: int, fault: str, atomic: bool, **options: Any
) -> list[Seen]:
    """What the ranks that are left have seen."""
    options = {"group_timeout_s": 4, "timeout_s": 30, **options}
    dead = {DOOMED} if fault == "kill" else ()
    results = ranks.run(RANKS, fail, phase, bucket, fault, atomic, env=env, expect_dead=dead, **options)
    return [seen for seen in results if seen is not None]


def assert_nothing_changed(seen: Seen) -> None:
    assert seen.told[:2] == ("error", "RoundAbortedError")
    assert "step 12 failed" in seen.told[2]
    assert "the parameters are as they were" in seen.told[2]
    assert seen.holds == "L" * BUCKETS


def assert_told_what_is_mixed(seen: Seen) -> None:
    assert seen.told[:2] == ("error", "MixedParametersError")
    counts = re.search(r"step 12 failed on its way: (\d+) of (\d+) buckets hold the mean", seen.told[2])
    assert counts is not None
    landed, count = map(int, counts.groups())
    assert count == BUCKETS
    assert seen.holds == "M" * landed + "L" * (BUCKETS - landed)
    assert "checkpoint" in seen.told[2]
    assert "atomic=True" in seen.told[2]


def assert_of_no_more_use(seen: Seen) -> None:
    assert seen.again[:2] == ("error", "RoundAbortedError")
    assert "earlier averaging on this process group failed" in seen.again[2]
    assert "make a new one" in seen.again[2]
    assert seen.holds_then == seen.holds


def assert_plain_failure(results: list[Seen], *, may_succeed: bool) -> None:
    """Every element holds the local value or the mean, and every rank says truly which."""
    for seen in results:
        if seen.told[0] == "ok":
            assert may_succeed
            assert seen.holds == "M" * BUCKETS
        elif seen.told[1] == "RoundAbortedError":
            assert_nothing_changed(seen)
        else:
            assert_told_what_is_mixed(seen)
        if seen.told[0] == "error":
            assert_of_no_more_use(seen)
    if any(seen.told[1:2] == ("RoundAbortedError",) for seen in results):
        assert {seen.holds for seen in results} == {"L" * BUCKETS}, "one says that nothing was sent, another got it"
    assert any(seen.told[0] == "error" for seen in results) or may_succeed


def assert_atomic_failure(results: list[Seen]) -> None:
    for seen in results:
        assert_nothing_changed(seen)
        assert_of_no_more_use(seen)


@EVERY_TRANSPORT
@EVERY_POINT
@pytest.mark.parametrize("fault", ["raise", "kill"])
def test_a_failed_round_leaves_local_values_or_means_and_says_which(
    ranks: RankPool, env: dict[str, str], phase: str, bucket: int, fault: str
) -> None:
    results = run_failing(ranks, env, phase, bucket, fault, atomic=False)
    # Once a rank has handed over everything it had, the others can finish without it.
    assert_plain_failure(results, may_succeed=phase == "land" and bucket == LAST)


@EVERY_TRANSPORT
@EVERY_POINT
@pytest.mark.parametrize("fault", ["raise", "kill"])
def test_a_failed_atomic_round_changes_nothing_on_any_rank(
    ranks: RankPool, env: dict[str, str], phase: str, bucket: int, fault: str
) -> None:
    assert_atomic_failure(run_failing(ranks, env, phase, bucket, fault, atomic=True))


@EVERY_TRANSPORT
def test_a_rank_killed_between_the_wire_and_the_vote_changes_nothing_on_the_others(
    ranks: RankPool, env: dict[str, str]
) -> None:
    assert_atomic_failure(run_failing(ranks, env, "vote", 0, "kill", atomic=True, group_timeout_s=2))


@EVERY_TRANSPORT
def test_the_survivors_of_a_rank_killed_after_its_vote_obey_one_verdict(ranks: RankPool, env: dict[str, str]) -> None:
    results = run_failing(ranks, env, "voted", 0, "kill", atomic=True, group_timeout_s=2)
    assert len({seen.told[0] for seen in results}) == 1
    for seen in results:
        if seen.told[0] == "ok":
            assert seen.holds == "M" * BUCKETS
        else:
            assert_nothing_changed(seen)


@EVERY_TRANSPORT
def test_a_rank_that_oversleeps_the_vote_obeys_the_others(ranks: RankPool, env: dict[str, str]) -> None:
    results = run_failing(ranks, env, "vote", 0, "oversleep", atomic=True, group_timeout_s=2)
    assert len(results) == RANKS
    assert_atomic_failure(results)


@EVERY_TRANSPORT
def test_a_rank_that_oversleeps_a_plain_round_finds_it_failed(ranks: RankPool, env: dict[str, str]) -> None:
    results = run_failing(ranks, env, "launch", MIDDLE, "oversleep", atomic=False, group_timeout_s=2, discard=True)
    assert len(results) == RANKS
    assert_plain_failure(results, may_succeed=False)
    assert {seen.told[1] for seen in results} == {"MixedParametersError"}


@EVERY_TRANSPORT
@ATOMIC_OR_NOT
@pytest.mark.parametrize(("phase", "bucket"), [("pack", FIRST), ("combine", MIDDLE)])
def test_an_interrupted_round_gives_the_group_up_and_lets_the_interrupt_through(
    ranks: RankPool, env: dict[str, str], atomic: bool, phase: str, bucket: int
) -> None:
    results = run_failing(ranks, env, phase, bucket, "interrupt", atomic=atomic)
    interrupted = results.pop(DOOMED)
    assert interrupted.told[1] == "KeyboardInterrupt"
    assert_of_no_more_use(interrupted)
    if atomic:
        assert interrupted.holds == "L" * BUCKETS
        assert_atomic_failure(results)
    else:
        assert set(interrupted.holds) <= set("LM")
        assert_plain_failure(results, may_succeed=False)


def never_come(atomic: bool) -> Seen | None:
    """One rank does not take part at all, and ends."""
    transport = small_buckets(world())
    dist.barrier()
    if dist.get_rank() == DOOMED:
        del transport
        gc.collect()
        dist.destroy_process_group()
        return None
    parameters = model(dist.get_rank())
    told = outcome(average_in_place, Fragment(parameters), transport, step=12, atomic=atomic)
    holds = what_buckets_hold(parameters)
    again = outcome(average, Fragment(parameters), world(), step=13)
    return Seen(told, holds, again, what_buckets_hold(parameters))


@EVERY_TRANSPORT
@ATOMIC_OR_NOT
def test_a_rank_that_has_ended_before_the_round_fails_it_before_anything_is_sent(
    ranks: RankPool, env: dict[str, str], atomic: bool
) -> None:
    results = ranks.run(RANKS, never_come, atomic, env=env, group_timeout_s=4, timeout_s=30)
    assert_atomic_failure([seen for seen in results if seen is not None])


# --- success, in bounded memory ---------------------------------------------------------------------------------------


def succeed(atomic: bool) -> list[str]:
    transport = small_buckets(world())
    seen = []
    for step in range(3):
        parameters = model(dist.get_rank())
        places = [(p.data_ptr(), p.stride()) for p in parameters]
        average_in_place(Fragment(parameters), transport, step=step, atomic=atomic)
        assert [(p.data_ptr(), p.stride()) for p in parameters] == places
        seen.append(what_buckets_hold(parameters))
    return seen


@EVERY_TRANSPORT
@ATOMIC_OR_NOT
def test_a_round_of_many_buckets_lands_the_mean_in_place(ranks: RankPool, env: dict[str, str], atomic: bool) -> None:
    assert ranks.run(RANKS, succeed, atomic, env=env) == [["M" * BUCKETS] * 3] * RANKS


MIB = 1 << 20


def status_bytes(key: str) -> int:
    """An entry of this process's memory figures."""
    found = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def peak_of_a_round(fragment_bytes: int, atomic: bool) -> float:
    """How far resident memory rises above what it was, in MiB, at the first averaging over a group."""
    average(Fragment([torch.ones(10)]), dist.new_group())  # type: ignore[arg-type]
    count = 16
    tensors = [torch.full((fragment_bytes // count // 4,), float(dist.get_rank())) for _ in range(count)]
    gc.collect()
    dist.barrier()
    before = status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew from here
    average(Fragment(tensors), world(), atomic=atomic)
    peak = status_bytes("VmHWM") - before
    assert all(tensor.eq((dist.get_world_size() - 1) / 2).all() for tensor in tensors)
    return peak / MIB


@EVERY_TRANSPORT
@pytest.mark.parametrize("world_size", [2, 4])
def test_averaging_takes_a_bounded_amount_of_memory(ranks: RankPool, env: dict[str, str], world_size: int) -> None:
    assert max(ranks.run(world_size, peak_of_a_round, 64 * MIB, False, env=env)) < 40


@EVERY_TRANSPORT
def test_an_atomic_round_takes_one_scratch_copy_more(ranks: RankPool, env: dict[str, str]) -> None:
    assert max(ranks.run(2, peak_of_a_round, 64 * MIB, True, env=env)) < 64 + 40

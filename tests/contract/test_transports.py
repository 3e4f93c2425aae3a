"""What every transport promises, tried on each of them with 2, 3 and 4 ranks: real ones, or threads for loopback."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from cadenza.errors import NotInitializedError, TransportError
from cadenza.testing import workers
from cadenza.testing.transport_contract import (
    WIRE_DTYPES,
    average_buckets,
    check_abandoned,
    check_broadcast,
    check_bytes,
    check_means,
    check_messages,
    check_overlap,
    check_place,
    check_rounds,
    check_transport,
)
from cadenza.transports import C10dTransport, Transport, connect, shared_memory
from cadenza.transports.c10d_group import group_of
from cadenza.transports.faulty import FaultyTransport
from cadenza.transports.group import current_group
from cadenza.transports.loopback import LoopbackGroup
from cadenza.transports.shared_memory import SharedMemoryTransport, open_shared_memory
from cadenza.transports.through_host import ThroughHost
from support.compare import same_bits
from support.ranks import RankPool, outcome

CPU = torch.device("cpu")


def c10d(ranks: Sequence[int] | None = None) -> Transport:
    return C10dTransport(process_group(ranks))


def shared(ranks: Sequence[int] | None = None) -> Transport:
    transport = open_shared_memory(C10dTransport(process_group(ranks)))
    assert transport is not None
    return transport


def through_host(ranks: Sequence[int] | None = None) -> Transport:
    """A transport whose backend is said to reach no device: every message is copied to memory for sending and back."""
    return ThroughHost(shared(ranks), lambda _: False)


def like_nccl(ranks: Sequence[int] | None = None) -> Transport:
    """Gloo that passes for NCCL, with `ReduceOp.AVG` and a true all-gather: the way of GPUs, as far as it goes here."""
    return NcclDouble(process_group(ranks))


class NcclDouble(C10dTransport):
    def backend(self, device: torch.device) -> str | None:
        return "nccl"

    def start(self, collective: Callable[..., Any], *tensors: torch.Tensor, **options: Any) -> Callable[[], None]:
        averages = options.get("op") == dist.ReduceOp.AVG  # Gloo has none
        wait = super().start(collective, *tensors, **({**options, "op": dist.ReduceOp.SUM} if averages else options))

        def finish() -> None:
            wait()
            if averages:
                tensors[0].div_(len(self.members))

        return finish


def faulty(ranks: Sequence[int] | None = None) -> Transport:
    """A faulty transport that never fails must keep every promise of the one below it."""
    return FaultyTransport(shared(ranks), fail_at="land", bucket=1 << 60)


def loopback(ranks: Sequence[int] | None = None) -> Transport:
    group = current_group()
    assert isinstance(group, LoopbackGroup)
    return group.connect(group.ranks if ranks is None else ranks)


Open = Callable[[Sequence[int] | None], Transport]
OF_PROCESSES = pytest.mark.parametrize(
    "opening", [c10d, shared, faulty, through_host], ids=lambda opening: opening.__name__
)
EVERY_TRANSPORT = pytest.mark.parametrize(
    "opening", [c10d, shared, faulty, loopback, through_host], ids=lambda opening: opening.__name__
)
DIFFERENT = pytest.mark.parametrize("opening", [c10d, shared, loopback], ids=lambda opening: opening.__name__)
EVERY_SIZE = pytest.mark.parametrize("world", [2, 3, 4])


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def process_group(ranks: Sequence[int] | None) -> dist.ProcessGroup:
    """The world, or a new group of some ranks."""
    if ranks is None:
        return world()
    group = dist.new_group(list(ranks), use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)
    return group


def run(ranks: RankPool, opening: Open, count: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """What the function gives on every rank: a thread for loopback, else a process."""
    if opening is not loopback:
        return ranks.run(count, function, opening, *args)
    with workers(count) as pool:
        return pool.run(lambda _: function(opening, *args))


def rank_of(transport: Transport) -> int:
    return transport.members[transport.position]


def in_rank_order(transport: Transport) -> bool:
    """Whether it also sums 32- and 64-bit values in rank order; Gloo has an order of its own."""
    return not isinstance(transport, C10dTransport)


def average_all_sizes(opening: Open, dtype: torch.dtype) -> None:
    transport = opening(None)
    check_means(transport, dtype, rank_order=in_rank_order(transport))


@EVERY_TRANSPORT
@EVERY_SIZE
@pytest.mark.parametrize("dtype", WIRE_DTYPES)
def test_values_become_their_mean_the_same_bits_on_all_ranks(
    ranks: RankPool, opening: Open, world: int, dtype: torch.dtype
) -> None:
    run(ranks, opening, world, average_all_sizes, dtype)


def average_more_buckets_than_lanes(opening: Open) -> None:
    transport = opening(None)
    check_overlap(transport, rank_order=in_rank_order(transport))


@EVERY_TRANSPORT
@EVERY_SIZE
def test_more_buckets_than_lanes_overlap_without_touching_each_other(
    ranks: RankPool, opening: Open, world: int
) -> None:
    run(ranks, opening, world, average_more_buckets_than_lanes)


def average_many_rounds(opening: Open) -> None:
    transport = opening(None)
    check_rounds(transport, rank_order=in_rank_order(transport))


@EVERY_TRANSPORT
@EVERY_SIZE
def test_many_rounds_in_a_row_stay_in_step(ranks: RankPool, opening: Open, world: int) -> None:
    run(ranks, opening, world, average_many_rounds)


def exchange_payloads(opening: Open) -> None:
    check_messages(opening(None))


@EVERY_TRANSPORT
@EVERY_SIZE
def test_short_and_long_messages_arrive_in_rank_order(ranks: RankPool, opening: Open, world: int) -> None:
    run(ranks, opening, world, exchange_payloads)


def broadcast_kinds(opening: Open) -> None:
    transport = opening(None)
    check_broadcast(transport)
    with pytest.raises(ValueError, match="contiguous"):
        transport.broadcast(torch.ones(2, 3).t(), 0)


@EVERY_TRANSPORT
@EVERY_SIZE
def test_a_tensor_of_any_kind_gets_the_values_of_one_member(ranks: RankPool, opening: Open, world: int) -> None:
    run(ranks, opening, world, broadcast_kinds)


def scatter_and_gather(opening: Open) -> None:
    check_bytes(opening(None))


@EVERY_TRANSPORT
@EVERY_SIZE
def test_bytes_are_scattered_and_gathered_in_rank_order(ranks: RankPool, opening: Open, world: int) -> None:
    run(ranks, opening, world, scatter_and_gather)


def keep_all_promises(opening: Open) -> None:
    transport = opening(None)
    check_transport(transport, rank_order=in_rank_order(transport))


@pytest.mark.parametrize(
    "opening", [c10d, shared, faulty, loopback, through_host, like_nccl], ids=lambda opening: opening.__name__
)
def test_the_importable_contract_holds(ranks: RankPool, opening: Open) -> None:
    run(ranks, opening, 2, keep_all_promises)


def average_in_a_subgroup(opening: Open) -> list[float] | None:
    rank = group_of(None).rank
    if rank == 2:
        return None
    transport = opening([3, 1, 0])
    assert sorted(transport.members) == [0, 1, 3]
    assert rank_of(transport) == rank
    [mean] = average_buckets(transport, [torch.full((2,), float(rank))])
    return mean.tolist()


@EVERY_TRANSPORT
def test_a_part_of_the_ranks_averages_among_itself(ranks: RankPool, opening: Open) -> None:
    mean = [4 / 3, 4 / 3]
    results = run(ranks, opening, 4, average_in_a_subgroup)
    assert results == [pytest.approx(mean), pytest.approx(mean), None, pytest.approx(mean)]


def average_two_groups_in_turn(opening: Open) -> None:
    """Two transports of the same ranks do not hear each other."""
    one, other = opening(None), opening([0, 1, 2])
    for number in range(5):
        values = [torch.full((100,), float(10 * number + place)) for place in range(3)]
        for transport in (one, other) if number % 2 else (other, one):
            [mean] = average_buckets(transport, [values[transport.position]])
            assert mean.tolist() == [10.0 * number + 1] * 100


@DIFFERENT
def test_transports_of_two_groups_work_side_by_side(ranks: RankPool, opening: Open) -> None:
    run(ranks, opening, 3, average_two_groups_in_turn)


def average_the_same_everywhere(opening: Open, dtype: torch.dtype) -> None:
    transport = opening(None)
    mine = torch.randn(5000, generator=torch.Generator().manual_seed(7), dtype=torch.float64).to(dtype)
    if len(transport.members) == 3:
        [mean] = average_buckets(transport, [mine])
        torch.testing.assert_close(mean, mine, rtol=torch.finfo(dtype).eps, atol=0)  # v + v + v may round
    else:
        largest = torch.tensor([torch.finfo(dtype).max, torch.finfo(dtype).min, -0.0], dtype=dtype)
        mine = torch.cat([mine, largest])
        [mean] = average_buckets(transport, [mine])
        assert same_bits(mean, mine)


@DIFFERENT
@EVERY_SIZE
@pytest.mark.parametrize("dtype", WIRE_DTYPES)
def test_the_mean_of_equal_values_is_that_value(ranks: RankPool, opening: Open, world: int, dtype: torch.dtype) -> None:
    run(ranks, opening, world, average_the_same_everywhere, dtype)


def average_extremes(opening: Open, dtype: torch.dtype) -> list[float]:
    transport = opening(None)
    mine = torch.full((4,), torch.finfo(dtype).max, dtype=dtype)
    if transport.position == 1:
        mine[1], mine[2] = float("nan"), float("inf")
    [mean] = average_buckets(transport, [mine])
    assert mean[0] == mean[3] == torch.finfo(dtype).max
    assert mean[1].isnan()
    return [mean[2].item()]


# Three times the largest bf16 number is no fp32 number.
@DIFFERENT
@pytest.mark.parametrize(
    ("world", "dtype"), [*((n, torch.float16) for n in (2, 3, 4)), *((n, torch.bfloat16) for n in (2, 4))], ids=str
)
def test_16_bit_sums_do_not_overflow_and_special_values_reach_everyone(
    ranks: RankPool, opening: Open, world: int, dtype: torch.dtype
) -> None:
    assert run(ranks, opening, world, average_extremes, dtype) == [[float("inf")]] * world


def check_the_place(opening: Open) -> None:
    check_place(opening(None))


@EVERY_TRANSPORT
@EVERY_SIZE
def test_the_capacity_is_the_same_on_all_ranks_and_larger_for_smaller_values(
    ranks: RankPool, opening: Open, world: int
) -> None:
    run(ranks, opening, world, check_the_place)


def destroy_the_group(opening: Open) -> tuple[str, str]:
    known = set(dist.distributed_c10d._world.pg_map)
    transport = opening(range(dist.get_world_size()))
    [group] = set(dist.distributed_c10d._world.pg_map) - known
    del known
    average_buckets(transport, [torch.ones(100), torch.ones(3, dtype=torch.bfloat16)])
    transport.exchange(b"hello")()
    transport.exchange(b"h" * 5000)()
    alive = weakref.ref(group)
    dist.barrier()
    dist.destroy_process_group(group)
    del group
    gc.collect()
    assert alive() is None, gc.get_referrers(alive())
    with pytest.raises(NotInitializedError, match="destroyed") as caught:
        _ = transport.store
    return type(caught.value).__name__, str(caught.value)


@OF_PROCESSES
def test_a_transport_does_not_keep_a_destroyed_group_alive(ranks: RankPool, opening: Open) -> None:
    first, *others = ranks.run(3, destroy_the_group, opening)
    assert all(other == first for other in others)


def shared_maps() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:cadenza")


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def connect_and_destroy() -> list[int]:
    """The shared mappings and open descriptors before, with and after a group's transport."""
    seen = [shared_maps(), open_descriptors()]
    for _ in range(2):
        group = dist.new_group()
        assert isinstance(group, dist.ProcessGroup)
        transport = weakref.ref(connect(group))
        assert connect(group) is transport(), "one transport a group"
        average_buckets(connect(group), [torch.ones(10)])
        seen.append(shared_maps())
        dist.barrier()
        dist.destroy_process_group(group)
        del group
        gc.collect()
        assert transport() is None
    return [*seen, shared_maps(), open_descriptors()]


def test_memory_and_sockets_go_with_the_group(ranks: RankPool) -> None:
    ranks.run(3, connect_and_destroy)  # whatever stays open from the first use is there now
    for maps, descriptors, with_one, with_another, maps_after, descriptors_after in ranks.run(3, connect_and_destroy):
        assert (maps, with_one, with_another, maps_after) == (0, 1, 1, 0)
        assert descriptors_after <= descriptors


def abandon(opening: Open) -> tuple[Any, ...]:
    transport = opening(None)
    average_buckets(transport, [torch.ones(10)])
    check_abandoned(transport)
    return outcome(average_buckets, transport, [torch.ones(3, dtype=torch.bfloat16)])


@EVERY_TRANSPORT
def test_an_abandoned_transport_says_so_at_every_later_use(ranks: RankPool, opening: Open) -> None:
    for use in run(ranks, opening, 2, abandon):
        assert use[:2] == ("error", "TransportError")
        assert "earlier averaging on this process group failed" in use[2]
        assert "make a new one" in use[2]


def peer_abandons(opening: Open, stage: str) -> tuple[Any, ...]:
    transport = opening(None)
    transport.exchange(b"all are here")()
    if transport.position == 1:
        if stage == "exchange":
            transport.exchange(b"hello")
        transport.abandon()
        return ()

    def use() -> None:
        transport.exchange(b"hello")()
        average_buckets(transport, [torch.ones(10)])

    return outcome(use)


@pytest.mark.parametrize("stage", ["exchange", "before"])
@pytest.mark.parametrize("opening", [shared, loopback], ids=lambda opening: opening.__name__)
def test_peers_of_one_that_abandoned_are_let_go_at_once(ranks: RankPool, opening: Open, stage: str) -> None:
    started = time.monotonic()
    results = run(ranks, opening, 3, peer_abandons, stage)
    assert time.monotonic() - started < 10, "sooner than the timeout"
    for result in (results[0], results[2]):
        assert result[:2] == ("error", "TransportError")
        assert "has ended, or gave up" in result[2]
    assert any("Rank 1 has ended" in text for _, _, text in (results[0], results[2])), "who noticed it tells the others"


def kind_of_transport(refusing: int | None, elsewhere: int | None) -> tuple[str, float, int]:
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == refusing:
            patch.setenv("CADENZA_SHARED_MEMORY", "0")
        if dist.get_rank() == elsewhere:
            patch.setattr(shared_memory, "_machine", lambda: b"another machine!")
        transport = connect(world())
    [mean] = average_buckets(transport, [torch.tensor([float(dist.get_rank())])])
    return type(transport).__name__, mean.item(), shared_maps()


def test_ranks_of_one_machine_share_memory(ranks: RankPool) -> None:
    assert ranks.run(3, kind_of_transport, None, None) == [(SharedMemoryTransport.__name__, 1.0, 1)] * 3


@pytest.mark.parametrize("refusing", [0, 2])
def test_one_rank_that_refuses_to_share_memory_makes_all_use_the_group(ranks: RankPool, refusing: int) -> None:
    assert ranks.run(3, kind_of_transport, refusing, None) == [(C10dTransport.__name__, 1.0, 0)] * 3


def test_ranks_of_different_machines_use_the_group(ranks: RankPool) -> None:
    assert ranks.run(3, kind_of_transport, None, 1) == [(C10dTransport.__name__, 1.0, 0)] * 3


def refuse_to_map(failing: int) -> tuple[str, float, int]:
    """A rank without room for the segment finds out only after all have met."""

    def no_room(*args: Any) -> Any:
        raise OSError("no room")

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == failing:
            patch.setattr(shared_memory.mmap, "mmap", no_room)
        transport = connect(world())
    [mean] = average_buckets(transport, [torch.tensor([float(dist.get_rank())])])
    return type(transport).__name__, mean.item(), shared_maps()


@pytest.mark.parametrize("failing", [0, 2])
def test_one_rank_that_cannot_map_the_memory_makes_all_use_the_group(ranks: RankPool, failing: int) -> None:
    assert ranks.run(3, refuse_to_map, failing) == [(C10dTransport.__name__, 1.0, 0)] * 3


def transport_without_a_group() -> None:
    transport = C10dTransport(world())
    dist.barrier()
    dist.destroy_process_group()
    gc.collect()
    with pytest.raises((NotInitializedError, TransportError)):
        transport.exchange(b"hello")


def test_a_transport_of_a_destroyed_world_says_so(ranks: RankPool) -> None:
    ranks.run(2, transport_without_a_group)

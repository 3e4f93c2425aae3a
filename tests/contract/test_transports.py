"""What every transport promises, tried on each of them with 2, 3 and 4 real ranks."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from cadenza.errors import NotInitializedError, TransportError
from cadenza.transports import C10dTransport, Transport, connect, shared_memory
from cadenza.transports.faulty import FaultyTransport
from cadenza.transports.shared_memory import SharedMemoryTransport, open_shared_memory
from support.compare import same_bits
from support.ranks import RankPool, outcome

CPU = torch.device("cpu")
WIRE_DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
TIGHT = {torch.float64: 1e-15, torch.float32: 1e-6}


def c10d(group: dist.ProcessGroup) -> Transport:
    return C10dTransport(group)


def shared(group: dist.ProcessGroup) -> Transport:
    transport = open_shared_memory(C10dTransport(group))
    assert transport is not None
    return transport


def faulty(group: dist.ProcessGroup) -> Transport:
    """A faulty transport that never fails must keep every promise of the one below it."""
    return FaultyTransport(shared(group), fail_at="land", bucket=1 << 60)


Open = Callable[[dist.ProcessGroup], Transport]
EVERY_TRANSPORT = pytest.mark.parametrize("opening", [c10d, shared, faulty], ids=lambda opening: opening.__name__)
BOTH = pytest.mark.parametrize("opening", [c10d, shared], ids=lambda opening: opening.__name__)
EVERY_SIZE = pytest.mark.parametrize("world", [2, 3, 4])


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def values_of(rank: int, numel: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """What a rank contributes; every rank can compute everyone's."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    some = torch.randn(min(numel, 99_991), generator=generator, dtype=torch.float64).to(dtype)
    return some.repeat(-(-numel // some.numel()))[:numel]


def mean_of(numel: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """The mean, summed in rank order and in fp32 or better, rounded once to the dtype."""
    wide = dtype if dtype.itemsize > 2 else torch.float32
    total = torch.zeros(numel, dtype=wide)
    for rank in range(dist.get_world_size()):
        total += values_of(rank, numel, dtype, seed).to(wide)
    return (total / dist.get_world_size()).to(dtype)


def averaged(transport: Transport, contributions: list[torch.Tensor]) -> list[torch.Tensor]:
    """The means of several buckets, whose stages overlap as they do in a round."""
    ring = transport.lanes(CPU)
    lanes = [ring[i % len(ring)] for i in range(len(contributions))]
    means = []
    for tick in range(len(contributions) + 2):
        if tick < len(contributions):
            mine = contributions[tick]
            lanes[tick].outgoing(mine.numel(), mine.dtype)[: mine.numel()].copy_(mine)
            lanes[tick].launch()
        if 0 <= tick - 1 < len(contributions):
            lanes[tick - 1].combine()
        if tick - 2 >= 0:
            means.append(lanes[tick - 2].land().clone())
    return means


def assert_mean(transport: Transport, mean: torch.Tensor, expected: torch.Tensor) -> None:
    sums_in_rank_order = not isinstance(transport, C10dTransport) or expected.dtype.itemsize <= 2
    if sums_in_rank_order:
        assert same_bits(mean, expected), f"{expected.dtype}, {expected.numel()} values"
    else:
        tolerance = TIGHT[expected.dtype]
        torch.testing.assert_close(mean, expected, rtol=tolerance, atol=tolerance)


def average_all_sizes(opening: Open, dtype: torch.dtype) -> list[torch.Tensor]:
    transport = opening(world())
    means = []
    for numel in (1, 2, 3, 5, 7, 64, 1023, 65_537, transport.capacity(CPU, dtype)):
        [mean] = averaged(transport, [values_of(dist.get_rank(), numel, dtype)])
        assert mean.shape == (numel,)
        assert_mean(transport, mean, mean_of(numel, dtype))
        means.append(mean[:100_000])
    return means


@EVERY_TRANSPORT
@EVERY_SIZE
@pytest.mark.parametrize("dtype", WIRE_DTYPES, ids=str)
def test_values_become_their_mean_the_same_bits_on_all_ranks(
    ranks: RankPool, opening: Open, world: int, dtype: torch.dtype
) -> None:
    first, *others = ranks.run(world, average_all_sizes, opening, dtype)
    for other in others:
        assert all(same_bits(a, b) for a, b in zip(first, other, strict=True))


def average_more_buckets_than_lanes(opening: Open) -> None:
    transport = opening(world())
    count = 4 * len(transport.lanes(CPU)) + 1
    plan = [(1000 + 7 * i, WIRE_DTYPES[i % len(WIRE_DTYPES)]) for i in range(count)]
    means = averaged(transport, [values_of(dist.get_rank(), n, dtype, i) for i, (n, dtype) in enumerate(plan)])
    for i, (numel, dtype) in enumerate(plan):
        assert_mean(transport, means[i], mean_of(numel, dtype, i))


@EVERY_TRANSPORT
@EVERY_SIZE
def test_more_buckets_than_lanes_overlap_without_touching_each_other(
    ranks: RankPool, opening: Open, world: int
) -> None:
    ranks.run(world, average_more_buckets_than_lanes, opening)


def average_many_rounds(opening: Open) -> None:
    transport = opening(world())
    rank = dist.get_rank()
    for number in range(1, 101):
        assert transport.next_round() == number
        replies = transport.exchange(bytes([rank, number]))
        first = values_of(rank, 10 + number, torch.float32, number)
        transport.lanes(CPU)[0].outgoing(first.numel(), first.dtype).copy_(first)  # hides the exchange
        assert replies() == [bytes([other, number]) for other in range(dist.get_world_size())]
        means = averaged(transport, [first] * (number % 5))
        for mean in means:
            assert_mean(transport, mean, mean_of(first.numel(), first.dtype, number))


@EVERY_TRANSPORT
@EVERY_SIZE
def test_many_rounds_in_a_row_stay_in_step(ranks: RankPool, opening: Open, world: int) -> None:
    ranks.run(world, average_many_rounds, opening)


def exchange_payloads(opening: Open) -> None:
    transport = opening(world())
    for size in (1, 64, 4095, 4096, 4097, 300_000):
        payloads = [bytes([rank + 1, size % 251]) * (size // 2) + b"!" * (size % 2) for rank in transport.members]
        replies = transport.exchange(payloads[transport.position])()
        assert replies == payloads, f"{size} bytes"


@EVERY_TRANSPORT
@EVERY_SIZE
def test_short_and_long_messages_arrive_in_rank_order(ranks: RankPool, opening: Open, world: int) -> None:
    ranks.run(world, exchange_payloads, opening)


def broadcast_kinds(opening: Open) -> None:
    transport = opening(world())
    source = len(transport.members) - 1
    kinds = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn]
    for shape in [(), (0, 3), (5, 7), (100_003,)]:
        for dtype in kinds:
            given = [(torch.arange(math.prod(shape)) + 10 * p).reshape(shape).to(dtype) for p in range(source + 1)]
            mine = given[transport.position].clone()
            transport.broadcast(mine, source)
            assert same_bits(mine, given[source]), (shape, dtype)
    with pytest.raises(ValueError, match="contiguous"):
        transport.broadcast(torch.ones(2, 3).t(), 0)


@EVERY_TRANSPORT
@EVERY_SIZE
def test_a_tensor_of_any_kind_gets_the_values_of_one_member(ranks: RankPool, opening: Open, world: int) -> None:
    ranks.run(world, broadcast_kinds, opening)


def scatter_and_gather(opening: Open) -> None:
    transport = opening(world())
    members, me = len(transport.members), transport.position
    assert transport.row_bytes(CPU) % 64 == 0
    for number, size in enumerate((1, 63, 1000, transport.row_bytes(CPU))):
        lane = transport.lanes(CPU)[number % len(transport.lanes(CPU))]
        lane.scatter(size).copy_(torch.tensor([[16 * me + other] for other in range(members)]).expand(members, size))
        lane.launch_scatter()
        got = lane.scattered()
        assert got.shape == (members, size)
        assert got[:, 0].tolist() == got[:, -1].tolist() == [16 * other + me for other in range(members)]
        lane.gather(size).fill_(100 + me)
        lane.launch_gather()
        assert lane.gathered()[:, size // 2].tolist() == [100 + other for other in range(members)]
        lane.gather(size).fill_(200 + me)  # once more without a scatter before it
        lane.launch_gather()
        assert lane.gathered()[:, -1].tolist() == [200 + other for other in range(members)]


@EVERY_TRANSPORT
@EVERY_SIZE
def test_bytes_are_scattered_and_gathered_in_rank_order(ranks: RankPool, opening: Open, world: int) -> None:
    ranks.run(world, scatter_and_gather, opening)


def average_in_a_subgroup(opening: Open) -> list[float] | None:
    group = dist.new_group([3, 1, 0])
    if dist.get_rank() == 2:
        return None
    transport = opening(group)
    assert list(transport.members) == dist.get_process_group_ranks(group)
    assert transport.members[transport.position] == dist.get_rank()
    [mean] = averaged(transport, [torch.full((2,), float(dist.get_rank()))])
    return mean.tolist()


@EVERY_TRANSPORT
def test_a_part_of_the_ranks_averages_among_itself(ranks: RankPool, opening: Open) -> None:
    mean = [4 / 3, 4 / 3]
    results = ranks.run(4, average_in_a_subgroup, opening)
    assert results == [pytest.approx(mean), pytest.approx(mean), None, pytest.approx(mean)]


def average_two_groups_in_turn(opening: Open) -> None:
    """Two transports of the same ranks do not hear each other."""
    one, other = opening(world()), opening(dist.new_group())
    for number in range(5):
        mine = values_of(dist.get_rank(), 100, torch.float32, number)
        for transport in (one, other) if number % 2 else (other, one):
            [mean] = averaged(transport, [mine])
            assert_mean(transport, mean, mean_of(100, torch.float32, number))


@BOTH
def test_transports_of_two_groups_work_side_by_side(ranks: RankPool, opening: Open) -> None:
    ranks.run(3, average_two_groups_in_turn, opening)


def average_the_same_everywhere(opening: Open, dtype: torch.dtype) -> None:
    transport = opening(world())
    mine = values_of(7, 5000, dtype)
    if dist.get_world_size() == 3:
        [mean] = averaged(transport, [mine])
        torch.testing.assert_close(mean, mine, rtol=torch.finfo(dtype).eps, atol=0)  # v + v + v may round
    else:
        largest = torch.tensor([torch.finfo(dtype).max, torch.finfo(dtype).min, -0.0], dtype=dtype)
        mine = torch.cat([mine, largest])
        [mean] = averaged(transport, [mine])
        assert same_bits(mean, mine)


@BOTH
@EVERY_SIZE
@pytest.mark.parametrize("dtype", WIRE_DTYPES, ids=str)
def test_the_mean_of_equal_values_is_that_value(ranks: RankPool, opening: Open, world: int, dtype: torch.dtype) -> None:
    ranks.run(world, average_the_same_everywhere, opening, dtype)


def average_extremes(opening: Open, dtype: torch.dtype) -> list[float]:
    transport = opening(world())
    mine = torch.full((4,), torch.finfo(dtype).max, dtype=dtype)
    if dist.get_rank() == 1:
        mine[1], mine[2] = float("nan"), float("inf")
    [mean] = averaged(transport, [mine])
    assert mean[0] == mean[3] == torch.finfo(dtype).max
    assert mean[1].isnan()
    return [mean[2].item()]


# Three times the largest bf16 number is no fp32 number.
@BOTH
@pytest.mark.parametrize(
    ("world", "dtype"), [*((n, torch.float16) for n in (2, 3, 4)), *((n, torch.bfloat16) for n in (2, 4))], ids=str
)
def test_16_bit_sums_do_not_overflow_and_special_values_reach_everyone(
    ranks: RankPool, opening: Open, world: int, dtype: torch.dtype
) -> None:
    assert ranks.run(world, average_extremes, opening, dtype) == [[float("inf")]] * world


def capacities(opening: Open) -> tuple[int, int]:
    transport = opening(world())
    return transport.capacity(CPU, torch.bfloat16), transport.capacity(CPU, torch.float64)


@EVERY_TRANSPORT
@EVERY_SIZE
def test_the_capacity_is_the_same_on_all_ranks_and_larger_for_smaller_values(
    ranks: RankPool, opening: Open, world: int
) -> None:
    first, *others = ranks.run(world, capacities, opening)
    assert all(other == first for other in others)
    assert first[0] >= first[1] > 0


def destroy_the_group(opening: Open) -> tuple[str, str]:
    group = dist.new_group()
    assert isinstance(group, dist.ProcessGroup)
    transport = opening(group)
    averaged(transport, [torch.ones(100), torch.ones(3, dtype=torch.bfloat16)])
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


@EVERY_TRANSPORT
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
        averaged(connect(group), [torch.ones(10)])
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


def abandon(opening: Open) -> list[tuple[Any, ...]]:
    transport = opening(world())
    lane = transport.lanes(CPU)[0]
    averaged(transport, [torch.ones(10)])
    dist.barrier()
    transport.abandon()
    transport.abandon()  # twice is as good as once

    def use_a_lane() -> None:
        lane.outgoing(10, torch.float32)
        lane.launch()

    def use_a_new_lane() -> None:
        averaged(transport, [torch.ones(3, dtype=torch.bfloat16)])

    uses = [
        lambda: transport.exchange(b"hello")(),
        lambda: transport.exchange(b"h" * 5000)(),
        use_a_lane,
        use_a_new_lane,
    ]
    return [outcome(use) for use in uses]


@EVERY_TRANSPORT
def test_an_abandoned_transport_says_so_at_every_later_use(ranks: RankPool, opening: Open) -> None:
    for uses in ranks.run(2, abandon, opening):
        for use in uses:
            assert use[:2] == ("error", "TransportError")
            assert "earlier averaging on this process group failed" in use[2]
            assert "make a new one" in use[2]


def peer_abandons(stage: str) -> tuple[Any, ...]:
    transport = shared(world())
    dist.barrier()
    if dist.get_rank() == 1:
        if stage == "exchange":
            transport.exchange(b"hello")
        transport.abandon()
        return ()

    def use() -> None:
        transport.exchange(b"hello")()
        averaged(transport, [torch.ones(10)])

    return outcome(use)


@pytest.mark.parametrize("stage", ["exchange", "before"])
def test_peers_of_one_that_abandoned_shared_memory_are_let_go_at_once(ranks: RankPool, stage: str) -> None:
    results = ranks.run(3, peer_abandons, stage, timeout_s=15, group_timeout_s=60)
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
    [mean] = averaged(transport, [torch.tensor([float(dist.get_rank())])])
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
    [mean] = averaged(transport, [torch.tensor([float(dist.get_rank())])])
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

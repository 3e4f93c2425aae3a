"""What every transport promises, as a check that can be run on one of your own.

All members call `check_transport` with their end of the transport; a broken promise raises AssertionError. It says
what it expected, so it needs no test framework.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch

from cadenza.errors import TransportError
from cadenza.transports import Lane, Transport
from cadenza.transports.base import bytes_of

__all__ = [
    "WIRE_DTYPES",
    "average_buckets",
    "check_abandoned",
    "check_broadcast",
    "check_bytes",
    "check_in_place",
    "check_means",
    "check_messages",
    "check_overlap",
    "check_place",
    "check_rounds",
    "check_transport",
]

WIRE_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_KINDS = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn)
_TIGHT = {torch.float64: 1e-15, torch.float32: 1e-6}
_CPU = torch.device("cpu")


def check_transport(transport: Transport, *, rank_order: bool = True) -> None:
    """Check all that a transport promises for CPU tensors, and abandon it at the end; all members call this.

    Args:
        transport: This member's end.
        rank_order: Whether it sums 32- and 64-bit values in rank order, and not in an order of its own.

    >>> from cadenza.testing import workers
    >>> with workers(3) as pool:
    ...     pool.run(lambda worker: check_transport(worker.group.connect(worker.group.ranks)))
    [None, None, None]
    """
    check_place(transport)
    check_rounds(transport, rank_order=rank_order)
    check_messages(transport)
    check_broadcast(transport)
    check_bytes(transport)
    for dtype in WIRE_DTYPES:
        check_means(transport, dtype, rank_order=rank_order)
        check_in_place(transport, dtype, rank_order=rank_order)
    check_overlap(transport, rank_order=rank_order)
    check_abandoned(transport)


def check_place(transport: Transport) -> None:
    """Check that members know where they stand, and agree on how much a lane carries.

    >>> from cadenza.testing import workers
    >>> with workers(2) as pool:
    ...     pool.run(lambda worker: check_place(worker.group.connect([0, 1])))
    [None, None]
    """
    _expect(0 <= transport.position < len(transport.members), "position is a place in members")
    _expect(transport.timeout_s > 0, "timeout_s is a positive number of seconds")
    capacity = [transport.capacity(_CPU, dtype) for dtype in WIRE_DTYPES]
    _expect(capacity[-1] >= capacity[0] > 0, f"of values of 16 bits as many go into a lane as of 64: {capacity}")
    _expect(transport.row_bytes(_CPU) % 64 == 0, "row_bytes is a multiple of 64")
    mine = str((list(transport.members), capacity, transport.row_bytes(_CPU))).encode()
    _expect_alike(transport, mine, "members, capacity and row_bytes")


def check_means(transport: Transport, dtype: torch.dtype, *, rank_order: bool = True) -> None:
    """Check that values of every size become their mean, the same bits on all members.

    >>> from cadenza.testing import workers
    >>> with workers(2) as pool:
    ...     pool.run(lambda worker: check_means(worker.group.connect([0, 1]), torch.bfloat16))
    [None, None]
    """
    for numel in (1, 2, 3, 5, 7, 64, 1023, 65_537, transport.capacity(_CPU, dtype)):
        [mean] = average_buckets(transport, [_values(transport.position, numel, dtype)])
        _expect_mean(mean, _mean(transport, numel, dtype), rank_order=rank_order)
        _expect_alike(transport, mean.view(torch.uint8).numpy().tobytes(), f"the mean of {numel} values of {dtype}")


def check_in_place(transport: Transport, dtype: torch.dtype, *, rank_order: bool = True) -> None:
    """Check that values which a lane adopts become their mean where they are, also if another member packs them.

    >>> from cadenza.testing import workers
    >>> with workers(2) as pool:
    ...     pool.run(lambda worker: check_in_place(worker.group.connect([0, 1]), torch.float32))
    [None, None]
    """
    extent = transport.in_place(_CPU, dtype)
    _expect_alike(transport, str(extent).encode(), f"in_place for {dtype}")
    lane = transport.lanes(_CPU)[0]
    for numel in extent or ():
        values = _values(transport.position, numel, dtype)
        if transport.position == 0:
            lane.outgoing(numel, dtype)[:numel].copy_(values)
        else:
            lane.adopt(values)
            _expect(_same_bits(values, _values(transport.position, numel, dtype)), "nothing changes before launch")
        lane.launch()
        lane.combine()
        mean = lane.land()
        _expect(transport.position == 0 or mean.data_ptr() == values.data_ptr(), "adopted values stay where they are")
        _expect_mean(mean, _mean(transport, numel, dtype), rank_order=rank_order)


def check_overlap(transport: Transport, *, rank_order: bool = True) -> None:
    """Check that more buckets than lanes overlap without touching each other.

    >>> from cadenza.testing import workers
    >>> with workers(2) as pool:
    ...     pool.run(lambda worker: check_overlap(worker.group.connect([0, 1])))
    [None, None]
    """
    count = 4 * len(transport.lanes(_CPU)) + 1
    plan = [(1000 + 7 * i, WIRE_DTYPES[i % len(WIRE_DTYPES)]) for i in range(count)]
    given = [_values(transport.position, numel, dtype, i) for i, (numel, dtype) in enumerate(plan)]
    means = average_buckets(transport, given)
    for i, (numel, dtype) in enumerate(plan):
        _expect_mean(means[i], _mean(transport, numel, dtype, i), rank_order=rank_order)


def check_rounds(transport: Transport, *, rank_order: bool = True) -> None:
    """Check that many rounds in a row, headers and all, stay in step; the transport must not have counted any.

    >>> from cadenza.testing import workers
    >>> with workers(2) as pool:
    ...     pool.run(lambda worker: check_rounds(worker.group.connect([0, 1])))
    [None, None]
    """
    members, me = len(transport.members), transport.position
    for number in range(1, 101):
        _expect(transport.next_round() == number, f"round {number} has this number")
        replies = transport.exchange(bytes([me, number]))
        first = _values(me, 10 + number, torch.float32, number)
        transport.lanes(_CPU)[0].outgoing(first.numel(), first.dtype).copy_(first)  # hides the exchange
        _expect(replies() == [bytes([other, number]) for other in range(members)], f"the headers of round {number}")
        for mean in average_buckets(transport, [first] * (number % 5)):
            _expect_mean(mean, _mean(transport, first.numel(), first.dtype, number), rank_order=rank_order)


def check_messages(transport: Transport) -> None:
    """Check that short and long messages arrive in rank order.

    >>> from cadenza.testing import workers
    >>> with workers(2) as pool:
    ...     pool.run(lambda worker: check_messages(worker.group.connect([0, 1])))
    [None, None]
    """
    for size in (1, 64, 4095, 4096, 4097, 300_000):
        given = [bytes([place + 1, size % 251]) * (size // 2) + b"!" * (size % 2) for place in _places(transport)]
        _expect(transport.exchange(given[transport.position])() == given, f"messages of {size} bytes, in rank order")


def check_broadcast(transport: Transport) -> None:
    """Check that tensors of any kind and shape get the values of one member.

    >>> from cadenza.testing import workers
    >>> with workers(2) as pool:
    ...     pool.run(lambda worker: check_broadcast(worker.group.connect([0, 1])))
    [None, None]
    """
    source = len(transport.members) - 1
    for shape in [(), (0, 3), (5, 7), (100_003,)]:
        for dtype in _KINDS:
            given = [(torch.arange(math.prod(shape)) + 10 * p).reshape(shape).to(dtype) for p in _places(transport)]
            mine = given[transport.position].clone()
            transport.broadcast(mine, source)
            _expect(_same_bits(mine, given[source]), f"the last member's values of shape {shape} and {dtype}")


def check_bytes(transport: Transport) -> None:
    """Check that bytes are scattered and gathered in rank order.

    >>> from cadenza.testing import workers
    >>> with workers(2) as pool:
    ...     pool.run(lambda worker: check_bytes(worker.group.connect([0, 1])))
    [None, None]
    """
    ring = transport.lanes(_CPU)
    for number, size in enumerate((1, 63, 1000, transport.row_bytes(_CPU))):
        lane = ring[number % len(ring)]
        _check_scatter(transport, lane, size)
        _check_gather(transport, lane, size, base=100)
        _check_gather(transport, lane, size, base=200)  # without a scatter before it
        _check_scatter(transport, lane, size)
        transport.exchange(b"\0")()  # no gather follows, so this says that the rows have been read


def check_abandoned(transport: Transport) -> None:
    """Check that an abandoned transport says so at every use; the members are done with it before.

    >>> from cadenza.testing import workers
    >>> with workers(2) as pool:
    ...     pool.run(lambda worker: check_abandoned(worker.group.connect([0, 1])))
    [None, None]
    """
    lane = transport.lanes(_CPU)[0]
    transport.exchange(b"about to abandon")()
    transport.abandon()
    transport.abandon()  # twice is as good as once

    def use_a_lane() -> None:
        lane.outgoing(10, torch.float32)
        lane.launch()

    for use in (lambda: transport.exchange(b"hello")(), lambda: transport.exchange(b"h" * 5000)(), use_a_lane):
        try:
            use()
        except TransportError as error:
            _expect("earlier averaging on this process group failed" in str(error), "an abandoned transport says so")
        else:
            raise AssertionError("Expected: an abandoned transport raises TransportError at every later use.")


def average_buckets(transport: Transport, contributions: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the means of several buckets of CPU values, whose stages overlap as they do in a round.

    >>> from cadenza.testing import workers
    >>> def average(worker):
    ...     return average_buckets(worker.group.connect([0, 1]), [torch.tensor([1.0 + worker.rank])])
    >>> with workers(2) as pool:
    ...     pool.run(average)
    [[tensor([1.5000])], [tensor([1.5000])]]
    """
    ring = transport.lanes(_CPU)
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


def _check_scatter(transport: Transport, lane: Lane, size: int) -> None:
    members, me = len(transport.members), transport.position
    rows = [[(16 * me + other) % 256] for other in range(members)]
    lane.scatter(size).copy_(torch.tensor(rows).expand(members, size))
    lane.launch_scatter()
    got = lane.scattered()
    _expect(got.shape == (members, size), f"a row of {size} bytes from each member")
    expected = [(16 * other + me) % 256 for other in range(members)]
    _expect(got[:, 0].tolist() == got[:, -1].tolist() == expected, "scattered rows in rank order")


def _check_gather(transport: Transport, lane: Lane, size: int, *, base: int) -> None:
    expected = [(base + place) % 256 for place in _places(transport)]
    lane.gather(size).fill_(expected[transport.position])
    lane.launch_gather()
    got = lane.gathered()
    _expect(got.shape == (len(expected), size), f"a row of {size} bytes from each member")
    _expect(got[:, 0].tolist() == got[:, size // 2].tolist() == expected, "gathered rows in rank order")


def _values(position: int, numel: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Return what a member contributes; every member can compute everyone's."""
    generator = torch.Generator().manual_seed(1000 * seed + position)
    some = torch.randn(min(numel, 99_991), generator=generator, dtype=torch.float64).to(dtype)
    return some.repeat(-(-numel // some.numel()))[:numel]


def _mean(transport: Transport, numel: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Return the mean, summed in rank order and in fp32 or better, rounded once to the dtype."""
    wide = dtype if dtype.itemsize > 2 else torch.float32
    total = torch.zeros(numel, dtype=wide)
    for position in _places(transport):
        total += _values(position, numel, dtype, seed).to(wide)
    return (total / len(transport.members)).to(dtype)


def _expect_mean(mean: torch.Tensor, expected: torch.Tensor, *, rank_order: bool) -> None:
    if rank_order or expected.dtype.itemsize <= 2:
        _expect(_same_bits(mean, expected), f"the mean of {expected.numel()} values of {expected.dtype}, to the bit")
    else:
        tolerance = _TIGHT[expected.dtype]
        torch.testing.assert_close(mean, expected, rtol=tolerance, atol=tolerance)


def _expect_alike(transport: Transport, mine: bytes, what: str) -> None:
    digests = transport.exchange(hashlib.blake2b(mine, digest_size=16).digest())()
    _expect(len(set(digests)) == 1, f"{what} are the same on all members")


def _expect(kept: bool, promise: str) -> None:
    if not kept:
        raise AssertionError(f"Expected: {promise}.")


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bytes_of(a), bytes_of(b))


def _places(transport: Transport) -> range:
    return range(len(transport.members))

"""What the ranks are to each other: round trips, clocks, how much a link carries, and what all carry at once.

All of it goes through the process group that training would use. Two ranks are measured while the others are quiet, so
that a figure is the link's own; then all send at once, as they do in a round.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from cadenza.common.process_groups import all_gather_single

__all__ = ["Link", "connect", "disconnect", "measure", "pairs", "together"]

_WARM_UP, _ECHOES = 4, 20
_SMALLEST = 1 << 16
_LARGEST = 1 << 25
_LONG_ENOUGH_S = 0.15  # a transfer that takes so long is more than what buffers on the way swallow


@dataclass(frozen=True)
class Link:
    """Two ranks as seen by the first of them.

    Attributes:
        a: The first rank.
        b: The second one.
        latency_s: How long a small message takes, one way.
        to_b: Bytes a second from a to b.
        to_a: Bytes a second from b to a.
        offset_s: How far b's clock is ahead of a's.
        uncertainty_s: By how much that may be wrong.
    """

    a: int
    b: int
    latency_s: float
    to_b: float
    to_a: float
    offset_s: float
    uncertainty_s: float


def connect(store: dist.Store, rank: int, ranks: int, *, backend: str, timeout_s: float) -> None:
    """Make the process group; small messages take Gloo in any case."""
    kinds = "gloo" if backend == "gloo" else f"cpu:gloo,cuda:{backend}"
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group(kinds, store=store, rank=rank, world_size=ranks, timeout=timeout)
    dist.barrier()


def disconnect() -> None:
    """Let the process group go."""
    if dist.is_initialized():
        dist.destroy_process_group()


def pairs(ranks: int, first: Sequence[int] = ()) -> Iterator[tuple[int, int]]:
    """Yield every pair of ranks once: rank 0 with each of `first`, then in rounds in which each rank has one partner.

    So, if the time is up before the pairs are, every rank has been measured about as often.

    >>> list(pairs(4, first=[2]))
    [(0, 2), (0, 3), (1, 2), (1, 3), (2, 3), (0, 1)]
    """
    seen = {(0, rank) for rank in first}
    yield from sorted(seen)
    circle = ranks + ranks % 2  # with an odd number, whoever meets the one that does not exist pauses
    for turn in range(circle - 1):
        for place in range(circle // 2):
            a, b = (turn + place) % (circle - 1), (turn - place) % (circle - 1)
            pair = tuple(sorted((a, circle - 1 if a == b else b)))
            if pair not in seen and pair[1] < ranks:
                yield pair[0], pair[1]


def measure(me: int, peer: int, device: torch.device, *, clock: Callable[[], int] = time.time_ns) -> Link | None:
    """Measure the link to a peer that measures it too; the lower of the two ranks gets the figures."""
    if me > peer:
        _answer_echoes(peer, clock)
        _receive_stream(peer, device)
        _send_stream(peer, device, 0)
        return None
    latency, offset, uncertainty = _echoes(peer, clock)
    to_b = _send_stream(peer, device, latency)
    to_a = _receive_stream(peer, device)
    return Link(me, peer, latency, to_b, to_a, offset, uncertainty)


def _echoes(peer: int, clock: Callable[[], int]) -> tuple[float, float, float]:
    """Return the one-way time, the peer's clock against ours, and how wrong that may be; as NTP finds them."""
    trips = []
    for _ in range(_WARM_UP + _ECHOES):
        sent = clock()
        _say(peer, sent)
        received, answered = _hear(peer, 2)
        back = clock()
        trips.append(((back - sent) - (answered - received), ((received - sent) + (answered - back)) / 2))
    del trips[:_WARM_UP]
    quickest, offset = min(trips)  # whatever held the others up was not the link
    return statistics.median(trip for trip, _ in trips) / 2e9, offset / 1e9, quickest / 2e9


def _answer_echoes(peer: int, clock: Callable[[], int]) -> None:
    for _ in range(_WARM_UP + _ECHOES):
        _hear(peer, 1)
        received = clock()
        _say(peer, received, clock())


def _send_stream(peer: int, device: torch.device, latency_s: float) -> float:
    """Send more and more until it takes long enough to be measured; return the bytes a second of the last two times."""
    size, seconds = 0, 0.0
    while seconds < _LONG_ENOUGH_S and size < _LARGEST:
        size = _next_size(size, seconds)
        seconds = _send(peer, device, size)
    seconds = min(seconds, _send(peer, device, size))  # whatever held the other up may not have been the link
    rate = size / max(seconds - latency_s, 1e-9)
    _say(peer, 0)
    _say(peer, round(rate))
    return rate


def _next_size(size: int, seconds: float) -> int:
    """Return a size that should take long enough, but is not much larger than what was tried.

    >>> _next_size(0, 0.0), _next_size(1 << 16, 1e-5), _next_size(1 << 24, 0.1)
    (65536, 1048576, 33554432)
    """
    if not size:
        return _SMALLEST
    return min(_LARGEST, size * min(16, max(2, round(1.5 * _LONG_ENOUGH_S / seconds))))


def _send(peer: int, device: torch.device, size: int) -> float:
    """Return the seconds until the peer has so many bytes and has said so."""
    payload = torch.zeros(size, dtype=torch.uint8, device=device)
    _say(peer, size)
    _hear(peer, 1)  # it has memory ready
    start = time.perf_counter()
    dist.send(payload, peer)
    _settle(device)
    _hear(peer, 1)
    return time.perf_counter() - start


def _receive_stream(peer: int, device: torch.device) -> float:
    while size := _hear(peer, 1)[0]:
        payload = torch.zeros(size, dtype=torch.uint8, device=device)
        _say(peer, 0)
        dist.recv(payload, peer)
        _settle(device)
        _say(peer, 0)
    return float(_hear(peer, 1)[0])


def together(size: int, device: torch.device) -> float:
    """Let all ranks exchange `size` bytes as a round does, and return the bytes a second that each of them sent.

    A round brings every rank its share of everybody's values, and then its result to all.
    """
    ranks = dist.get_world_size()
    share = max(1, size // ranks)
    given, taken = torch.zeros(2, ranks * share, dtype=torch.uint8, device=device)
    seconds = []
    for _ in range(3):  # the first one warms up
        dist.barrier()
        start = time.perf_counter()
        dist.all_to_all_single(taken, given)
        all_gather_single(taken, given[:share])
        _settle(device)
        seconds.append(time.perf_counter() - start)
    return 2 * (ranks - 1) * share / min(seconds[1:])


def _say(peer: int, *numbers: int) -> None:
    dist.send(torch.tensor(numbers, dtype=torch.int64), peer)


def _hear(peer: int, count: int) -> list[int]:
    numbers = torch.empty(count, dtype=torch.int64)
    dist.recv(numbers, peer)
    return [int(number) for number in numbers]


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

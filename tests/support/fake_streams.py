"""Streams and events that know what comes after what, and copies that arrive when the host waits for them.

Every stream has a vector clock: how far each stream was when this one waited for it, directly or through others.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["Copy", "Event", "Misuse", "Stream", "come_after", "copies", "current_stream", "here", "host_waits", "lock"]
__all__ += ["no_host_waits", "set_stream", "settle"]


class Misuse(AssertionError):
    """Something that would be wrong on a real device."""


Clock = dict[int, int]  # how far each stream was known to be


class Stream:
    """A stream: it knows what it comes after."""

    _count = 0

    def __init__(self, device: Any = None) -> None:
        self.device = device
        self.id = Stream._count
        Stream._count += 1
        self.clock: Clock = {}

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        with lock:
            come_after(event.clock, self.clock)
        return event

    def wait_event(self, event: Event) -> None:
        with lock:
            come_after(self.clock, event.clock)

    def synchronize(self) -> None:
        host_waits(self.clock, "Stream.synchronize")


class Event:
    """An event: how far its stream was when it was recorded."""

    def __init__(self, device: Any = None) -> None:
        self.clock: Clock = {}

    def synchronize(self) -> None:
        host_waits(self.clock, "Event.synchronize")


class Copy:
    """A copy between the device and pinned memory that the host has not waited for yet."""

    def __init__(self, host: torch.Tensor, values: torch.Tensor, stream: Stream, *, arrives: bool) -> None:
        self.host, self.values, self.arrives = host, values, arrives
        self.stream, self.tick = stream.id, stream.clock[stream.id]

    def finish(self) -> None:
        if self.arrives:
            self.host.copy_(self.values)
        elif not torch.equal(_bits(self.host), _bits(self.values)):
            raise Misuse("Pinned memory was changed while it was copied to the device.")


lock = threading.RLock()
here = threading.local()  # the current stream, what the host knows, whether it may wait
copies: list[Copy] = []
_default = Stream()


def current_stream(device: Any = None) -> Stream:
    found: Stream = getattr(here, "stream", _default)
    return found


def set_stream(stream: Stream) -> None:
    here.stream = stream


def come_after(clock: Clock, other: Clock) -> None:
    for stream, tick in other.items():
        clock[stream] = max(clock.get(stream, 0), tick)


def host_waits(clock: Clock, what: str) -> None:
    if getattr(here, "forbidden", ""):
        raise Misuse(f"The host waits for the device ({what}) {here.forbidden}.")
    with lock:
        here.known = getattr(here, "known", {})
        come_after(here.known, clock)
        for copy in [copy for copy in copies if copy.tick <= clock.get(copy.stream, 0)]:
            copies.remove(copy)
            copy.finish()


@contextmanager
def no_host_waits(when: str) -> Iterator[None]:
    """Let it be an error that this thread waits for the device, or copies from pageable memory."""
    here.forbidden = when
    try:
        yield
    finally:
        here.forbidden = ""


def settle() -> None:
    """Wait for everything, as the end of a program does; then `freed_too_early` tells all."""
    with lock:
        for copy in copies:
            copy.finish()
        copies.clear()


def _bits(host: torch.Tensor) -> torch.Tensor:
    return host.contiguous().view(torch.uint8)

"""A transport that fails on purpose, to try out what a round does then.

>>> from cadenza.transports.faulty import FaultyTransport
>>> faulty = FaultyTransport(transport, fail_at="land", bucket=2)  # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch

from cadenza.errors import TransportError
from cadenza.transports.base import Above, Lane, Transport

__all__ = ["FaultyTransport", "Phase"]

Phase = Literal["exchange", "pack", "launch", "combine", "land"]


class FaultyTransport(Above):
    """Does what the transport below it does, until a given phase of a given bucket, where `fault` is called.

    The default fault raises a `TransportError`; another may kill the process, stop it or wait.
    """

    def __init__(
        self, below: Transport, *, fail_at: Phase, bucket: int = 0, fault: Callable[[], None] | None = None
    ) -> None:
        super().__init__(below)
        self._fail_at = fail_at
        self._bucket = bucket
        self._fault = fault or _raise
        self._reached = dict.fromkeys(("exchange", "pack", "launch", "combine", "land"), -1)

    def pass_through(self, phase: Phase) -> None:
        """Count a phase, and fail if it is the one to fail at."""
        self._reached[phase] += 1
        if phase == self._fail_at and self._reached[phase] == self._bucket:
            self._fault()

    def exchange(self, payload: bytes) -> Callable[[], list[bytes]]:
        self.pass_through("exchange")
        return self._below.exchange(payload)

    def lanes(self, device: torch.device) -> list[Lane]:
        return [_FaultyLane(self, lane) for lane in self._below.lanes(device)]


class _FaultyLane:
    def __init__(self, transport: FaultyTransport, below: Lane) -> None:
        self._transport = transport
        self._below = below

    def outgoing(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        self._transport.pass_through("pack")
        return self._below.outgoing(numel, dtype)

    def adopt(self, values: torch.Tensor) -> None:
        self._transport.pass_through("pack")
        self._below.adopt(values)

    def launch(self) -> None:
        self._transport.pass_through("launch")
        self._below.launch()

    def combine(self) -> None:
        self._transport.pass_through("combine")
        self._below.combine()

    def land(self) -> torch.Tensor:
        self._transport.pass_through("land")
        return self._below.land()

    def scatter(self, size: int) -> torch.Tensor:
        self._transport.pass_through("pack")
        return self._below.scatter(size)

    def launch_scatter(self) -> None:
        self._transport.pass_through("launch")
        self._below.launch_scatter()

    def scattered(self) -> torch.Tensor:
        self._transport.pass_through("combine")
        return self._below.scattered()

    def gather(self, size: int) -> torch.Tensor:
        return self._below.gather(size)

    def launch_gather(self) -> None:
        self._below.launch_gather()

    def gathered(self) -> torch.Tensor:
        self._transport.pass_through("land")
        return self._below.gathered()


def _raise() -> None:
    raise TransportError("A fault was injected here.")

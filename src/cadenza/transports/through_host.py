"""Values of a device on their way through the host's memory, where no backend carries them from device to device.

Every message is copied to pinned memory, sent by what the transport has for the CPU (Gloo, or shared memory on one
machine), and copied back. While one message is copied its neighbours are on the wire. The thread that sends waits for
its copies; where rounds land late, that is not the training loop's.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from cadenza.common.streams import Moment, empty_on_host, keep_for_stream
from cadenza.transports.base import Above, Lane, Transport, bytes_of

__all__ = ["ThroughHost"]

_HOST = torch.device("cpu")


class ThroughHost(Above):
    """Sends what is on a device through the host, unless the transport below reaches that device itself.

    Args:
        below: The transport.
        reaches: Says which devices it reaches.
    """

    def __init__(self, below: Transport, reaches: Callable[[torch.device], bool]) -> None:
        super().__init__(below)
        self._reaches = reaches
        self._host_lanes: dict[torch.device, list[Lane]] = {}

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        if self._reaches(tensor.device):
            self._below.broadcast(tensor, source)
            return
        memory = bytes_of(tensor).to(_HOST)
        self._below.broadcast(memory, source)
        bytes_of(tensor).copy_(memory)

    def capacity(self, device: torch.device, dtype: torch.dtype) -> int:
        return self._below.capacity(self._way(device), dtype)

    def in_place(self, device: torch.device, dtype: torch.dtype) -> tuple[int, int] | None:
        return self._below.in_place(device, dtype) if self._reaches(device) else None

    def row_bytes(self, device: torch.device) -> int:
        return self._below.row_bytes(self._way(device))

    def lanes(self, device: torch.device) -> list[Lane]:
        if self._reaches(device):
            return self._below.lanes(device)
        if device not in self._host_lanes:
            self._host_lanes[device] = [_HostLane(lane, device) for lane in self._below.lanes(_HOST)]
        return self._host_lanes[device]

    def abandon(self) -> None:
        self._host_lanes.clear()
        self._below.abandon()

    def _way(self, device: torch.device) -> torch.device:
        return device if self._reaches(device) else _HOST


class _HostLane:
    """A lane for a device that is the host's lane, and copies at both its ends."""

    def __init__(self, lane: Lane, device: torch.device) -> None:
        self._lane = lane
        self._sent, self._received = _Ferry(device), _Ferry(device)

    def outgoing(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return self._sent.load(self._lane.outgoing(numel, dtype))

    def adopt(self, values: torch.Tensor) -> None:
        raise NotImplementedError("Values are packed here; `in_place` of the transport says so.")

    def launch(self) -> None:
        self._sent.bring_to_host()
        self._lane.launch()

    def combine(self) -> None:
        self._lane.combine()

    def land(self) -> torch.Tensor:
        return self._received.bring_to_device(self._lane.land())

    def scatter(self, size: int) -> torch.Tensor:
        return self._sent.load(self._lane.scatter(size))

    def launch_scatter(self) -> None:
        self._sent.bring_to_host()
        self._lane.launch_scatter()

    def scattered(self) -> torch.Tensor:
        return self._received.bring_to_device(self._lane.scattered())

    def gather(self, size: int) -> torch.Tensor:
        return self._sent.load(self._lane.gather(size))

    def launch_gather(self) -> None:
        self._sent.bring_to_host()
        self._lane.launch_gather()

    def gathered(self) -> torch.Tensor:
        return self._received.bring_to_device(self._lane.gathered())


class _Ferry:
    """Memory on a device and pinned memory of its size, between which messages are copied."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._far = torch.empty(0, dtype=torch.uint8, device=device)
        self._near = torch.empty(0, dtype=torch.uint8)
        self._place = self._near
        self._copied = Moment([])

    def load(self, place: torch.Tensor) -> torch.Tensor:
        """Return memory on the device for what is to be sent from a place on the host."""
        self._fit(place.nbytes)
        self._place = place
        keep_for_stream([self._far])
        return self._far[: place.nbytes].view(place.dtype).view(place.shape)

    def bring_to_host(self) -> None:
        """Copy what was loaded to its place, and wait for it."""
        size = self._place.nbytes
        self._near[:size].copy_(self._far[:size], non_blocking=True)
        Moment([self._device]).wait_on_host()
        self._place.copy_(self._near[:size].view(self._place.dtype).view(self._place.shape))

    def bring_to_device(self, place: torch.Tensor) -> torch.Tensor:
        """Return a copy on the device of what was received at a place on the host, without waiting for it."""
        size = place.nbytes
        self._fit(size)
        keep_for_stream([self._far])
        self._copied.wait_on_host()  # pinned memory is not changed while it is copied
        self._near[:size].view(place.dtype).view(place.shape).copy_(place)
        self._far[:size].copy_(self._near[:size], non_blocking=True)
        self._copied = Moment([self._device])
        return self._far[:size].view(place.dtype).view(place.shape)

    def _fit(self, size: int) -> None:
        if self._far.numel() < size:
            self._copied.wait_on_host()
            self._far = torch.empty(size, dtype=torch.uint8, device=self._device)
            self._near = empty_on_host(size, torch.uint8, pinned=True)

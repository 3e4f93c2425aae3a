"""Averaging over a `torch.distributed` process group: any backend, any number of hosts.

fp32 and fp64 travel by all-reduce (`ReduceOp.AVG` on NCCL). 16-bit values travel as they are, at half the bytes, but
are summed in fp32: an all-to-all brings every member its share, which it sums and sends back to all. Backends' own
16-bit all-reduces round at every hop.

The transport holds no reference to the group: `destroy_process_group` closes its sockets only when nobody does.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist

from cadenza.common.messages import LANE_BYTES, LANES, row_bytes_between
from cadenza.common.process_groups import all_gather_single, backend_for, control_device, store_of, timeout_of
from cadenza.errors import NotInitializedError, TransportError
from cadenza.transports.base import OUT_OF_STEP, Lane, bytes_of
from cadenza.transports.means import finish_mean, mean_into, scale_down

__all__ = ["C10dTransport", "Seat"]

# Between machines a message takes about as long to begin as 2 MiB take to be packed and unpacked.
IN_PLACE_BYTES = (2 << 20, 32 << 20)


@dataclass(frozen=True)
class Seat:
    """What torch does not know of a Gloo group that was made beside its registry: who is in it, and where we stand."""

    members: tuple[int, ...]
    position: int
    store: dist.Store
    timeout_s: float


class C10dTransport:
    """Averages over a process group with the group's own collectives."""

    def __init__(self, group: dist.ProcessGroup, seat: Seat | None = None) -> None:
        self._group = weakref.ref(group)
        self._seat = seat
        self._members = tuple(dist.get_process_group_ranks(group)) if seat is None else seat.members
        self._position = dist.get_rank(group) if seat is None else seat.position
        self._lanes: dict[torch.device, list[Lane]] = {}
        self._rounds = 0
        self._abandoned = False

    @property
    def members(self) -> Sequence[int]:
        return self._members

    @property
    def position(self) -> int:
        return self._position

    @property
    def timeout_s(self) -> float:
        return timeout_of(self.group()) if self._seat is None else self._seat.timeout_s

    @property
    def store(self) -> dist.Store:
        return store_of(self.group()) if self._seat is None else self._seat.store

    def exchange(self, payload: bytes) -> Callable[[], list[bytes]]:
        device = control_device(self.group()) if self._seat is None else torch.device("cpu")
        mine = torch.frombuffer(bytearray(payload), dtype=torch.uint8).to(device)
        theirs = torch.empty(len(self.members) * len(payload), dtype=torch.uint8, device=device)
        wait = self.start(all_gather_single, theirs, mine)

        def replies() -> list[bytes]:
            wait()
            data = bytes(theirs.tolist())
            return [data[i : i + len(payload)] for i in range(0, len(data), len(payload))]

        return replies

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = source, 0
        memory = bytes_of(tensor)

        def start(*, group: dist.ProcessGroup, async_op: bool) -> dist.Work:
            return group.broadcast([memory], options)

        if memory.numel():
            self.start(start)()

    def capacity(self, device: torch.device, dtype: torch.dtype) -> int:
        if dtype.itemsize > 2:
            return LANE_BYTES // dtype.itemsize
        half = LANE_BYTES // 2 // dtype.itemsize  # the other half receives
        return half - half % len(self.members)

    def in_place(self, device: torch.device, dtype: torch.dtype) -> tuple[int, int] | None:
        if dtype.itemsize <= 2:
            return None
        fewest, most = IN_PLACE_BYTES
        return fewest // dtype.itemsize, most // dtype.itemsize

    def row_bytes(self, device: torch.device) -> int:
        return row_bytes_between(len(self.members))

    def lanes(self, device: torch.device) -> list[Lane]:
        if device not in self._lanes:
            self._lanes[device] = [_C10dLane(self, device) for _ in range(LANES)]
        return self._lanes[device]

    def next_round(self) -> int:
        self._rounds += 1
        return self._rounds

    def abandon(self) -> None:
        self._abandoned = True
        self._lanes.clear()

    def free_lanes(self) -> None:
        """Give back the lanes' memory; the next round makes them anew."""
        self._lanes.clear()

    def group(self) -> dist.ProcessGroup:
        """Return the group, or say why it can no longer be used."""
        if self._abandoned:
            raise TransportError(OUT_OF_STEP)
        group = self._group()
        if group is None:
            raise NotInitializedError("The process group of this averaging was destroyed.")
        return group

    def start(self, collective: Callable[..., Any], *tensors: torch.Tensor, **options: Any) -> Callable[[], None]:
        """Start a collective on the group; the returned call waits for it."""
        group = self.group()
        try:
            work = cast(dist.Work, collective(*tensors, group=group, async_op=True, **options))
        except RuntimeError as error:
            raise self._failure(error) from error

        def wait() -> None:
            try:
                work.wait()
            except RuntimeError as error:
                raise self._failure(error) from error

        return wait

    def backend(self, device: torch.device) -> str | None:
        """Return what carries values on a device, if something does."""
        if self._seat is not None:
            return "gloo" if device.type == "cpu" else None
        return backend_for(self.group(), device)

    def reaches(self, device: torch.device) -> bool:
        """Say whether values on a device get to the others as they are; Gloo has not all collectives for devices."""
        return device.type == "cpu" or self.backend(device) not in (None, "gloo")

    def _failure(self, error: RuntimeError) -> TransportError:
        return TransportError(f"A collective over ranks {list(self._members)} failed: {error}")


class _C10dLane:
    """A bucket on its way through the group's collectives."""

    def __init__(self, transport: C10dTransport, device: torch.device) -> None:
        self._transport = transport
        self._members = len(transport.members)
        self._halves = torch.empty(2, LANE_BYTES // 2, dtype=torch.uint8, device=device)
        self._values = self._halves
        self._numel = 0
        self._rows = self._halves
        self._native = transport.backend(device) == "nccl"  # it has ReduceOp.AVG, and gathers without extra copies
        self._wait: Callable[[], None]

    def outgoing(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        self._numel = numel
        if numel * dtype.itemsize > LANE_BYTES:
            self._values = torch.empty(numel, dtype=dtype, device=self._halves.device)
        elif dtype.itemsize > 2:
            self._values = self._halves.view(-1).view(dtype)[:numel]
        else:
            each = -(-numel // self._members)
            self._values = self.scatter(each * dtype.itemsize).view(-1).view(dtype)
        return self._values

    def adopt(self, values: torch.Tensor) -> None:
        self._values = values

    def launch(self) -> None:
        if self._values.dtype.itemsize <= 2:
            self.launch_scatter()
            return
        op = dist.ReduceOp.AVG if self._native else dist.ReduceOp.SUM
        if not self._native:
            scale_down(self._values, self._members)
        self._wait = self._transport.start(dist.all_reduce, self._values, op=op)

    def combine(self) -> None:
        dtype = self._values.dtype
        if dtype.itemsize <= 2:
            rows = self.scattered()
            mean_into(self.gather(rows.shape[1]).view(dtype), rows.view(dtype))
            self.launch_gather()

    def land(self) -> torch.Tensor:
        if self._values.dtype.itemsize <= 2:
            return self.gathered().view(-1).view(self._values.dtype)[: self._numel]
        self._wait()
        values, self._values = self._values, self._halves  # what was adopted is not kept alive
        self._wait = _done
        if not self._native:
            finish_mean(values, self._members)
        return values

    def scatter(self, size: int) -> torch.Tensor:
        self._rows = self._half(0, size)
        return self._rows

    def launch_scatter(self) -> None:
        self._all_to_all()

    def scattered(self) -> torch.Tensor:
        self._wait()
        return self._half(1, self._rows.shape[1])

    def gather(self, size: int) -> torch.Tensor:
        self._rows = self._half(0, size)
        return self._rows[0]

    def launch_gather(self) -> None:
        if self._native:
            received = self._half(1, self._rows.shape[1]).view(-1)
            self._wait = self._transport.start(all_gather_single, received, self._rows[0])
        else:
            # Gloo's all-gather copies twice inside; sending the row to everyone takes half its time.
            self._rows[1:].copy_(self._rows[0])
            self._all_to_all()

    def gathered(self) -> torch.Tensor:
        self._wait()
        return self._half(1, self._rows.shape[1])

    def _half(self, half: int, size: int) -> torch.Tensor:
        """Return the first (sending) or second (receiving) half of the memory as a row for each member."""
        return self._halves[half, : self._members * size].view(self._members, size)

    def _all_to_all(self) -> None:
        received = self._half(1, self._rows.shape[1])
        self._wait = self._transport.start(dist.all_to_all_single, received.view(-1), self._rows.view(-1))


def _done() -> None:
    """Wait for nothing."""

"""Averaging over a `torch.distributed` process group: any backend, any number of hosts.

fp32 and fp64 travel by all-reduce (`ReduceOp.AVG` on NCCL). 16-bit values travel as they are, at half the bytes, but
are summed in fp32: an all-to-all brings every member its share, which it sums and sends back to all. Backends' own
16-bit all-reduces round at every hop.

The transport holds no reference to the group: `destroy_process_group` closes its sockets only when nobody does.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist

from cadenza.errors import NotInitializedError, TransportError
from cadenza.process_groups import all_gather_single, control_device, store_of, timeout_of
from cadenza.transports.base import Lane
from cadenza.transports.means import mean_into, scales_first

__all__ = ["C10dTransport"]

LANE_BYTES = 8 << 20
LANES = 3


class C10dTransport:
    """Averages over a process group with the group's own collectives."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = weakref.ref(group)
        self._members = tuple(dist.get_process_group_ranks(group))
        self._position = dist.get_rank(group)
        self._native_mean = dist.get_backend(group) == "nccl"
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
        return timeout_of(self.group())

    @property
    def store(self) -> dist.Store:
        return store_of(self.group())

    def exchange(self, payload: bytes) -> Callable[[], list[bytes]]:
        device = control_device(self.group())
        mine = torch.frombuffer(bytearray(payload), dtype=torch.uint8).to(device)
        theirs = torch.empty(len(self.members) * len(payload), dtype=torch.uint8, device=device)
        wait = self.start(all_gather_single, theirs, mine)

        def replies() -> list[bytes]:
            wait()
            data = bytes(theirs.tolist())
            return [data[i : i + len(payload)] for i in range(0, len(data), len(payload))]

        return replies

    def capacity(self, device: torch.device, dtype: torch.dtype) -> int:
        if dtype.itemsize > 2:
            return LANE_BYTES // dtype.itemsize
        half = LANE_BYTES // 2 // dtype.itemsize  # the other half receives
        return half - half % len(self.members)

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

    def group(self) -> dist.ProcessGroup:
        """Return the group, or say why it can no longer be used."""
        if self._abandoned:
            raise TransportError(
                "An earlier averaging on this process group failed, and its members may be out of step. Destroy the "
                "group, make a new one, and restore the parameters from a checkpoint or from one rank."
            )
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

    @property
    def native_mean(self) -> bool:
        """Whether the backend divides by itself (`ReduceOp.AVG`) and gathers without extra copies."""
        return self._native_mean

    def _failure(self, error: RuntimeError) -> TransportError:
        return TransportError(f"A collective over ranks {list(self._members)} failed: {error}")


class _C10dLane:
    """A bucket on its way through the group's collectives."""

    def __init__(self, transport: C10dTransport, device: torch.device) -> None:
        self._transport = transport
        self._members = len(transport.members)
        self._memory = torch.empty(LANE_BYTES, dtype=torch.uint8, device=device)
        self._numel = 0
        self._values = self._memory
        self._incoming = self._memory
        self._wait: Callable[[], None]

    def outgoing(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        self._numel = numel
        if dtype.itemsize > 2:
            self._values = self._memory.view(dtype)[:numel]
            return self._values
        padded = -(-numel // self._members) * self._members
        halves = self._memory.view(dtype).view(2, -1)
        self._values, self._incoming = halves[0, :padded], halves[1, :padded]
        return self._values

    def launch(self) -> None:
        if self._values.dtype.itemsize > 2:
            op = dist.ReduceOp.AVG if self._transport.native_mean else dist.ReduceOp.SUM
            if not self._transport.native_mean and scales_first(self._members):
                self._values.mul_(1 / self._members)
            self._wait = self._transport.start(dist.all_reduce, self._values, op=op)
        else:
            self._wait = self._all_to_all()

    def combine(self) -> None:
        if self._values.dtype.itemsize > 2:
            return
        self._wait()
        copies = self._values.view(self._members, -1)
        mean_into(copies[0], self._incoming.view(self._members, -1))
        if self._transport.native_mean:
            self._wait = self._transport.start(all_gather_single, self._incoming, copies[0])
        else:
            # Gloo's all-gather copies twice inside; sending the share to everyone takes half its time.
            copies[1:].copy_(copies[0])
            self._wait = self._all_to_all()

    def land(self) -> torch.Tensor:
        self._wait()
        if self._values.dtype.itemsize <= 2:
            return self._incoming[: self._numel]
        if not self._transport.native_mean and not scales_first(self._members):
            self._values.div_(self._members)
        return self._values

    def _all_to_all(self) -> Callable[[], None]:
        incoming, outgoing = self._incoming.view(torch.uint8), self._values.view(torch.uint8)
        return self._transport.start(dist.all_to_all_single, incoming, outgoing)

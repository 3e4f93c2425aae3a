"""A transport whose headers bear the job's seal: a stranger that got into the group is found before values are used."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from cadenza.errors import TransportError
from cadenza.membership.seal import MAC_BYTES, Seal
from cadenza.transports import Lane, Transport

__all__ = ["SignedTransport"]


class SignedTransport:
    """Does what the transport below it does, and signs what goes from everyone to everyone."""

    def __init__(self, below: Transport, seal: Seal, place: str) -> None:
        self._below = below
        self._seal = seal
        self._place = place
        self._exchanges = 0

    @property
    def members(self) -> Sequence[int]:
        return self._below.members

    @property
    def position(self) -> int:
        return self._below.position

    @property
    def timeout_s(self) -> float:
        return self._below.timeout_s

    @property
    def store(self) -> dist.Store:
        return self._below.store

    def exchange(self, payload: bytes) -> Callable[[], list[bytes]]:
        self._exchanges += 1
        places = [f"{self._place} {self._exchanges} {member}" for member in self.members]
        replies = self._below.exchange(payload + self._seal.sign(payload, places[self.position]))

        def checked() -> list[bytes]:
            found = []
            for member, place, reply in zip(self.members, places, replies(), strict=True):
                data, signature = reply[:-MAC_BYTES], reply[-MAC_BYTES:]
                if self._seal.sign(data, place) != signature:
                    raise TransportError(f"Worker {member} does not know this job's secret: its header has no seal.")
                found.append(data)
            return found

        return checked

    def capacity(self, device: torch.device, dtype: torch.dtype) -> int:
        return self._below.capacity(device, dtype)

    def row_bytes(self, device: torch.device) -> int:
        return self._below.row_bytes(device)

    def lanes(self, device: torch.device) -> list[Lane]:
        return self._below.lanes(device)

    def next_round(self) -> int:
        return self._below.next_round()

    def abandon(self) -> None:
        self._below.abandon()

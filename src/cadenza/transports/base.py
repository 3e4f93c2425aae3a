"""What every transport promises: headers from everyone to everyone, and lanes that turn values into their mean.

A round uses a lane in three stages, and the stages of neighbouring buckets overlap::

    pack into lane.outgoing → launch() → combine() → land() → unpack from what land() returned

`launch` hands the packed values over, `combine` does the middle of the work where there is one, `land` waits for the
mean.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist

__all__ = ["Lane", "Transport"]


class Lane(Protocol):
    """One bucket's worth of memory, and the way of its values to the mean over all members."""

    def outgoing(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return memory for `numel` values, to be packed before `launch`."""
        ...

    def launch(self) -> None:
        """Start averaging what was packed into `outgoing`."""
        ...

    def combine(self) -> None:
        """Do this member's share of the work, once the others' values are in."""
        ...

    def land(self) -> torch.Tensor:
        """Wait for the mean and return it; the memory is the lane's until its next use."""
        ...


class Transport(Protocol):
    """A way for the members of one group to average."""

    @property
    def members(self) -> Sequence[int]:
        """The global ranks of the members, in the order of the group."""
        ...

    @property
    def position(self) -> int:
        """Where in `members` this process stands."""
        ...

    @property
    def timeout_s(self) -> float:
        """How long a member waits for another."""
        ...

    @property
    def store(self) -> dist.Store:
        """The group's key-value store, for votes."""
        ...

    def exchange(self, payload: bytes) -> Callable[[], list[bytes]]:
        """Send `payload`, as long on every member, to all; the returned call waits for theirs, in rank order."""
        ...

    def capacity(self, device: torch.device, dtype: torch.dtype) -> int:
        """Return how many values of `dtype` one lane carries."""
        ...

    def lanes(self, device: torch.device) -> list[Lane]:
        """Return the ring of lanes for tensors on `device`."""
        ...

    def next_round(self) -> int:
        """Count a round and return its number, which is the same on every member."""
        ...

    def abandon(self) -> None:
        """Give the transport up: what is in flight is left alone, peers are let go, later use raises."""
        ...

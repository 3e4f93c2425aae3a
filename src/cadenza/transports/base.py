"""What every transport promises: headers from everyone to everyone, and lanes that turn values into their mean.

A lane averages values in three stages, and the stages of neighbouring buckets overlap::

    pack into lane.outgoing → launch() → combine() → land() → unpack from what land() returned

Large values that lie in a row need no packing: a lane may adopt them and average them where they are.

`launch` hands the packed values over, `combine` does the middle of the work if there is one, `land` waits for the mean.

Encoded values cannot be added up on their way, so a lane also carries bytes, in two halves that the caller connects:
`scatter` brings every member what the others have for it, `gather` brings everyone what each member has for all::

    fill lane.scatter(size) → launch_scatter() → use lane.scattered()
    fill lane.gather(size)  → launch_gather()  → use lane.gathered()
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist

__all__ = ["OUT_OF_STEP", "Above", "Lane", "Transport", "bytes_of"]

# What a transport says when it is used after it was abandoned.
OUT_OF_STEP = (
    "An earlier averaging on this process group failed, and its members may be out of step. Destroy the group, make a "
    "new one, and restore the parameters from a checkpoint or from one rank."
)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a contiguous tensor as flat bytes, in which form every backend carries every dtype.

    >>> bytes_of(torch.tensor([[True], [False]]))
    tensor([1, 0], dtype=torch.uint8)
    >>> bytes_of(torch.ones(2, 2).t())
    Traceback (most recent call last):
      ...
    ValueError: A contiguous tensor is required; got strides (1, 2) for the shape (2, 2). Send tensor.contiguous().
    """
    if not tensor.is_contiguous():
        raise ValueError(
            f"A contiguous tensor is required; got strides {tensor.stride()} for the shape {tuple(tensor.shape)}. Send "
            "tensor.contiguous()."
        )
    return tensor.detach().view(-1).view(torch.uint8)


class Lane(Protocol):
    """One bucket's worth of memory, and the way of its values to the mean over all members."""

    def outgoing(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return memory for `numel` values, to be packed before `launch`."""
        ...

    def adopt(self, values: torch.Tensor) -> None:
        """Take flat values that are averaged where they are, instead of `outgoing`; if `in_place` says so.

        Nothing is changed before `launch`, and after a failure the values may be anything.
        """
        ...

    def launch(self) -> None:
        """Start averaging what was packed into `outgoing`, or adopted."""
        ...

    def combine(self) -> None:
        """Do this member's share of the work, once the others' values are in."""
        ...

    def land(self) -> torch.Tensor:
        """Wait for the mean and return it; the memory is the lane's until its next use."""
        ...

    def scatter(self, size: int) -> torch.Tensor:
        """Return memory of a row of `size` bytes for each member, to be filled before `launch_scatter`."""
        ...

    def launch_scatter(self) -> None:
        """Send every member its row."""
        ...

    def scattered(self) -> torch.Tensor:
        """Wait for and return the rows that the members sent to this one, in their order.

        They may lie in the senders' memory: after a `scattered` that no gather follows, the members exchange something
        before one of them packs for a mean again.
        """
        ...

    def gather(self, size: int) -> torch.Tensor:
        """Return memory for `size` bytes, to be filled before `launch_gather`; after `scattered`, if that is used."""
        ...

    def launch_gather(self) -> None:
        """Send this member's bytes to all."""
        ...

    def gathered(self) -> torch.Tensor:
        """Wait for and return a row from each member, in their order."""
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

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Give a contiguous tensor, as large on every member, the values it has on the one at position `source`."""
        ...

    def capacity(self, device: torch.device, dtype: torch.dtype) -> int:
        """Return how many values of `dtype` one lane carries."""
        ...

    def in_place(self, device: torch.device, dtype: torch.dtype) -> tuple[int, int] | None:
        """Return how many values are adopted by a lane, at least and at most, rather than packed; None: never.

        A lane then has memory for as many, for a member that must pack them all the same.
        """
        ...

    def row_bytes(self, device: torch.device) -> int:
        """Return how long a row of `scatter` and `gather` may be, a multiple of 64."""
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


class Above:
    """A transport that does what the one below it does, but for what a subclass does in its own way."""

    def __init__(self, below: Transport) -> None:
        self._below = below

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
        return self._below.exchange(payload)

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        self._below.broadcast(tensor, source)

    def capacity(self, device: torch.device, dtype: torch.dtype) -> int:
        return self._below.capacity(device, dtype)

    def in_place(self, device: torch.device, dtype: torch.dtype) -> tuple[int, int] | None:
        return self._below.in_place(device, dtype)

    def row_bytes(self, device: torch.device) -> int:
        return self._below.row_bytes(device)

    def lanes(self, device: torch.device) -> list[Lane]:
        return self._below.lanes(device)

    def next_round(self) -> int:
        return self._below.next_round()

    def abandon(self) -> None:
        self._below.abandon()

"""The ranks that train together, before they are cut into levels: processes of `torch.distributed`, or threads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

import torch.distributed as dist

from cadenza.transports.base import Transport

__all__ = ["Group", "current_group", "use_group"]


class Group(Protocol):
    """The ranks that train together, and how some of them get a transport of their own.

    >>> from cadenza.transports.c10d_group import C10dGroup
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> group: Group = C10dGroup(dist.group.WORLD)
    >>> group.rank, group.ranks, list(group.connect(group.ranks).members)
    (0, (0,), [0])
    >>> dist.destroy_process_group()
    """

    @property
    def rank(self) -> int:
        """The global rank of this process or, where workers are threads, of this thread."""
        ...

    @property
    def ranks(self) -> tuple[int, ...]:
        """The global ranks of the whole group, in its order."""
        ...

    @property
    def store(self) -> dist.Store:
        """The group's key-value store."""
        ...

    @property
    def timeout_s(self) -> float:
        """How long a rank waits for another."""
        ...

    def connect(self, ranks: Sequence[int], *, through_host: bool = False) -> Transport:
        """Make the transport among some of the ranks; all of these call this, and make their transports in one order.

        Nobody else communicates over it. Its `members` are the ranks in the order that the transport gives them. With
        `through_host`, values on a device are sent through the host's memory, whatever else could carry them.
        """
        ...

    def host_names(self) -> dict[int, str]:
        """Return {rank: name of its host} for the whole group; all of its ranks call this."""
        ...


_current: ContextVar[Group | None] = ContextVar("cadenza_group", default=None)


def current_group() -> Group | None:
    """Return the group in which this thread is a worker; None where workers are processes.

    >>> current_group() is None
    True
    """
    return _current.get()


@contextmanager
def use_group(group: Group) -> Iterator[None]:
    """Make a group the one that `current_group` returns to this thread, inside the block.

    >>> from cadenza.transports.c10d_group import C10dGroup
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> group = C10dGroup(dist.group.WORLD)
    >>> with use_group(group):
    ...     current_group() is group
    True
    >>> dist.destroy_process_group()
    """
    token = _current.set(group)
    try:
        yield
    finally:
        _current.reset(token)

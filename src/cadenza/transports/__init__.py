"""How values get to the other members of a group and come back as their mean."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from cadenza.errors import NotInitializedError
from cadenza.transports.base import Lane, Transport
from cadenza.transports.c10d import C10dTransport
from cadenza.transports.shared_memory import open_shared_memory
from cadenza.transports.through_host import ThroughHost

__all__ = ["C10dTransport", "Lane", "Transport", "connect", "process_group_of"]

_connected: WeakKeyDictionary[dist.ProcessGroup, Transport] = WeakKeyDictionary()


def connect(group: dist.ProcessGroup) -> Transport:
    """Return the group's transport, making it at the first call, in which every member must take part.

    Members on one machine share memory; all others use the group's collectives. Values on a device that the group has
    no backend for travel through the host.
    """
    transport = _connected.get(group)
    if transport is None:
        below = C10dTransport(group)
        alone = len(below.members) == 1
        transport = below if alone else open_shared_memory(below) or below
        if torch.accelerator.is_available() and not alone:
            transport = ThroughHost(transport, below.reaches)
        _connected[group] = transport
    return transport


def process_group_of(transport: Transport) -> dist.ProcessGroup:
    """Return the process group whose transport this is; nothing here keeps it alive.

    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> process_group_of(connect(dist.group.WORLD)) is dist.group.WORLD
    True
    >>> dist.destroy_process_group()
    """
    for group, known in _connected.items():
        if known is transport:
            return group
    raise NotInitializedError(
        "These workers have no process group: it was destroyed, or they are threads of one process. Finish the "
        "synchronizer before the group is destroyed, and use no DistributedDataParallel between threads."
    )

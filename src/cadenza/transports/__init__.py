"""How values get to the other members of a group and come back as their mean."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch.distributed as dist

from cadenza.transports.base import Lane, Transport
from cadenza.transports.c10d import C10dTransport
from cadenza.transports.shared_memory import open_shared_memory

__all__ = ["C10dTransport", "Lane", "Transport", "connect"]

_connected: WeakKeyDictionary[dist.ProcessGroup, Transport] = WeakKeyDictionary()


def connect(group: dist.ProcessGroup) -> Transport:
    """Return the group's transport, making it at the first call, in which every member must take part.

    Members on one machine share memory; all others use the group's collectives.
    """
    transport = _connected.get(group)
    if transport is None:
        below = C10dTransport(group)
        alone = len(below.members) == 1
        transport = _connected[group] = below if alone else open_shared_memory(below) or below
    return transport

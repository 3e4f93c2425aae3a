"""Which host each rank runs on."""

from __future__ import annotations

import os
import socket

from cadenza.common.later import dist
from cadenza.common.process_groups import resolve, store_of

__all__ = ["host_name", "hosts_of"]


def host_name() -> str:
    """Return what tells this rank's host from others: the launcher's node number if there is one, or the host name.

    Node numbers come from torchrun (``GROUP_RANK``) or SLURM (``SLURM_NODEID``). They keep two launchers on one machine
    apart, as when a cluster is emulated.

    >>> isinstance(host_name(), str)
    True
    """
    for launcher in ("GROUP_RANK", "SLURM_NODEID"):
        if node := os.environ.get(launcher):
            return f"{launcher} {node}"
    return socket.gethostname()


def hosts_of(group: dist.ProcessGroup | None = None) -> dict[int, str]:
    """Ask every rank of a group for its host; all of them must call this. Return {global rank: host}."""
    whole = resolve(group)
    store = store_of(whole)
    store.set(f"cadenza/host/{dist.get_rank()}", host_name())
    ranks = dist.get_process_group_ranks(whole)
    return {rank: bytes(store.get(f"cadenza/host/{rank}")).decode() for rank in ranks}

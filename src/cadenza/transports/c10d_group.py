"""The ranks of a `torch.distributed` process group, as a `Group`."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import cast

import torch.distributed as dist

from cadenza.common.process_groups import (
    backend_beside,
    count_groups,
    resolve,
    store_of,
    timeout_of,
    without_splitting,
)
from cadenza.errors import NotInitializedError
from cadenza.topology import hosts_of
from cadenza.transports import Transport, connect
from cadenza.transports.group import Group, current_group

__all__ = ["C10dGroup", "group_of"]


class C10dGroup:
    """The ranks of a process group, which nothing here keeps alive: its sockets close when torch destroys it.

    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> group = C10dGroup(dist.group.WORLD)
    >>> list(group.host_names()), group.connect([0]).exchange(b"hello")()
    ([0], [b'hello'])
    >>> dist.destroy_process_group()
    """

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self._process_group = weakref.ref(process_group)
        self._rank = dist.get_rank()
        self._ranks = tuple(dist.get_process_group_ranks(process_group))

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def ranks(self) -> tuple[int, ...]:
        return self._ranks

    @property
    def store(self) -> dist.Store:
        return store_of(self._alive())

    @property
    def timeout_s(self) -> float:
        return timeout_of(self._alive())

    def connect(self, ranks: Sequence[int], *, through_host: bool = False) -> Transport:
        self._count_groups_alike(ranks)
        return connect(self._new_group(ranks, backend_beside(self._alive(), through_host=through_host)))

    def host_names(self) -> dict[int, str]:
        return hosts_of(self._alive())

    def _alive(self) -> dist.ProcessGroup:
        process_group = self._process_group()
        if process_group is None:
            raise NotInitializedError("The process group was destroyed; finish() the synchronizer before that.")
        return process_group

    def _count_groups_alike(self, ranks: Sequence[int]) -> None:
        """Make as many groups on each of the ranks: torch names a group by its ranks and by how many groups exist."""
        store, mine = self.store, count_groups()
        place = "cadenza/groups/" + hashlib.blake2b(str(sorted(ranks)).encode(), digest_size=16).hexdigest()
        visit = store.add(f"{place}/visits/{self._rank}", 1)
        store.set(f"{place}/{visit}/{self._rank}", str(mine))
        counts = [int(store.get(f"{place}/{visit}/{rank}")) for rank in ranks]
        for _ in range(max(counts) - mine):
            self._new_group([self._rank], "gloo" if dist.is_gloo_available() else dist.get_backend(self._alive()))

    def _new_group(self, ranks: Sequence[int], backend: str) -> dist.ProcessGroup:
        timeout = timedelta(seconds=self.timeout_s)
        with without_splitting():
            made = dist.new_group(list(ranks), timeout=timeout, backend=backend, use_local_synchronization=True)
        assert isinstance(made, dist.ProcessGroup)
        return made


def group_of(given: dist.ProcessGroup | Group | None) -> Group:
    """Return a group as it is, a process group as one, and for None the thread's own group or the world.

    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> group_of(None).ranks, group_of(dist.group.WORLD).ranks
    ((0,), (0,))
    >>> dist.destroy_process_group()
    """
    if given is None:
        return current_group() or C10dGroup(resolve(None))
    if isinstance(given, dist.ProcessGroup) or not hasattr(given, "connect"):
        return C10dGroup(resolve(cast(dist.ProcessGroup, given)))  # it refuses what is neither
    return given

"""Ctrl-C while a rank waits for the verdict: an atomic round is still one decision."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from cadenza.engine.in_place_mean import average_in_place
from cadenza.engine.packing import Fragment
from cadenza.transports import connect
from support.ranks import RankPool

INTERRUPTED = 1


class InterruptedStore:
    """The group's store, with a Ctrl-C during the first wait."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store

    def wait(self, *args: Any) -> None:
        self._store.wait(*args)  # C++ does not stop for a signal; Python raises once it is back
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


class LateStore:
    """The group's store, which counts a member ready only after the interrupted one."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store

    def add(self, key: str, number: int) -> int:
        while key.endswith("/ready") and not self._store.check([key]):
            time.sleep(0.01)
        return self._store.add(key, number)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def vote_and_be_interrupted() -> tuple[str, float]:
    transport = connect(dist.group.WORLD)
    values = torch.full((100,), 3.0 * dist.get_rank() ** 2)  # the mean, 5, is nobody's own value
    dist.barrier()
    kind = type(transport)
    store = kind.store.fget(transport)  # type: ignore[attr-defined]
    if dist.get_rank() == INTERRUPTED:
        odd = type("Interrupted", (kind,), {"store": property(lambda self: InterruptedStore(store))})
    else:  # the interrupted one is the first to vote, and waits
        odd = type("Late", (kind,), {"store": property(lambda self: LateStore(store))})
    transport.__class__ = odd
    try:
        average_in_place(Fragment([values]), transport, atomic=True)
    except KeyboardInterrupt:
        return "interrupted", values[0].item()
    return "fine", values[0].item()


@pytest.mark.parametrize(
    "env", [{"CADENZA_SHARED_MEMORY": "1"}, {"CADENZA_SHARED_MEMORY": "0"}], ids=["shared", "c10d"]
)
def test_an_interrupt_at_the_vote_leaves_all_ranks_with_one_decision(ranks: RankPool, env: dict[str, str]) -> None:
    results = ranks.run(3, vote_and_be_interrupted, env=env)
    assert results[INTERRUPTED][0] == "interrupted"
    means = [value == 5.0 for _, value in results]
    assert means in ([True] * 3, [False] * 3), results

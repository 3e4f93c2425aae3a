"""The ranks of a machine on their way to shared memory: whatever goes wrong there, all of them notice or do without."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from cadenza.engine.in_place_mean import average
from cadenza.engine.packing import Fragment
from cadenza.transports import connect, shared_memory
from support.ranks import RankPool, outcome


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def no_memory(patch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> int:
        raise PermissionError(1, "memfd_create is not allowed here")

    patch.setattr(os, "memfd_create", refuse)


def no_sockets(patch: pytest.MonkeyPatch) -> None:
    class NoSocket(socket.socket):
        def bind(self, address: Any) -> None:
            raise PermissionError(1, "abstract sockets are not allowed here")

    patch.setattr(socket, "socket", NoSocket)


def no_passing_of_descriptors(patch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> Any:
        raise OSError(24, "too many open files")

    patch.setattr(socket, "recv_fds", refuse)


def strangers(patch: pytest.MonkeyPatch) -> None:
    """Let others knock at the door first: one says nothing and leaves, one does not know the secret."""
    meet = shared_memory._meet

    def meet_strangers(below: Any, listener: socket.socket, *others: Any) -> Any:
        for greeting in (b"", shared_memory._GREETING.pack(2, b"not the secret!!")):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
                stranger.connect(listener.getsockname())
                stranger.sendall(greeting)
        return meet(below, listener, *others)

    patch.setattr(shared_memory, "_meet", meet_strangers)


def connect_with(trouble: Callable[[pytest.MonkeyPatch], None], on: int) -> tuple[str, float]:
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == on:
            trouble(patch)
        transport = connect(world())
    values = torch.full((100,), float(dist.get_rank()))
    average(Fragment([values]), world())
    return type(transport).__name__, values[99].item()


@pytest.mark.parametrize(
    ("trouble", "on"), [(no_memory, 0), (no_sockets, 0), (no_sockets, 2), (no_passing_of_descriptors, 1)]
)
def test_one_rank_that_cannot_share_memory_makes_all_use_the_group(
    ranks: RankPool, trouble: Callable[[pytest.MonkeyPatch], None], on: int
) -> None:
    results = ranks.run(3, connect_with, trouble, on, group_timeout_s=5, timeout_s=15)
    assert results == [("C10dTransport", 1.0)] * 3


def test_strangers_at_the_door_are_turned_away(ranks: RankPool) -> None:
    assert ranks.run(3, connect_with, strangers, 0) == [("SharedMemoryTransport", 1.0)] * 3


def die_while_meeting() -> tuple[Any, ...]:
    def die(*args: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_memory, "_SET_UP_S", 1.0)
        if dist.get_rank() == 1:
            patch.setattr(shared_memory, "_meet", die)
        values = torch.full((100,), float(dist.get_rank()))
        told = outcome(average, Fragment([values]), world())
    return *told, values[0].item()


def test_a_rank_that_dies_while_meeting_fails_the_round_before_anything_is_sent(ranks: RankPool) -> None:
    results = ranks.run(3, die_while_meeting, expect_dead={1}, group_timeout_s=5)
    for rank in (0, 2):
        kind, error, text, value = results[rank]
        assert (kind, error, value) == ("error", "RoundAbortedError", float(rank))
        assert "before any value was sent" in text

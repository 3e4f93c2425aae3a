"""The ranks of one replica, an island: towards the other workers they are one, and they end together.

DDP or FSDP2 work inside, Cadenza across. The first rank speaks for all of them: it beats, comes to rounds and tells its
mates what was decided. Every rank exchanges values with the ranks in its own place in the other replicas, its *column*.
Each watches the others by a connection over which beats are sent, so that all know at once when one of them dies.
"""

from __future__ import annotations

import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch.distributed as dist

from cadenza.common.process_groups import resolve, store_of, timeout_of
from cadenza.errors import NotInitializedError, ReplicaBrokenError
from cadenza.participants.addresses import family_of
from cadenza.participants.channel import Channel, broken
from cadenza.transports import Transport
from cadenza.transports.c10d_group import C10dGroup

__all__ = ["Island", "meet_mates"]

_BEATS = 5  # in a lease
_BEAT, _BYE = b".", b"!"
_KINDS = 3  # connections between two ranks: to watch, for the training loop, for rounds in flight


class Island:
    """A replica's ranks, as one of them knows them; without arguments, a replica of one rank.

    Args:
        ranks: Their global ranks, in their order.
        rank: Which of them this one is.
        links: The connections to the others (see `Channel`): to watch, for the training loop, for rounds in flight.
        lease_s: After so long without a beat a mate counts as stopped.
        give_up_s: After so long it counts as dead.
        connect: Makes a transport among them.

    Attributes:
        loop: What is said in the training loop.
        rounds: What is said of rounds in flight.
        sharded: Whether each rank holds a part of the model, and not all of it.
        stopped: Whether a mate does not beat now.

    >>> island = Island()
    >>> island.size, island.number(3)
    (1, 3)
    """

    def __init__(
        self,
        ranks: Sequence[int] = (0,),
        rank: int = 0,
        links: Sequence[Sequence[socket.socket]] = ((), (), ()),
        *,
        lease_s: float = 1.0,
        give_up_s: float = 1800.0,
        connect: Callable[[], Transport] | None = None,
    ) -> None:
        self.ranks, self.rank, self.size = tuple(ranks), rank, len(ranks)
        self._watched, loop, rounds = links
        self.loop, self.rounds = Channel(rank, loop), Channel(rank, rounds)
        self.sharded = self.stopped = self._broken = self._leaving = False
        self._lease_s, self._give_up_s, self._connect = lease_s, give_up_s, connect
        self._ended = threading.Event()
        self._on_break: list[Callable[[], None]] = []
        if self._watched:
            threading.Thread(target=self._attend, name="cadenza island", daemon=True).start()

    def number(self, worker: int) -> int:
        """Return the number that this place in a worker has, where ranks and not workers are counted."""
        return worker * self.size + self.rank

    def inside(self) -> Transport:
        """Make a transport among the ranks; all of them call this."""
        assert self._connect is not None
        return self._connect()

    def on_break(self, call: Callable[[], None]) -> None:
        """Have something called, on another thread, when a mate has ended."""
        self._on_break.append(call)
        if self._broken:
            call()

    def check(self) -> None:
        """Raise if a mate has ended."""
        if self._broken:
            raise broken()

    def leave(self) -> None:
        """Note that all is done: from now on ranks may end one after the other."""
        self._leaving = True

    def close(self) -> None:
        """End the connections: if there is anything left to do, the others raise."""
        self._hang_up()
        self.loop.close()
        self.rounds.close()

    def _hang_up(self) -> None:
        self._ended.set()
        for link in self._watched:
            with suppress(OSError):
                if self._leaving:
                    link.send(_BYE, socket.MSG_DONTWAIT)
                link.shutdown(socket.SHUT_RDWR)
        self.loop.hang_up()
        self.rounds.hang_up()

    # ---- on the thread ---------------------------------------------------------------------------------------------

    def _attend(self) -> None:
        try:
            if not self._watch():
                self._break()
        finally:
            for link in self._watched:
                link.close()

    def _watch(self) -> bool:
        """Beat, and listen to the others' beats, until all have left, or this one does; False if one of them has ended.

        Time in which this process stood still does not count against them.
        """
        tick_s, seen_at = self._lease_s / _BEATS, time.monotonic()
        beat_at, silent_s = seen_at, dict.fromkeys(self._watched, 0.0)
        with selectors.DefaultSelector() as selector:
            for link in self._watched:
                selector.register(link, selectors.EVENT_READ)
            while silent_s and not self._ended.is_set():
                ready = [key.fileobj for key, _ in selector.select(tick_s)]
                now = time.monotonic()
                elapsed, seen_at = min(now - seen_at, 2 * tick_s), now
                for link in list(silent_s):
                    silent_s[link] += elapsed
                    said = _received(link) if link in ready else None
                    if said == b"" or silent_s[link] > self._give_up_s:
                        return False
                    if said is not None and _BYE in said:
                        selector.unregister(link)
                        del silent_s[link]
                    elif said is not None:
                        silent_s[link] = 0.0
                if now >= beat_at:
                    beat_at = now + tick_s
                    for link in silent_s:
                        _send_beat(link)
                self.stopped = any(silence > self._lease_s for silence in silent_s.values())
        return True

    def _break(self) -> None:
        if self._ended.is_set() or self._leaving:
            return
        self._broken = True
        self._hang_up()  # what the mate said before it ended may still be read: why it did, perhaps
        for call in self._on_break:
            call()


def meet_mates(replica: object, *, host: str, lease_s: float) -> Island:
    """Connect the ranks of a replica; all of them call this.

    Args:
        replica: Their process group, or a DeviceMesh of one dimension.
        host: The address of this host.
        lease_s: After so long without a beat a rank counts as stopped.
    """
    group = _process_group(replica)
    ranks, rank = dist.get_process_group_ranks(group), dist.get_rank(group)
    if len(ranks) == 1:
        return Island(ranks)
    timeout_s, store, own = timeout_of(group), store_of(group), C10dGroup(group)
    visit = store.add(f"cadenza/island/visits/{rank}", 1)
    place = f"cadenza/island/{visit}"
    try:
        if rank == 0:
            links = _welcome(store, place, host, len(ranks) - 1, timeout_s)
        else:
            links = _visit(store, place, rank, timeout_s)
    except (OSError, RuntimeError) as error:  # of the store, or the network
        raise ReplicaBrokenError(
            f"The {len(ranks)} ranks of this replica did not come together within {timeout_s:g} s: {error}. All of "
            "them call cadenza.join(replica=…), and the first must be reached by the others."
        ) from error
    return Island(
        ranks, rank, links, lease_s=lease_s, give_up_s=timeout_s, connect=lambda: own.connect(ranks, through_host=True)
    )


def _process_group(replica: object) -> dist.ProcessGroup:
    if hasattr(replica, "get_group"):
        if replica.ndim != 1:  # type: ignore[attr-defined]
            raise ValueError(
                f"replica is a process group, or a DeviceMesh of one dimension; got a mesh of {replica.ndim}: pass "  # type: ignore[attr-defined]
                "mesh['shard'], or the process group of all ranks of this replica."
            )
        replica = replica.get_group()
    group = resolve(replica)  # type: ignore[arg-type]
    if dist.get_rank(group) < 0:
        raise NotInitializedError("replica is a process group of other ranks: pass the one that this rank is in.")
    return group


def _welcome(store: dist.Store, place: str, host: str, mates: int, timeout_s: float) -> list[list[socket.socket]]:
    """Take the mates' connections, those that know the word."""
    word = secrets.token_hex(16)
    found: dict[tuple[int, int], socket.socket] = {}
    with socket.create_server((host, 0), family=family_of(host), backlog=128) as listener:
        store.set(place, f"{word} {listener.getsockname()[1]} {host}")
        deadline = time.monotonic() + timeout_s
        while len(found) < _KINDS * mates:
            listener.settimeout(max(0.01, deadline - time.monotonic()))
            link, _ = listener.accept()
            link.settimeout(1.0)
            with suppress(OSError, ValueError):
                told, kind, rank = link.recv(256).decode().split()
                if secrets.compare_digest(told.encode(), word.encode()):
                    found[int(kind), int(rank)] = link
                    link.sendall(_BEAT)
                    continue
            link.close()
    return [[_ready(found[kind, rank]) for rank in range(1, mates + 1)] for kind in range(_KINDS)]


def _visit(store: dist.Store, place: str, rank: int, timeout_s: float) -> list[list[socket.socket]]:
    word, port, host = bytes(store.get(place)).decode().split()
    links = []
    for kind in range(_KINDS):
        link = socket.create_connection((host, int(port)), timeout_s)
        link.sendall(f"{word} {kind} {rank}".encode())
        if link.recv(1) != _BEAT:
            raise OSError("the first rank did not answer")
        links.append([_ready(link)])
    return links


def _ready(link: socket.socket) -> socket.socket:
    link.settimeout(None)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return link


def _received(link: socket.socket) -> bytes:
    try:
        return link.recv(4096)
    except OSError:
        return b""


def _send_beat(link: socket.socket) -> None:
    with suppress(OSError):  # a mate that is stopped does not read; one that has ended is heard to
        link.send(_BEAT, socket.MSG_DONTWAIT)

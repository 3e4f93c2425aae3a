"""Life lines: an open connection to every other worker, over which nothing is sent; it ends when its process does.

A killed process says nothing, but its kernel closes its connections at once, long before a lease has run out. A host
that is cut off or loses its power closes nothing: there the lease decides. A line that was lost without a death does no
harm: the next beats show that the worker is alive, and it is connected again.

>>> seen = []
>>> with LivenessSockets("127.0.0.1", lambda worker, incarnation: seen.append(worker)) as ours:
...     theirs = LivenessSockets("127.0.0.1", lambda *_: None)
...     ours.watch({1: ("a7", theirs.address)})
...     while not ours.watched:
...         time.sleep(0.01)
...     theirs.close()  # as its kernel would
...     while not seen:
...         time.sleep(0.01)
>>> seen
[1]
"""

from __future__ import annotations

import errno
import ipaddress
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping, Set
from contextlib import suppress
from types import TracebackType
from typing import Self

from cadenza.participants.addresses import family_of

__all__ = ["LivenessSockets"]

_MOST = 1024  # connections that are accepted; more would come from strangers
_MOST_OF_A_HOST = 256
_LOOK_S = 0.01
_AGAIN_S = 2.0  # until a connection that could not be made is tried again, and its worker counts as out of reach

Peer = tuple[int, str]  # number and incarnation


class LivenessSockets:
    """This worker's lines to the others.

    Attributes:
        address: Where the others find this worker.
        watched: The workers, by number and incarnation, to which there is a line now.

    Args:
        host: The address at which the others reach this worker.
        died: Called on another thread with the number and the incarnation of a worker whose line has ended.
    """

    def __init__(self, host: str, died: Callable[[int, str], None]) -> None:
        self._died = died
        self._listener = socket.create_server((host, 0), family=family_of(host), backlog=128)
        self._listener.setblocking(False)
        self.address = _told(host, self._listener.getsockname()[1])
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._waker, self._wake = socket.socketpair()
        self._selector.register(self._waker, selectors.EVENT_READ)
        self._lock = threading.Lock()
        self._wanted: dict[Peer, str] = {}
        self._connections: dict[Peer, socket.socket] = {}
        self._tried_at: dict[Peer, float] = {}
        self._first_at: dict[Peer, float] = {}
        self._made_at: dict[Peer, float] = {}
        self._renewed: set[Peer] = set()
        self._out_of_reach: frozenset[Peer] = frozenset()
        self.watched: frozenset[Peer] = frozenset()
        self._accepted: dict[socket.socket, str] = {}  # with the hosts from which they come
        self._ended = False
        self._thread = threading.Thread(target=self._serve, name="cadenza liveness", daemon=True)
        self._thread.start()

    def watch(self, peers: Mapping[int, tuple[str, str]]) -> None:
        """Have a line to each of these workers, told by number as incarnation and address, and to no others."""
        wanted = {(worker, incarnation): address for worker, (incarnation, address) in peers.items()}
        with self._lock:
            now = time.monotonic()
            waiting = [
                p for p in wanted if p not in self._connections and now - self._tried_at.get(p, -_AGAIN_S) >= _AGAIN_S
            ]
            changed = waiting or self._wanted != wanted or any(peer not in self._made_at for peer in wanted)
            self._wanted = wanted
        if changed:
            self._stir()

    def unreached(self) -> set[int]:
        """Return workers to which no line could ever be made, though it was tried for a while."""
        return {worker for worker, _ in self._out_of_reach}

    def try_anew(self, workers: Set[int], seconds: float) -> set[int]:
        """Make new lines to workers; return those to which that was not possible within the time."""
        with self._lock:
            peers = {peer for peer in self._wanted if peer[0] in workers}
            self._renewed |= peers
            for peer in peers:
                self._made_at.pop(peer, None)
        self._stir()
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and any(peer not in self._made_at for peer in peers):
            time.sleep(_LOOK_S)
        return {peer[0] for peer in peers if peer not in self._made_at}

    def close(self) -> None:
        """End all lines; to the others it looks as if this worker had died."""
        self._ended = True
        self._stir()
        self._thread.join(timeout=1.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _stir(self) -> None:
        with suppress(OSError):
            self._wake.send(b".")

    # ---- on the thread ---------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            while not self._ended:
                for key, events in self._selector.select():
                    self._attend(key.fileobj, key.data, events)  # type: ignore[arg-type]
                self._connect()
        finally:
            for connection in (*self._connections.values(), *self._accepted, self._listener, self._waker, self._wake):
                connection.close()
            self._selector.close()

    def _attend(self, connection: socket.socket, peer: Peer | None, events: int) -> None:
        if connection is self._listener:
            self._accept()
        elif connection is self._waker:
            with suppress(OSError):
                connection.recv(4096)
        elif events & selectors.EVENT_WRITE and peer is not None:
            self._made(connection, peer)
        elif peer is None:  # it has ended, or it speaks: then it is a stranger, and is not listened to
            self._let_go(connection, None)
        elif _has_ended(connection):
            self._let_go(connection, peer)
            self._died(*peer)

    def _accept(self) -> None:
        with suppress(OSError):
            connection, address = self._listener.accept()
            of_host = sum(host == address[0] for host in self._accepted.values())
            if len(self._accepted) >= _MOST or of_host >= _MOST_OF_A_HOST:
                connection.close()
                return
            connection.setblocking(False)
            self._accepted[connection] = address[0]
            self._selector.register(connection, selectors.EVENT_READ)

    def _connect(self) -> None:
        """Begin the connections that are wanted, and end those that are not wanted any more."""
        now = time.monotonic()
        with self._lock:
            wanted = dict(self._wanted)
            renewed, self._renewed = self._renewed, set()
            for known in (self._tried_at, self._first_at, self._made_at):
                for peer in known.keys() - wanted.keys() | (renewed & known.keys()):
                    del known[peer]
        for peer in self._connections.keys() - (wanted.keys() - renewed):
            self._let_go(self._connections[peer], peer)
        for peer in wanted.keys() - self._connections.keys():
            if now - self._tried_at.get(peer, -_AGAIN_S) < _AGAIN_S:
                continue
            self._tried_at[peer] = now
            self._first_at.setdefault(peer, now)
            if (connection := _begin(wanted[peer])) is not None:
                self._connections[peer] = connection
                self._selector.register(connection, selectors.EVENT_WRITE, peer)
        # Found out here, after what has happened was attended to: this process may have stood still for a while.
        tried = (peer for peer, at in self._first_at.items() if now - at >= _AGAIN_S)
        self._out_of_reach = frozenset(peer for peer in tried if peer not in self._made_at)

    def _made(self, connection: socket.socket, peer: Peer) -> None:
        """Watch a connection that has been made, or forget one that could not be: that is no sign of death."""
        if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._let_go(connection, peer)
        else:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            self._selector.modify(connection, selectors.EVENT_READ, peer)
            self.watched |= {peer}
            self._made_at[peer] = time.monotonic()

    def _let_go(self, connection: socket.socket, peer: Peer | None) -> None:
        self._selector.unregister(connection)
        connection.close()
        self._accepted.pop(connection, None)
        if peer is not None:
            self._connections.pop(peer, None)
            self.watched -= {peer}


def _begin(address: str) -> socket.socket | None:
    """Begin to connect to an address of numbers, whatever somebody has written there."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    connection = socket.socket(family_of(host), socket.SOCK_STREAM)
    connection.setblocking(False)
    try:
        ipaddress.ip_address(host)  # a name would be looked up, and that waits
        if connection.connect_ex((host, int(port))) in (0, errno.EINPROGRESS, errno.EWOULDBLOCK):
            return connection
    except (ValueError, OverflowError, OSError):
        pass
    connection.close()
    return None


def _has_ended(connection: socket.socket) -> bool:
    """Tell whether a connection that can be read has ended; nobody sends anything over it."""
    try:
        return not connection.recv(64)
    except BlockingIOError:
        return False
    except OSError:  # reset, or timed out: only its beats can tell now
        return True


def _told(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

"""Where workers meet: torch's TCPStore, in a process that outlives every worker, and connections to it that never hang.

A client of a TCPStore whose link is cut waits for as long as TCP does. So every call is made on a thread of its own
connection, and given up after a while together with the thread; the next call opens a new one.

From the shell: ``python -m cadenza.membership --port 29400``.
"""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from datetime import timedelta
from typing import TypeVar

from cadenza.common.later import dist
from cadenza.errors import CadenzaError, StoreLostError, TransportError
from cadenza.participants.name_lookup import limit_name_lookups

__all__ = ["StoreConnection", "append", "local_end", "parse_address", "serve", "wait_for"]

T = TypeVar("T")

_CONNECT_S = 3.0  # more than `limit_name_lookups` allows a name server
_CALL_S = 5.0


def serve(port: int = 0, *, host: str = "0.0.0.0") -> dist.TCPStore:
    """Start a store in this process, on a free port for 0; it lives as long as the object that is returned.

    Where name servers are slow, the process of ``python -m cadenza.membership`` is the better place: it asks none.

    >>> store = serve(host="127.0.0.1")
    >>> store.port > 0
    True
    """
    return dist.TCPStore(host, port, is_master=True, wait_for_workers=False)


class StoreConnection:
    """A connection to the store, made when it is needed and made anew when it was lost.

    >>> store = serve(host="127.0.0.1")
    >>> connection = StoreConnection(f"127.0.0.1:{store.port}", prefix="example")
    >>> connection.call(lambda store: store.add("count", 2))
    2
    """

    def __init__(self, address: str, *, prefix: str) -> None:
        self._host, self._port = parse_address(address)
        self._prefix = prefix
        self._work: queue.SimpleQueue[tuple[Callable[[dist.Store], object], Future[object]]] | None = None
        self._lock = threading.Lock()

    def call(self, function: Callable[[dist.Store], T], *, timeout_s: float = _CALL_S) -> T:
        """Return what the function makes of the store.

        Raises:
            StoreLostError: The store cannot be reached, or did not answer within the time.
        """
        future: Future[object] = Future()
        with self._lock:
            if self._work is None:
                self._work = queue.SimpleQueue()
                arguments = (self._host, self._port, self._prefix, self._work)
                threading.Thread(target=_attend, args=arguments, name="cadenza store", daemon=True).start()
            work = self._work
        work.put((function, future))
        try:
            return future.result(_CONNECT_S + timeout_s)  # type: ignore[return-value]
        except FutureTimeoutError:
            self._give_up(work)
            raise StoreLostError(self._lost("did not answer")) from None
        except StoreLostError as error:
            self._give_up(work)
            raise StoreLostError(self._lost(str(error))) from None
        except TransportError:
            self._give_up(work)
            raise

    def own_host(self) -> str:
        """Return the address that this host has towards the store; nothing is sent."""
        return local_end(self._host)

    def close(self) -> None:
        """Let the connection go."""
        with self._lock:
            work, self._work = self._work, None
        if work is not None:
            work.put((_end, Future()))

    def _give_up(self, work: queue.SimpleQueue[tuple[Callable[[dist.Store], object], Future[object]]]) -> None:
        with self._lock:
            if self._work is work:
                self._work = None
        work.put((_end, Future()))

    def _lost(self, how: str) -> str:
        return f"The store at {self._host}:{self._port} cannot be reached: {how}."


class _EndError(Exception):
    """Ends a connection's thread."""


def _end(_: dist.Store) -> None:
    raise _EndError


def _attend(
    host: str, port: int, prefix: str, work: queue.SimpleQueue[tuple[Callable[[dist.Store], object], Future[object]]]
) -> None:
    """Make calls on one connection until it fails."""
    limit_name_lookups()
    store: dist.Store | None = None
    while True:
        function, future = work.get()
        if function is _end:
            return
        try:
            if store is None:
                socket.create_connection((host, port), _CONNECT_S).close()  # fails in silence, where torch would not
                client = dist.TCPStore(host, port, None, False, timeout=timedelta(seconds=_CONNECT_S))
                store = dist.PrefixStore(prefix, client)
                del client
            future.set_result(function(store))
        except CadenzaError as error:
            future.set_exception(error)
            if isinstance(error, TransportError):
                return
        except (RuntimeError, OSError) as error:  # torch's errors of the store and the network
            future.set_exception(StoreLostError(str(error).split("\n")[0]))
            return
        except BaseException as error:
            future.set_exception(error)
        del function, future


def append(store: dist.Store, key: str, text: str) -> None:
    """Add text to what stands under a key, at once, whoever else does so too."""
    store.append(key, text)  # type: ignore[attr-defined]


def wait_for(store: dist.Store, key: str, seconds: float) -> bytes | None:
    """Return what stands under a key, looking again and again for a while; None if nothing does.

    The store's own `wait` would wake up sooner, but writes to standard error whenever its time runs out.
    """
    deadline = time.monotonic() + seconds
    pause_s = 0.001
    while not store.check([key]):
        if time.monotonic() >= deadline:
            return None
        time.sleep(pause_s)
        pause_s = min(0.02, 1.5 * pause_s)
    return bytes(store.get(key))


def local_end(target: str) -> str:
    """Return the address of this host on the way to another, or raise OSError if there is none; nothing is sent.

    >>> local_end("127.0.0.1")
    '127.0.0.1'
    """
    family, kind, protocol, _, place = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as trial:
        trial.connect(place)
        return str(trial.getsockname()[0])


def parse_address(address: str) -> tuple[str, int]:
    """Return host and port.

    >>> parse_address("10.0.0.1:29400")
    ('10.0.0.1', 29400)
    """
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdigit():
        raise ValueError(f'The address of a store is "host:port", such as "10.0.0.1:29400"; got {address!r}.')
    return host.strip("[]"), int(port)

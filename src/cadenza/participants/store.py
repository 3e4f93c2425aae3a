"""Where workers meet: a store in a process that outlives every worker, and connections to it that never hang.

With a secret it is a private store, which nobody else can use; without one it is torch's TCPStore, which asks nobody. A
client finds out which it is.

A client of a TCPStore whose link is cut waits for as long as TCP does. So every call is made on a thread of its own
connection, and given up after a while together with the thread; the next call opens a new one.

From the shell: ``python -m cadenza.membership --port 29400``.
"""

from __future__ import annotations

import logging
import queue
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from datetime import timedelta
from functools import cache
from typing import TypeVar, overload

from cadenza.common.later import dist
from cadenza.errors import CadenzaError, StoreLostError, TransportError, TurnedAwayError
from cadenza.participants.addresses import family_of, local_end, parse_address
from cadenza.participants.name_lookup import limit_name_lookups
from cadenza.participants.private_store.client import PrivateStore, greet
from cadenza.participants.private_store.server import PrivateStoreServer
from cadenza.participants.signed_store import SignedStore
from cadenza.participants.signing import Signer, shared_secret

__all__ = ["StoreConnection", "serve", "wait_for"]

_logger = logging.getLogger("cadenza")

T = TypeVar("T")

_Task = tuple[Callable[[SignedStore], object], "Future[object]"]

_CONNECT_S = 3.0  # more than `limit_name_lookups` allows a name server
_CALL_S = 5.0


@overload
def serve(port: int = 0, *, host: str = "0.0.0.0", secret: None = None) -> dist.TCPStore: ...


@overload
def serve(port: int = 0, *, host: str = "0.0.0.0", secret: str) -> PrivateStoreServer: ...


@overload
def serve(port: int = 0, *, host: str = "0.0.0.0", secret: str | None) -> dist.TCPStore | PrivateStoreServer: ...


def serve(port: int = 0, *, host: str = "0.0.0.0", secret: str | None = None) -> dist.TCPStore | PrivateStoreServer:
    """Start a store in this process, on a free port for 0; it lives as long as the object that is returned.

    Without a secret, where name servers are slow, the process of ``python -m cadenza.membership`` is the better place:
    it asks none.

    Args:
        port: Where it listens.
        host: The one address at which it listens; "0.0.0.0" for all that this host has, as for a name that means
            this host alone here and something else elsewhere.
        secret: The word that the job's workers know: nobody else can read the store, write to it or stay connected.
            None: torch's TCPStore, which anyone can use who reaches the port.

    Raises:
        OSError: The port is taken, or the address is none of this host's.

    >>> store = serve(host="127.0.0.1")
    >>> store.port > 0
    True
    >>> serve(host="127.0.0.1", secret="our word").close()
    """
    at = _address_of(host)
    if secret is not None:
        return PrivateStoreServer(at, secret=shared_secret(secret) or "", port=port)
    # Torch would listen at every address, whatever host is given.
    listener = socket.create_server((at, port), family=family_of(at), backlog=1024)
    port = listener.getsockname()[1]
    return dist.TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def _address_of(host: str) -> str:
    """Return where to listen: everywhere for a name that only this host takes for loopback, as Debian has it."""
    if host == "localhost" or ":" in host:
        return host
    address = socket.gethostbyname(host)
    return "0.0.0.0" if address != host and address.startswith("127.") else address


class StoreConnection:
    """A connection to the store, made when it is needed and made anew when it was lost.

    >>> store = serve(host="127.0.0.1")
    >>> connection = StoreConnection(f"127.0.0.1:{store.port}", Signer("example", secret=None))
    >>> connection.call(lambda store: store.compare_set("color", "", "green"))
    b'green'

    Args:
        address: The store's "host:port".
        signer: What signs and verifies; it also says where in the store the job's entries are, and opens a private one.
        who: What tells this client from others, where they are counted.
    """

    def __init__(self, address: str, signer: Signer, *, who: str = "") -> None:
        self._host, self._port = parse_address(address)
        self._signer, self._who = signer, who
        self._work: queue.SimpleQueue[_Task] | None = None
        self._lock = threading.Lock()

    def call(self, function: Callable[[SignedStore], T], *, timeout_s: float = _CALL_S) -> T:
        """Return what the function makes of the store.

        Raises:
            StoreLostError: The store cannot be reached, or did not answer within the time.
        """
        future: Future[object] = Future()
        with self._lock:
            if self._work is None:
                self._work = queue.SimpleQueue()
                arguments = (self._open, self._work)
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

    def _open(self) -> SignedStore:
        secret = self._signer.secret
        connection = greet(self._host, self._port, timeout_s=_CONNECT_S)  # fails in silence, where torch would not
        if connection is None:
            if secret is not None:
                _warn_of_strangers(f"{self._host}:{self._port}")
            client = dist.TCPStore(self._host, self._port, None, False, timeout=timedelta(seconds=_CONNECT_S))
            shared = dist.PrefixStore(f"cadenza/{self._signer.job}", client)
            return SignedStore(dist.PrefixStore(self._signer.space, shared), self._signer, who=self._who, shared=shared)
        if secret is None:
            connection.close()
            raise TurnedAwayError(
                f"The store at {self._host}:{self._port} was started with a secret, and this worker has none: set "
                "CADENZA_SECRET, or secret=… of join(), to the others' word."
            )
        private = PrivateStore.enter(connection, secret, timeout_s=_CALL_S).below(f"cadenza/{self._signer.job}")
        return SignedStore(private.below(self._signer.space), self._signer, who=self._who, shared=private)

    def _give_up(self, work: queue.SimpleQueue[_Task]) -> None:
        with self._lock:
            if self._work is work:
                self._work = None
        work.put((_end, Future()))

    def _lost(self, how: str) -> str:
        return f"The store at {self._host}:{self._port} cannot be reached: {how}."


@cache
def _warn_of_strangers(address: str) -> None:
    """Say it once in a process."""
    _logger.warning(
        "The store at %s was started without the secret, so whoever reaches it can delete or overwrite what workers "
        "write there. Start it with theirs (CADENZA_SECRET=… python -m cadenza.membership).",
        address,
    )


class _EndError(Exception):
    """Ends a connection's thread."""


def _end(_: SignedStore) -> None:
    raise _EndError


def _attend(open_store: Callable[[], SignedStore], work: queue.SimpleQueue[_Task]) -> None:
    """Make calls on one connection until it fails."""
    limit_name_lookups()
    store: SignedStore | None = None
    while True:
        function, future = work.get()
        if function is _end:
            return
        try:
            store = store or open_store()
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


def wait_for(store: SignedStore, key: str, seconds: float) -> str | None:
    """Return what stands under a key, looking again and again for a while; None if nothing does."""
    deadline = time.monotonic() + seconds
    pause_s = 0.001
    while (text := store.read(key)) is None:
        if time.monotonic() >= deadline:
            return None
        time.sleep(pause_s)
        pause_s = min(0.02, 1.5 * pause_s)
    return text

"""The server of a private store: a dictionary, and a thread that serves those who know the secret.

>>> from cadenza.participants.private_store.client import PrivateStore, greet
>>> with PrivateStoreServer("127.0.0.1", secret="word") as server:
...     connection = greet("127.0.0.1", server.port, timeout_s=5)
...     store = PrivateStore.enter(connection, "word", timeout_s=5)
...     store.set("color", "green")
...     store.find("color")
b'green'
"""

from __future__ import annotations

import errno
import hmac
import os
import selectors
import socket
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Self

from cadenza.participants.addresses import family_of
from cadenza.participants.private_store.frames import (
    GREETING,
    HELLO,
    MAC_BYTES,
    NONCE_BYTES,
    REFUSAL,
    Frames,
    key_of,
    proof,
)

__all__ = ["PrivateStoreServer"]

_MOST_WAITING = 512  # who have not shown yet that they know the secret; the next one takes the place of another
_PATIENCE_S = 10.0  # after which one who has not is hung up on
_CHUNK = 1 << 18


class PrivateStoreServer:
    """Serves a store until it is closed, or nobody refers to it any more.

    Attributes:
        host: Where it listens.
        port: The port.

    Args:
        host: The address at which to listen.
        secret: What clients have to know.
        port: The port, 0 for a free one.

    Raises:
        OSError: The port is taken, or the address is none of this host's.
    """

    def __init__(self, host: str, *, secret: str, port: int = 0) -> None:
        listener = socket.create_server((host, port), family=family_of(host), backlog=1024)
        self.host, self.port = host, int(listener.getsockname()[1])
        loop = _Loop(listener, key_of(secret))
        self._end = weakref.finalize(self, loop.end)
        self._thread = threading.Thread(target=loop.serve, name="cadenza private store", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Hang up on everybody, and forget everything."""
        self._end()
        self._thread.join(timeout=5.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class _Guest:
    """A connection that was accepted; what it may do depends on whether it has shown that it knows the secret.

    Attributes:
        frames: How to speak with it, once it has.
        unsent: What it has not taken yet.
    """

    def __init__(self, connection: socket.socket, host: str) -> None:
        self.connection, self.host = connection, host
        self.since = time.monotonic()
        self.nonce = os.urandom(NONCE_BYTES)
        self.said = bytearray()
        self.greeted = False
        self.frames: Frames | None = None
        self.unsent = bytearray()


class _GoneError(Exception):
    """The guest has hung up, or is to be hung up on."""


class _Loop:
    """What the thread does."""

    def __init__(self, listener: socket.socket, key: bytes) -> None:
        self._listener, self._key = listener, key
        self._entries: dict[bytes, bytes] = {}
        self._waiting: dict[str, dict[_Guest, None]] = {}  # by host, the oldest first
        self._selector = selectors.DefaultSelector()
        self._waker, self._wake = socket.socketpair()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._waker, selectors.EVENT_READ)

    def end(self) -> None:
        """End the thread; called on another one."""
        with suppress(OSError):
            self._wake.send(b".")

    def serve(self) -> None:
        try:
            while True:
                for found, events in self._selector.select(1.0):
                    if found.fileobj is self._waker:
                        return
                    if found.fileobj is self._listener:
                        self._accept()
                    else:
                        self._attend(found.data, events)
                self._hang_up_on_the_slow()
        finally:
            held = [key.fileobj for key in self._selector.get_map().values()]
            self._selector.close()
            for one in (*held, self._wake):
                one.close()  # type: ignore[union-attr] # sockets, all of them

    # ---- connections -----------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            connection, address = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE) and not self._make_room():
                time.sleep(0.05)  # nothing can be done until somebody hangs up
            return
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        guest = _Guest(connection, str(address[0]))
        self._waiting.setdefault(guest.host, {})[guest] = None
        self._selector.register(connection, selectors.EVENT_READ, guest)
        if sum(map(len, self._waiting.values())) > _MOST_WAITING:
            self._make_room()

    def _make_room(self) -> bool:
        """Hang up on the one who has waited longest of the host of which most wait; return whether there was one."""
        most = max(self._waiting.values(), key=len, default=None)
        if most:
            self._let_go(next(iter(most)))
        return bool(most)

    def _hang_up_on_the_slow(self) -> None:
        before = time.monotonic() - _PATIENCE_S
        for waiting in list(self._waiting.values()):
            for guest in list(waiting):
                if guest.since >= before:
                    break
                self._let_go(guest)

    def _let_go(self, guest: _Guest) -> None:
        if guest.connection.fileno() < 0:
            return
        self._selector.unregister(guest.connection)
        guest.connection.close()
        self._waits_no_more(guest)

    def _waits_no_more(self, guest: _Guest) -> None:
        waiting = self._waiting.get(guest.host, {})
        waiting.pop(guest, None)
        if not waiting:
            self._waiting.pop(guest.host, None)

    def _attend(self, guest: _Guest, events: int) -> None:
        if guest.connection.fileno() < 0:  # hung up on in this very turn
            return
        try:
            if events & selectors.EVENT_WRITE:
                self._send(guest, b"")
            else:
                self._hear(guest)
        except (_GoneError, OSError, ValueError):  # whatever it has said: it serves all others
            self._let_go(guest)

    def _hear(self, guest: _Guest) -> None:
        try:
            data = guest.connection.recv(_CHUNK)
        except BlockingIOError:
            return
        if not data:
            raise _GoneError
        if guest.frames is None:
            data = self._know(guest, data)
        if guest.frames is not None:
            for message in guest.frames.feed(data):
                self._send(guest, guest.frames.pack(self._answer(message)))

    def _send(self, guest: _Guest, data: bytes) -> None:
        """Send what can be sent now; a guest that does not take it is not heard until it has."""
        guest.unsent += data
        with suppress(BlockingIOError):
            del guest.unsent[: guest.connection.send(guest.unsent)]
        waits_for = selectors.EVENT_WRITE if guest.unsent else selectors.EVENT_READ
        self._selector.modify(guest.connection, waits_for, guest)

    # ---- who may come ----------------------------------------------------------------------------------------------

    def _know(self, guest: _Guest, data: bytes) -> bytes:
        """Find out whether a guest knows the secret; return what it has said beyond that."""
        said = guest.said
        said += data
        if bytes(said[: len(HELLO)]) != HELLO[: len(said)]:
            raise _GoneError
        if not guest.greeted and len(said) >= len(HELLO):
            guest.greeted = True
            self._send(guest, GREETING + guest.nonce)
        needed = len(HELLO) + NONCE_BYTES + MAC_BYTES
        if len(said) < needed:
            return b""
        theirs = bytes(said[len(HELLO) : len(HELLO) + NONCE_BYTES])
        given = bytes(said[len(HELLO) + NONCE_BYTES : needed])
        if not hmac.compare_digest(given, proof(self._key, guest.nonce, theirs, of_server=False)):
            self._send(guest, REFUSAL)
            raise _GoneError
        self._waits_no_more(guest)
        self._send(guest, proof(self._key, guest.nonce, theirs, of_server=True))
        guest.frames = Frames(self._key, guest.nonce, theirs, serves=True)
        return bytes(said[needed:])

    # ---- what is asked ---------------------------------------------------------------------------------------------

    def _answer(self, message: list[bytes]) -> list[bytes]:
        if not message or (answer := _ANSWERS.get(message[0])) is None:
            raise _GoneError  # another version
        try:
            return answer(self._entries, *message[1:])
        except TypeError:  # too many words, or too few
            raise _GoneError from None


Entries = dict[bytes, bytes]


def _set(entries: Entries, key: bytes, value: bytes) -> list[bytes]:
    entries[key] = value
    return []


def _append(entries: Entries, key: bytes, value: bytes) -> list[bytes]:
    entries[key] = entries.get(key, b"") + value
    return []


def _compare_set(entries: Entries, key: bytes, expected: bytes, desired: bytes) -> list[bytes]:
    standing = entries.get(key)
    if standing == expected or (standing is None and not expected):
        standing = entries[key] = desired
    return [expected if standing is None else standing]


def _delete(entries: Entries, key: bytes) -> list[bytes]:
    return [b"" if entries.pop(key, None) is None else b"1"]


def _read(entries: Entries, *keys: bytes) -> list[bytes]:
    return [b"" if (value := entries.get(key)) is None else b"=" + value for key in keys]


def _keys(entries: Entries, prefix: bytes) -> list[bytes]:
    return [key for key in entries if key.startswith(prefix)]


_ANSWERS: dict[bytes, Callable[..., list[bytes]]] = {
    b"set": _set,
    b"append": _append,
    b"compare_set": _compare_set,
    b"delete": _delete,
    b"read": _read,
    b"keys": _keys,
}

"""A client of a private store, which does what one of torch's does.

>>> from cadenza.participants.private_store.server import PrivateStoreServer
>>> server = PrivateStoreServer("127.0.0.1", secret="word")
>>> connection = greet("127.0.0.1", server.port, timeout_s=5)
>>> store = PrivateStore.enter(connection, "word", timeout_s=5)
>>> store.below("job").compare_set("color", "", "green")
b'green'
>>> store.find("job/color")
b'green'
>>> server.close()
"""

from __future__ import annotations

import hmac
import os
import socket
import threading
import weakref
from collections.abc import Sequence

import torch.distributed as dist

from cadenza.errors import TurnedAwayError
from cadenza.participants.private_store.frames import (
    GREETING,
    HELLO,
    MAC_BYTES,
    NONCE_BYTES,
    PING,
    DamagedError,
    Frames,
    key_of,
    proof,
)

__all__ = ["PrivateStore", "greet"]

_CHUNK = 1 << 18


def greet(host: str, port: int, *, timeout_s: float) -> socket.socket | None:
    """Connect to a store, and return the connection if it is a private one; None if it is torch's, which asks nobody.

    Raises:
        OSError: It cannot be reached, or no store listens there.
    """
    connection = socket.create_connection((host, port), timeout_s)
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.sendall(HELLO)
        answer = _exactly(connection, len(PING))
        if answer == PING:
            connection.close()
            return None
        if answer + _exactly(connection, len(GREETING) - len(answer)) != GREETING:
            raise OSError("what listens there is no store of this version")
    except BaseException:
        connection.close()
        raise
    return connection


class PrivateStore(dist.Store):
    """A connection to a private store, for one thread at a time."""

    def __init__(self, link: _Link, prefix: str = "") -> None:
        super().__init__()
        self._link, self._prefix = link, prefix

    @classmethod
    def enter(cls, connection: socket.socket, secret: str, *, timeout_s: float) -> PrivateStore:
        """Show over a connection that `greet` has made that one knows the secret, and see that the server does.

        Raises:
            TurnedAwayError: It has another secret.
            OSError: The connection has ended.
        """
        key, ours = key_of(secret), os.urandom(NONCE_BYTES)
        connection.settimeout(timeout_s)
        try:
            theirs = _exactly(connection, NONCE_BYTES)
            connection.sendall(ours + proof(key, theirs, ours, of_server=False))
            if not hmac.compare_digest(_exactly(connection, MAC_BYTES), proof(key, theirs, ours, of_server=True)):
                raise TurnedAwayError("The store was started with another secret than this worker's (CADENZA_SECRET).")
        except BaseException:
            connection.close()
            raise
        return cls(_Link(connection, Frames(key, theirs, ours, serves=False)))

    def below(self, place: str) -> PrivateStore:
        """Return what stands below a place, over the same connection."""
        return PrivateStore(self._link, f"{self._prefix}{place}/")

    def find(self, key: str) -> bytes | None:
        """Return what stands under a key, or None; without waiting."""
        return self.find_all([key])[0]

    def find_all(self, keys: Sequence[str]) -> list[bytes | None]:
        """Return what stands under several keys, on one way to the store."""
        answer = self._link.ask(b"read", *map(self._key, keys))
        return [value[1:] if value else None for value in answer]

    def set(self, key: str, value: str | bytes) -> None:
        self._link.ask(b"set", self._key(key), _data(value))

    def get(self, key: str) -> bytes:
        """Return what stands under a key; raise if nothing does, where torch's store would wait."""
        return self.multi_get([key])[0]

    def append(self, key: str, value: str | bytes) -> None:
        self._link.ask(b"append", self._key(key), _data(value))

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        return self._link.ask(b"compare_set", self._key(key), _data(expected_value), _data(desired_value))[0]

    def check(self, keys: Sequence[str]) -> bool:
        return all(value is not None for value in self.find_all(keys))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        found = [value for value in self.find_all(keys) if value is not None]
        if len(found) < len(keys):
            raise RuntimeError(f"Not all of {list(keys)} are in the store.")
        return found

    def delete_key(self, key: str) -> bool:
        return bool(self._link.ask(b"delete", self._key(key))[0])

    def list_keys(self) -> list[str]:
        return [key.decode()[len(self._prefix) :] for key in self._link.ask(b"keys", self._prefix.encode())]

    def _key(self, key: str) -> bytes:
        return f"{self._prefix}{key}".encode()


class _Link:
    """A connection over which one asks, and is answered."""

    def __init__(self, connection: socket.socket, frames: Frames) -> None:
        self._connection, self._frames = connection, frames
        self._lock = threading.Lock()
        weakref.finalize(self, connection.close)

    def ask(self, *message: bytes) -> list[bytes]:
        with self._lock:
            frame = self._frames.pack(message)
            try:
                self._connection.sendall(frame)
                while (answer := next(self._frames.feed(_some(self._connection)), None)) is None:
                    pass
            except BaseException as error:  # half an answer may be on its way
                self._connection.close()
                if isinstance(error, DamagedError):
                    raise ConnectionAbortedError(f"what came from the store was damaged: {error}") from None
                raise
            return answer


def _exactly(connection: socket.socket, length: int) -> bytes:
    data = b""
    while len(data) < length:
        data += _some(connection, length - len(data))
    return data


def _some(connection: socket.socket, most: int = _CHUNK) -> bytes:
    data = connection.recv(most)
    if not data:
        raise ConnectionResetError("the store has hung up")
    return data


def _data(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)

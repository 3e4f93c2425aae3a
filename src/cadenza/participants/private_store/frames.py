"""How both ends of a connection to a private store show that they know its secret, and how they speak after that.

The client begins as one of torch's own clients does, with a ping, so that the answer tells torch's store from a private
one. That says a greeting and a random number; the client answers with one of its own and a proof over both; then the
server gives its proof. From then on every message goes in a frame with an HMAC over its number in its direction, so
nothing can be changed, left out, or said again, and no connection can be taken over. Nothing is encrypted.

>>> import os
>>> key, ours, theirs = key_of("word"), os.urandom(NONCE_BYTES), os.urandom(NONCE_BYTES)
>>> server, client = (Frames(key, ours, theirs, serves=serves) for serves in (True, False))
>>> frame = client.pack([b"set", b"color", b"green"])
>>> list(server.feed(frame[:9])), list(server.feed(frame[9:]))
([], [[b'set', b'color', b'green']])
>>> list(server.feed(frame))
Traceback (most recent call last):
cadenza.participants.private_store.frames.DamagedError: A frame bears no right signature.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Iterable, Iterator

__all__ = [
    "GREETING",
    "HELLO",
    "MAC_BYTES",
    "NONCE_BYTES",
    "PING",
    "REFUSAL",
    "DamagedError",
    "Frames",
    "key_of",
    "proof",
]

PING = b"cdnz"  # what torch's store says again
_TORCH_MAGIC, _TORCH_PING = 0x3C85F7CE, 13
HELLO = b"\0" + struct.pack("<IB", _TORCH_MAGIC, _TORCH_PING) + PING
GREETING = b"Cadenza store 1\n"
NONCE_BYTES = MAC_BYTES = 16
REFUSAL = bytes(MAC_BYTES)  # in the place of a proof
_LONGEST = 64 << 20  # bytes of a message
_HEAD = struct.Struct(f"<I{MAC_BYTES}s")
_FIELD = struct.Struct("<I")


class DamagedError(ValueError):
    """What came is no frame of the other end's."""


def key_of(secret: str) -> bytes:
    """Return what proves that one knows a secret; it serves no other purpose."""
    return hashlib.blake2b(secret.encode(), digest_size=32, person=b"cadenza store").digest()


def proof(key: bytes, server_nonce: bytes, client_nonce: bytes, *, of_server: bool) -> bytes:
    """Return what only an end of this connection can say that knows the key."""
    return _mac(key, b"server" if of_server else b"client", server_nonce, client_nonce)


class Frames:
    """Makes frames of one end's messages, and messages of the other end's frames.

    Args:
        key: That of the secret.
        server_nonce: The server's random number.
        client_nonce: The client's.
        serves: Whether this is the server's end.
    """

    def __init__(self, key: bytes, server_nonce: bytes, client_nonce: bytes, *, serves: bool) -> None:
        to_client, to_server = (_mac(key, way, server_nonce, client_nonce) for way in (b"to client", b"to server"))
        self._send_key, self._receive_key = (to_client, to_server) if serves else (to_server, to_client)
        self._sent = self._received = 0
        self._buffer = bytearray()

    def pack(self, message: Iterable[bytes]) -> bytes:
        """Return the frame of a message."""
        body = b"".join(_FIELD.pack(len(field)) + field for field in message)
        if len(body) > _LONGEST:
            raise ValueError(f"A message to a store has at most {_LONGEST} bytes; this one has {len(body)}.")
        self._sent += 1
        return _HEAD.pack(len(body), _mac(self._send_key, self._sent.to_bytes(8, "little"), body)) + body

    def feed(self, data: bytes) -> Iterator[list[bytes]]:
        """Yield the messages that are complete with these bytes.

        Raises:
            DamagedError: They are not what the other end has sent.
        """
        self._buffer += data
        while len(self._buffer) >= _HEAD.size:
            length, mac = _HEAD.unpack_from(self._buffer)
            if length > _LONGEST:
                raise DamagedError(f"A frame of {length} bytes is too long.")
            if len(self._buffer) < _HEAD.size + length:
                return
            body = bytes(self._buffer[_HEAD.size : _HEAD.size + length])
            del self._buffer[: _HEAD.size + length]
            self._received += 1
            if not hmac.compare_digest(mac, _mac(self._receive_key, self._received.to_bytes(8, "little"), body)):
                raise DamagedError("A frame bears no right signature.")
            yield _fields(body)


def _fields(body: bytes) -> list[bytes]:
    fields, at = [], 0
    while at < len(body):
        begin = at + _FIELD.size
        at = begin + int.from_bytes(body[at:begin], "little")
        fields.append(body[begin:at])
    if at != len(body):
        raise DamagedError("A field is longer than its message.")
    return fields


def _mac(key: bytes, *parts: bytes) -> bytes:
    return hmac.digest(key, b"".join(_FIELD.pack(len(part)) + part for part in parts), "sha256")[:MAC_BYTES]

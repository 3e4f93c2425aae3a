"""Where the members of a process group in the making find each other's addresses: signed, and left at any moment.

Gloo waits in its store for the addresses of all members, and cannot be told to stop. So it is given this one.

>>> import torch.distributed as dist
>>> from cadenza.participants.signing import Signer
>>> addresses = GroupStore(SignedStore(dist.HashStore(), Signer("job", secret="word")), "round/1/group")
>>> addresses.set("0/0", b"an address")
>>> addresses.get("0/0")
b'an address'
>>> addresses.leave()
>>> addresses.get("0/1")
Traceback (most recent call last):
RuntimeError: The group is not made: somebody is gone, or cannot be reached.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from cadenza.participants.signed_store import SignedStore

__all__ = ["GroupStore"]

_LOOK_S = 0.002


class GroupStore(dist.Store):
    """What Gloo asks of a store.

    Attributes:
        lacking: Whether somebody waits for an address that is not there.

    Args:
        below: Where the addresses are written.
        place: The key under which they are, which no other group has.
    """

    def __init__(self, below: SignedStore, place: str) -> None:
        super().__init__()
        self._below, self._place = below, place
        self._left = threading.Event()
        self._found: dict[str, bytes] = {}
        self._mine: dict[str, str] = {}
        self.lacking = False

    def leave(self) -> None:
        """Let whoever waits here fail at once."""
        self._left.set()

    def renew(self) -> None:
        """Write again what was written here, if somebody else has deleted it."""
        for key, text in list(self._mine.items()):
            if self._below.read(key) != text:
                self._below.set(key, text)

    def set(self, key: str, value: str | bytes) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._mine[f"{self._place}/{key}"] = data.hex()
        self.renew()

    def get(self, key: str) -> bytes:
        while key not in self._found:
            text = self._below.read(f"{self._place}/{key}")
            self.lacking = text is None
            if text is not None:
                self._found[key] = bytes.fromhex(text)
            elif self._left.wait(_LOOK_S):
                raise RuntimeError("The group is not made: somebody is gone, or cannot be reached.")
        return self._found[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)

"""A key-value store for threads of one process, in which nobody waits for a worker that has failed."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist

from cadenza.errors import TransportError

__all__ = ["LoopbackStore"]


@dataclass
class _Shelf:
    """What all views of one store have in common."""

    values: dict[str, bytes] = field(default_factory=dict)
    changed: threading.Condition = field(default_factory=threading.Condition)
    failure: str | None = None


class LoopbackStore(dist.Store):
    """A store in this process's memory; torch's own cannot be told that a key will never come.

    >>> store = LoopbackStore(timeout_s=1.0)
    >>> store.set("name", "Clara")
    >>> store.get("name"), store.add("count", 2), store.compare_set("name", "Clara", "Fanny")
    (b'Clara', 2, b'Fanny')
    >>> store.part("letters").check(["name"])
    False
    """

    def __init__(self, *, timeout_s: float, shelf: _Shelf | None = None, prefix: str = "") -> None:
        super().__init__()
        self._timeout = timedelta(seconds=timeout_s)
        self._shelf = shelf or _Shelf()
        self._prefix = prefix

    def part(self, name: str) -> LoopbackStore:
        """Return a view of the store whose keys, as the store itself sees them, begin with a name."""
        timeout_s = self._timeout.total_seconds()
        return LoopbackStore(timeout_s=timeout_s, shelf=self._shelf, prefix=f"{self._prefix}{name}/")

    def fail(self, reason: str) -> None:
        """Let whoever waits for a key that is not there, now or later, raise instead."""
        with self._shelf.changed:
            self._shelf.failure = self._shelf.failure or reason
            self._shelf.changed.notify_all()

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    def set(self, key: str, value: str | bytes) -> None:
        with self._shelf.changed:
            self._put(key, _as_bytes(value))

    def get(self, key: str) -> bytes:
        with self._shelf.changed:
            self._await([key], self._timeout)
            return self._shelf.values[self._prefix + key]

    def add(self, key: str, amount: int) -> int:
        with self._shelf.changed:
            total = int(self._shelf.values.get(self._prefix + key, b"0")) + amount
            self._put(key, str(total).encode())
            return total

    def append(self, key: str, value: str | bytes) -> None:
        with self._shelf.changed:
            self._put(key, self._shelf.values.get(self._prefix + key, b"") + _as_bytes(value))

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        """Set a value if the expected one stands there, or none does and none is expected; return what stands then."""
        with self._shelf.changed:
            found = self._shelf.values.get(self._prefix + key)
            if (found or b"") != _as_bytes(expected_value):
                return _as_bytes(expected_value) if found is None else found
            self._put(key, _as_bytes(desired_value))
            return _as_bytes(desired_value)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        with self._shelf.changed:
            self._await(keys, self._timeout if timeout is None else timeout)

    def check(self, keys: Sequence[str]) -> bool:
        with self._shelf.changed:
            return not self._missing(keys)

    def delete_key(self, key: str) -> bool:
        with self._shelf.changed:
            return self._shelf.values.pop(self._prefix + key, None) is not None

    def num_keys(self) -> int:
        with self._shelf.changed:
            return sum(key.startswith(self._prefix) for key in self._shelf.values)

    def _put(self, key: str, value: bytes) -> None:
        self._shelf.values[self._prefix + key] = value
        self._shelf.changed.notify_all()

    def _missing(self, keys: Sequence[str]) -> list[str]:
        return [key for key in keys if self._prefix + key not in self._shelf.values]

    def _await(self, keys: Sequence[str], timeout: timedelta) -> None:
        def settled() -> bool:
            return self._shelf.failure is not None or not self._missing(keys)

        self._shelf.changed.wait_for(settled, timeout.total_seconds())
        if missing := self._missing(keys):
            reason = self._shelf.failure or f"Nobody set it within {timeout.total_seconds():g} s."
            raise TransportError(f"The store has no {missing[0]!r}. {reason}")


def _as_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)

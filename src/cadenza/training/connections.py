"""A connection to the store that all workers of a run share: what the training loop asks of it, whatever serves it.

>>> connection = DirectConnection(dist.HashStore())
>>> connection.call(lambda store: store.add("count", 2))
2
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import torch.distributed as dist

from cadenza.errors import StoreLostError

__all__ = ["Connection", "DirectConnection"]

T = TypeVar("T")


class Connection(Protocol):
    """A connection to a store, for one thread at a time: a call that waits keeps others on the same one waiting."""

    def call(self, function: Callable[[dist.Store], T]) -> T:
        """Return what the function makes of the store.

        Raises:
            StoreLostError: The store cannot be reached.
        """


class DirectConnection:
    """A process group's own store; once it is lost it stays lost, since its host, worker 0, has ended.

    >>> DirectConnection(dist.HashStore()).call(lambda store: store.check(["key"]))
    False
    """

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self._lost = False

    def call(self, function: Callable[[dist.Store], T]) -> T:
        """Return what the function makes of the store; raise StoreLostError if there is none any more."""
        if self._lost:  # asked again, torch would complain on standard error each time
            raise StoreLostError("The process group's store is gone.")
        try:
            return function(self._store)
        except RuntimeError as error:
            self._lost = True
            raise StoreLostError(f"The process group's store cannot be reached: {error}") from error

    def clone(self) -> DirectConnection:
        """Return a connection of its own to the same store, for another thread."""
        return DirectConnection(self._store.clone() if hasattr(self._store, "clone") else self._store)

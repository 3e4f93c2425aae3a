"""The names under which a job's workers train in a store: a new one whenever all of them begin together.

They begin from nothing or from a checkpoint, and under a new name they find nothing of what came before, also in a
store that outlives many launches.

>>> from cadenza.participants.store import serve
>>> store = serve(host="127.0.0.1")
>>> names = JobNames(f"127.0.0.1:{store.port}", "job")
>>> names.current(), names.after("job/1"), names.current()
('job/1', 'job/2', 'job/2')
"""

from __future__ import annotations

import contextlib
import time

from cadenza.errors import StoreLostError
from cadenza.participants.ending import FINISHED
from cadenza.participants.signed_store import SignedStore
from cadenza.participants.signing import Signer, shared_secret
from cadenza.participants.store import StoreConnection

__all__ = ["JobNames"]

_STORE_S = 60.0  # for another node to start the store
_PAUSE_S = 0.5
_KEY = "beginning"


class JobNames:
    """The names of one job, numbered; all nodes come to the same."""

    def __init__(self, address: str, job: str) -> None:
        self._address, self._job = address, job
        self._connection = self._connect(job)

    def current(self) -> str:
        """Return the name under which workers train now, or will; waits for the store.

        Raises:
            StoreLostError: It cannot be reached.
        """
        deadline = time.monotonic() + _STORE_S
        while True:
            try:
                return self._unfinished()
            except StoreLostError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(_PAUSE_S)

    def after(self, name: str) -> str:
        """Return the name after one under which nobody can go on."""
        number = _number(name)
        with contextlib.suppress(StoreLostError):
            return self._name(self._connection.call(lambda store: _raised(store, number, number + 1)))
        return self._name(number + 1)

    def remember(self, name: str) -> None:
        """Write the current name into a store that was started again and has lost everything."""
        with contextlib.suppress(StoreLostError):
            self._connection.call(lambda store: _raised(store, 0, _number(name)))

    def _unfinished(self) -> str:
        number = self._connection.call(lambda store: _raised(store, 0, 1))
        named = self._connect(self._name(number))
        try:
            finished = named.call(lambda store: store.check([FINISHED]))
        finally:
            named.close()
        return self._name(
            self._connection.call(lambda store: _raised(store, number, number + 1)) if finished else number
        )

    def _connect(self, job: str) -> StoreConnection:
        return StoreConnection(self._address, Signer(job, secret=shared_secret()))

    def _name(self, number: int) -> str:
        return f"{self._job}/{number}"


def _number(name: str) -> int:
    return int(name.rpartition("/")[2])


def _raised(store: SignedStore, below: int, number: int) -> int:
    """Write a number if the one that stands there is not above another, or cannot be read; return what stands then."""
    text = store.read(_KEY) or ""
    standing = int(text) if text.isdecimal() else 0
    if standing > below:
        return standing
    found = store.compare_set(_KEY, text, str(number)).decode()
    return int(found) if found.isdecimal() else number

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

import torch.distributed as dist

from cadenza.errors import StoreLostError
from cadenza.participants.store import StoreConnection

__all__ = ["JobNames"]

_STORE_S = 60.0  # for another node to start the store
_PAUSE_S = 0.5
_KEY = "beginning"


class JobNames:
    """The names of one job, numbered; all nodes come to the same."""

    def __init__(self, address: str, job: str) -> None:
        self._job = job
        self._connection = StoreConnection(address, prefix=f"cadenza/{job}")

    def current(self) -> str:
        """Return the name under which workers train now, or will; waits for the store.

        Raises:
            StoreLostError: It cannot be reached.
        """
        deadline = time.monotonic() + _STORE_S
        while True:
            try:
                return self._connection.call(self._unfinished)
            except StoreLostError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(_PAUSE_S)

    def after(self, name: str) -> str:
        """Return the name after one under which nobody can go on."""
        number = _number(name)
        try:
            found = self._connection.call(lambda store: store.compare_set(_KEY, str(number), str(number + 1)))
        except StoreLostError:
            return self._name(number + 1)
        return self._name(max(int(found), number + 1))

    def remember(self, name: str) -> None:
        """Write the current name into a store that was started again and has lost everything."""
        with contextlib.suppress(StoreLostError):
            self._connection.call(lambda store: store.compare_set(_KEY, "", str(_number(name))))

    def _unfinished(self, store: dist.Store) -> str:
        number = int(store.compare_set(_KEY, "", "1"))
        if dist.PrefixStore(str(number), store).check(["finished"]):
            number = int(store.compare_set(_KEY, str(number), str(number + 1)))
        return self._name(number)

    def _name(self, number: int) -> str:
        return f"{self._job}/{number}"


def _number(name: str) -> int:
    return int(name.rpartition("/")[2])

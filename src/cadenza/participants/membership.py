"""Who trains together, when workers may die, hang, come late and come back: agreed on in a store, round by round.

>>> from cadenza.participants.store import serve
>>> store = serve(host="127.0.0.1")  # in a process of its own, or in the launcher
>>> membership = join(f"127.0.0.1:{store.port}", worker=0, workers=1)
>>> membership.worker
0
>>> membership.close()
"""

from __future__ import annotations

import math
import os
import secrets
import time
from collections.abc import Mapping

from cadenza.errors import NotInitializedError, StoreLostError
from cadenza.participants.heartbeat import Heartbeat
from cadenza.participants.signing import Signer
from cadenza.participants.store import StoreConnection

__all__ = ["ACCEPT_ROLLBACK", "Membership", "join"]

ACCEPT_ROLLBACK = "CADENZA_ACCEPT_ROLLBACK"

_AGAIN_S = 0.1  # between two attempts to reach a store


class Membership:
    """A worker's place in a job; made by `join`.

    Attributes:
        worker: This worker's number.
        workers: How many are expected at the start.
        job: What tells this job from others that use the store.
        accepts_rollback: Whether rounds that nobody who is left has seen may be given up.
    """

    def __init__(
        self,
        address: str,
        worker: int,
        workers: int,
        *,
        job: str,
        secret: str | None,
        lease_s: float,
        wait_s: float,
        preparing: bool = False,
        accepts_rollback: bool = False,
    ) -> None:
        self.accepts_rollback = accepts_rollback
        self.worker, self.workers, self.job = worker, workers, job
        self.signer = Signer(job, secret=secret)
        self._address = address
        self._who = f"{worker} {secrets.token_hex(8)}"
        self.heartbeat = Heartbeat(self.connection(), worker, self.signer, lease_s=lease_s, preparing=preparing)
        deadline = time.monotonic() + wait_s
        while True:
            try:
                self.heartbeat.start()
                return
            except StoreLostError as error:
                if time.monotonic() >= deadline:
                    self.heartbeat.close()
                    told = f"{error} Nobody answered for {wait_s:g} s. Start it with python -m cadenza.membership."
                    raise StoreLostError(told) from None
            time.sleep(_AGAIN_S)

    def connection(self) -> StoreConnection:
        """Return a new connection to the store; a thread that waits on it keeps no other one waiting."""
        return StoreConnection(self._address, self.signer, who=self._who)

    def close(self) -> None:
        """Sign off: the others do not wait for this worker any more."""
        self.heartbeat.close()


def join(
    address: str | None = None,
    *,
    worker: int | None = None,
    workers: int | None = None,
    job: str | None = None,
    secret: str | None = None,
    lease_s: float = 1.0,
    wait_s: float = 30.0,
    preparing: bool = False,
    accept_rollback: bool | None = None,
) -> Membership:
    """Sign on as a worker of a job whose rounds may fail; pass the result to `attach`.

    Args:
        address: The store's "host:port"; by default that of ``CADENZA_STORE``.
        worker: This worker's number, its own among all that may ever train together; by default ``RANK``.
        workers: How many start together; by default ``WORLD_SIZE``. Others may join later under other numbers.
        job: The job's name, if several use one store; by default ``CADENZA_JOB``.
        secret: A word that only this job's workers know; by default ``CADENZA_SECRET``. Without it, anyone may join.
        lease_s: After so long without a heart-beat a worker counts as gone.
        wait_s: How long a store that is not there yet, or just being started again, is waited for.
        preparing: Whether it will take a while until `attach`: until then no round of the others waits for this worker.
        accept_rollback: Whether to go on from an older state if all that have seen the last rounds are gone, instead of
            waiting for them; one worker is enough. By default ``CADENZA_ACCEPT_ROLLBACK`` ("1").

    >>> join("nowhere", worker=0, workers=1)
    Traceback (most recent call last):
      ...
    ValueError: The address of a store is "host:port", such as "10.0.0.1:29400"; got 'nowhere'.
    """
    known = os.environ
    return Membership(
        address or _told(known, "CADENZA_STORE", "address"),
        _number("worker", _told(known, "RANK", "worker") if worker is None else worker, 0),
        _number("workers", _told(known, "WORLD_SIZE", "workers") if workers is None else workers, 1),
        job=job or known.get("CADENZA_JOB", "job"),
        secret=secret if secret is not None else known.get("CADENZA_SECRET"),
        lease_s=_lease(lease_s),
        wait_s=wait_s,
        preparing=preparing,
        accepts_rollback=known.get(ACCEPT_ROLLBACK) == "1" if accept_rollback is None else accept_rollback,
    )


def _told(environment: Mapping[str, str], name: str, argument: str) -> str:
    if name not in environment:
        raise NotInitializedError(
            f"Under skip_round and shrink, workers meet in a store that outlives them, and {argument} is not known: "
            f"set {name}, or pass membership=cadenza.join({argument}=…) to attach()."
        )
    return environment[name]


def _number(name: str, value: int | str, least: int) -> int:
    number = int(value)
    if number < least:
        raise ValueError(f"{name} is a whole number of at least {least}; got {value!r}.")
    return number


def _lease(seconds: float) -> float:
    if not math.isfinite(seconds) or seconds <= 0:
        raise ValueError(f"lease_s is a positive number of seconds; got {seconds!r}.")
    return seconds

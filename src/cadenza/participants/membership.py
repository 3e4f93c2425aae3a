"""Who trains together, when workers may die, hang, come late and come back: agreed on in a store, round by round.

>>> from cadenza.participants.store import serve
>>> store = serve(host="127.0.0.1")  # in a process of its own, or in the launcher
>>> membership = join(f"127.0.0.1:{store.port}", worker=0, workers=1)
>>> membership.worker
0
>>> membership.close()
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from cadenza.errors import CadenzaError, DisagreementError, ReplicaBrokenError, StoreLostError
from cadenza.participants.addresses import local_end, parse_address
from cadenza.participants.heartbeat import Heartbeat
from cadenza.participants.island import Island, meet_mates
from cadenza.participants.join_arguments import (
    accepts_rollback,
    from_environment,
    job_name,
    lease,
    site_of,
    wait,
    worker_number,
    workers_count,
)
from cadenza.participants.signing import Signer, shared_secret
from cadenza.participants.store import StoreConnection
from cadenza.participants.worker_lists import in_ranges

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Membership", "join"]

_AGAIN_S = 0.1  # between two attempts to reach a store


class Membership:
    """A worker's place in a job; made by `join`.

    Attributes:
        worker: This worker's number.
        workers: How many are expected at the start.
        job: What tells this job from others that use the store.
        site: Where this worker is, as it was given.
        accepts_rollback: Whether rounds that nobody who is left has seen may be given up.
        island: The ranks that are this worker: one, or those of a replica.
        taken: Whether a synchronizer has it.
        closed: Whether it has signed off.
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
        site: str = "",
        island: Island | None = None,
    ) -> None:
        self.accepts_rollback, self.site = accepts_rollback, site
        self.taken = self.closed = False
        self.worker, self.workers, self.job = worker, workers, job
        self.signer = Signer(job, secret=secret)
        self._address = address
        self._who = f"{worker} {secrets.token_hex(8)}"
        self.island = island or Island()
        start = partial(self._start, lease_s=lease_s, wait_s=wait_s, preparing=preparing)
        try:
            self._compare_mates(lease_s, secret)
            incarnation = self.island.loop.tell(lambda: start(incarnation=None))
        except ReplicaBrokenError:
            raise
        except CadenzaError:  # all ranks raise it: who ends first must not cut off what is still being said
            self.island.leave()
            raise
        if self.island.rank:
            start(incarnation=incarnation)
        self.heartbeat.withheld = lambda: self.island.stopped
        self.island.on_break(self.heartbeat.give_up)

    def _compare_mates(self, lease_s: float, secret: str | None) -> None:
        """Raise, on all ranks of a replica, if they do not join as one worker of one job."""
        given = {"worker": self.worker, "workers": self.workers, "job": self.job, "site": self.site}
        word = Signer("", secret=secret).sign(b"", "mates").hex()  # tells secrets apart, and does not tell them
        _compare(self.island, {**given, "lease_s": float(lease_s), "secret": word})

    def _start(self, *, incarnation: str | None, lease_s: float, wait_s: float, preparing: bool) -> str:
        """Begin to beat, or, with an incarnation, to listen; return the incarnation."""
        self.heartbeat = Heartbeat(
            self.connection(), self.worker, self.signer, lease_s=lease_s, preparing=preparing, incarnation=incarnation
        )
        self.heartbeat.site = self.site
        try:
            self._sign_on(wait_s)
        except BaseException:
            self.heartbeat.close()
            raise
        return self.heartbeat.incarnation

    def _sign_on(self, wait_s: float) -> None:
        deadline = time.monotonic() + wait_s
        while True:
            try:
                return self.heartbeat.start()
            except StoreLostError as error:
                if time.monotonic() >= deadline:
                    raise StoreLostError(
                        f"{error} Nobody answered for {wait_s:g} s. Start it with python -m cadenza.membership."
                    ) from None
            time.sleep(_AGAIN_S)

    def connection(self) -> StoreConnection:
        """Return a new connection to the store; a thread that waits on it keeps no other one waiting."""
        return StoreConnection(self._address, self.signer, who=self._who)

    def close(self) -> None:
        """Sign off: the others do not wait for this worker any more."""
        self.closed = True
        self.heartbeat.close()
        self.island.close()


def join(
    address: str | None = None,
    *,
    worker: int | None = None,
    workers: int | None = None,
    replica: dist.ProcessGroup | DeviceMesh | None = None,
    job: str | None = None,
    secret: str | None = None,
    lease_s: float = 1.0,
    wait_s: float = 30.0,
    preparing: bool = False,
    accept_rollback: bool | None = None,
    site: str | Sequence[str] | None = None,
) -> Membership:
    """Sign on as a worker of a job whose rounds may fail; pass the result to `attach`.

    Args:
        address: The store's "host:port"; by default that of ``CADENZA_STORE``.
        worker: This worker's number, its own among all that may ever train together; by default ``CADENZA_WORKER``, or
            else ``RANK``. With `replica`, that of the whole replica.
        workers: How many start together; by default ``CADENZA_WORKERS``, or else ``WORLD_SIZE``. Others may join later
            under other numbers.
        replica: The ranks that hold one copy of the model together, by DDP or FSDP2: their process group, or a
            DeviceMesh of one dimension. All of them call this, with the same arguments. None: this process alone.
        job: The job's name, if several use one store; by default ``CADENZA_JOB``.
        secret: A word that only this job's workers know; by default ``CADENZA_SECRET``. Without it, anyone may join.
        lease_s: After so long without a heart-beat a worker counts as gone.
        wait_s: How long a store that is not there yet, or just being started again, is waited for.
        preparing: Whether it will take a while until `attach`: until then no round of the others waits for this worker.
        accept_rollback: Whether to go on from an older state if all that have seen the last rounds are gone, instead of
            waiting for them; one worker is enough. By default ``CADENZA_ACCEPT_ROLLBACK`` ("1", "true" or "yes").
        site: Where this worker is, for strategies of several levels: workers of one site hold the inner rounds
            together. With more than two levels a path from the largest place to the smallest, such as "eu/rack3". By
            default ``CADENZA_SITE``.

    >>> join("nowhere", worker=0, workers=1)
    Traceback (most recent call last):
      ...
    ValueError: The address of a store is "host:port", such as "10.0.0.1:29400"; got 'nowhere'.
    """
    # In a replica torch's numbers count its ranks, not the workers.
    alone = replica is None
    address = address or from_environment("address", "CADENZA_STORE")
    number = from_environment("worker", "CADENZA_WORKER", *["RANK"] * alone) if worker is None else worker
    count = from_environment("workers", "CADENZA_WORKERS", *["WORLD_SIZE"] * alone) if workers is None else workers
    host, _ = parse_address(address)
    make = partial(
        Membership,
        address,
        worker_number(number),
        workers_count(count),
        job=job_name(job),
        secret=shared_secret(secret),
        lease_s=lease(lease_s),
        wait_s=wait(wait_s),
        preparing=preparing,
        accepts_rollback=accepts_rollback(accept_rollback),
        site=site_of(site),
    )
    if replica is None:
        return make()
    island = meet_mates(replica, host=local_end(host), lease_s=lease_s)
    try:
        return make(island=island)
    except BaseException:
        island.close()
        raise


def _compare(island: Island, given: Mapping[str, object]) -> None:
    """Raise, on all ranks of a replica, if they were given different things."""
    said = [json.loads(word) for word in island.loop.exchange(json.dumps(given))]
    differences = [text for name in given if (text := _difference(island, name, [one[name] for one in said]))]
    if differences:
        raise DisagreementError(
            f"The ranks of this replica do not join as one worker: {'; '.join(differences)}. Give cadenza.join "
            "the same arguments, or the same environment, on all ranks of a replica."
        )


def _difference(island: Island, name: str, values: Sequence[object]) -> str:
    """Say which ranks of a replica were given which value, if it is not the same on all."""
    ranks: dict[str, list[int]] = {}
    for rank, value in zip(island.ranks, values, strict=True):
        ranks.setdefault(repr(value), []).append(rank)
    if len(ranks) == 1:
        return ""
    if name == "secret":
        return "secret is not the same on all"
    return f"{name} is " + ", ".join(f"{value} on {_name_ranks(places)}" for value, places in ranks.items())


def _name_ranks(ranks: Sequence[int]) -> str:
    """Name ranks in a sentence.

    >>> _name_ranks([3]), _name_ranks([0, 1, 2, 5])
    ('rank 3', 'ranks 0-2 5')
    """
    return f"rank{'s' * (len(ranks) > 1)} {in_ranges(ranks)}"

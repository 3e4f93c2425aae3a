"""Many workers as threads of this process: to try a strategy in a notebook, and to test without processes.

>>> import torch, cadenza, cadenza.testing
>>> def train(worker, strategy):
...     model = torch.nn.Linear(2, 1)
...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
...     sync = cadenza.attach(model, optimizer, strategy)
...     for _ in range(8):
...         model(torch.randn(4, 2, generator=worker.generator)).square().mean().backward()
...         optimizer.step(); optimizer.zero_grad()
...         sync.step()
...     sync.finish()
...     return model.weight.detach()
>>> with cadenza.testing.workers(4) as pool:
...     weights = pool.run(train, cadenza.diloco(period=4))
>>> all(torch.equal(weights[0], other) for other in weights)
True
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from cadenza.participants.membership import Membership, join
from cadenza.participants.private_store.server import PrivateStoreServer
from cadenza.participants.signing import shared_secret
from cadenza.participants.store import serve
from cadenza.transports.group import Group, use_group
from cadenza.transports.loopback import LoopbackHub

__all__ = ["Worker", "WorkerPool", "workers"]

P = ParamSpec("P")
T = TypeVar("T")


@dataclass
class Worker:
    """One of the threads of `WorkerPool.run`; it gets this as its first argument.

    Attributes:
        rank: Its number, from 0.
        workers: How many there are.
        group: Its place among them. `cadenza.attach` finds it by itself.
        generator: Random numbers of its own, the same in every run. Torch's global ones are shared by all threads, in
            whatever order they come: build a model before the run, and `copy.deepcopy` it in each worker.

    >>> with workers(2) as pool:
    ...     pool.run(lambda worker: (worker.rank, worker.workers, torch.rand((), generator=worker.generator).item()))
    [(0, 2, 0.49...), (1, 2, 0.75...)]
    """

    rank: int
    workers: int
    group: Group
    generator: torch.Generator
    _join: Callable[..., Membership] = field(repr=False)

    def membership(self, **options: Any) -> Membership:
        """Join the elastic job of this run, for strategies with `skip_round` or `shrink`; pass the result to `attach`.

        Workers then meet over Gloo on 127.0.0.1. The pool serves their store, and signs a worker off when its function
        ends. `options` are those of `cadenza.join`.

        >>> with workers(2) as pool:
        ...     pool.run(lambda worker: worker.membership(lease_s=0.5).worker)
        [0, 1]
        """
        return self._join(**{"worker": self.rank, "workers": self.workers, **options})


class WorkerPool:
    """Runs functions on several threads, each of which is a worker; made by `workers`.

    >>> with workers(3) as pool:
    ...     pool.run(lambda worker, word: word * worker.rank, "la")
    ['', 'la', 'lala']
    """

    def __init__(self, count: int, *, timeout_s: float, hosts: Sequence[str] | None) -> None:
        self._count = count
        self._timeout_s = timeout_s
        self._hosts = hosts
        self._store: dist.TCPStore | PrivateStoreServer | None = None
        self._serving = threading.Lock()
        self._runs = 0

    def run(self, function: Callable[Concatenate[Worker, P], T], *args: P.args, **kwargs: P.kwargs) -> list[T]:
        """Return what ``function(worker, *args, **kwargs)`` gives on each worker, in rank order.

        Every run starts anew: its workers do not meet those of an earlier one. Torch uses one thread for each worker,
        as torchrun has it for each rank.

        Raises:
            BaseException: What the first worker to fail has raised, with the others' errors in its notes. They are
                woken up where they wait for the failed one, and all have ended when this is raised.
        """
        self._runs += 1
        hub = LoopbackHub(self._count, timeout_s=self._timeout_s, hosts=self._hosts)
        with _one_thread_each():
            return _Run(
                hub, lambda worker: function(worker, *args, **kwargs), partial(self._join, self._runs)
            ).results()

    def close(self) -> None:
        """Let the store go."""
        self._store = None

    def _join(self, run: int, **options: Any) -> Membership:
        with self._serving:
            self._store = self._store or serve(host="127.0.0.1", secret=shared_secret())
        return join(f"127.0.0.1:{self._store.port}", **{"job": f"run {run}", **options})


class _Run(Generic[T]):
    """One call of a function on every worker."""

    def __init__(self, hub: LoopbackHub, function: Callable[[Worker], T], join_job: Callable[..., Membership]) -> None:
        self._hub = hub
        self._function = function
        self._join_job = join_job
        self._found: dict[int, T] = {}
        self._errors: dict[int, BaseException] = {}  # in the order in which the workers failed

    def results(self) -> list[T]:
        threads = [
            threading.Thread(target=self._work, args=(rank,), name=f"cadenza worker {rank}", daemon=True)
            for rank in self._hub.ranks
        ]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except BaseException:  # Ctrl-C: whoever waits for another stops waiting
            for rank in self._hub.ranks:
                self._hub.leave(rank, failure="The run was interrupted.")
            for thread in threads:
                thread.join()
            raise
        if self._errors:
            raise self._first_error()
        return [self._found[rank] for rank in self._hub.ranks]

    def _work(self, rank: int) -> None:
        group = self._hub.group(rank)
        failure = None
        try:
            with ExitStack() as after, use_group(group):
                self._found[rank] = self._function(self._worker(group, after))
        except BaseException as error:
            self._errors[rank] = error
            failure = f"Worker {rank} failed: {type(error).__name__}: {error}"
        finally:
            self._hub.leave(rank, failure=failure)

    def _worker(self, group: Group, after: ExitStack) -> Worker:
        def join_job(**options: Any) -> Membership:
            membership = self._join_job(**options)
            after.callback(membership.close)  # a failed worker must not go on beating
            return membership

        generator = torch.Generator().manual_seed(group.rank)
        return Worker(group.rank, len(group.ranks), group, generator, join_job)

    def _first_error(self) -> BaseException:
        (rank, first), *others = self._errors.items()
        first.add_note(f"This was raised by worker {rank} of {len(self._hub.ranks)}, the first to fail.")
        for other, error in others:
            first.add_note(f"Then worker {other} failed:\n" + "".join(traceback.format_exception(error)))
        return first


@contextmanager
def workers(count: int, *, timeout_s: float = 20.0, hosts: Sequence[str] | None = None) -> Iterator[WorkerPool]:
    """Give a pool of workers that are threads of this process.

    Args:
        count: How many.
        timeout_s: How long a worker waits for another before it raises.
        hosts: The name of the host on which each worker pretends to be, for strategies with groups of a host; by
            default all are on one.

    >>> import cadenza
    >>> with workers(4, hosts=["north", "north", "south", "south"]) as pool:
    ...     pool.run(lambda worker: worker.group.host_names()[worker.rank])
    ['north', 'north', 'south', 'south']
    """
    if isinstance(count, bool) or not hasattr(count, "__index__") or count < 1:
        raise ValueError(f"A pool has a whole number of workers, at least 1; got {count!r}.")
    if not timeout_s > 0:
        raise ValueError(f"timeout_s is a positive number of seconds; got {timeout_s!r}.")
    if hosts is not None and len(hosts) != count:
        raise ValueError(f"hosts names a host for each of the {count} workers; got {len(hosts)} names.")
    pool = WorkerPool(count, timeout_s=timeout_s, hosts=hosts)
    try:
        yield pool
    finally:
        pool.close()


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """Let torch compute on one thread for each worker: more would stand in each other's way, and round differently."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)

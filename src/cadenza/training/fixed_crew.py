"""Workers in a process group: all are there from the first step to the last, or the run fails.

>>> with fixed_crew(Config()) as crew:  # a process that no launcher started is a run's only worker
...     crew.worker, crew.workers, crew.decide("name", lambda: "first").answer
(0, 1, 'first')
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from cadenza.checkpoint.selection import select_whole
from cadenza.common.process_groups import control_device, resolve, store_of
from cadenza.errors import CadenzaError, StoreLostError, UsageError
from cadenza.participants.membership import Membership
from cadenza.training.config import Config
from cadenza.training.connections import DirectConnection
from cadenza.training.crew import Decision, describe_error
from cadenza.training.exit_records import NO_RECORD, LastRecord
from cadenza.training.held_out_shares import Evaluation, Share, Shares, means
from cadenza.training.runs import Run

__all__ = ["FixedCrew", "fixed_crew"]


@contextmanager
def fixed_crew(config: Config) -> Iterator[FixedCrew]:
    """Be in a process group inside the block: the one that is there, the launcher's, or one of this process alone."""
    with _process_group(config):
        yield FixedCrew()


class FixedCrew:
    """The workers of the default process group; a `cadenza.training.crew.Crew`."""

    leaves_on_sigterm = False
    select = staticmethod(select_whole)

    def __init__(self) -> None:
        self.worker, self.workers = dist.get_rank(), dist.get_world_size()
        self.membership: Membership | None = None
        self.uses_cuda = "nccl" in dist.get_backend_config()
        self.connection = DirectConnection(dist.PrefixStore("cadenza/train", store_of(resolve(None))))
        host = socket.gethostname()
        self.connection.call(lambda store: store.set(_host_key(self.worker), host))

    def connect(self) -> DirectConnection:
        return self.connection.clone()

    @property
    def connected(self) -> bool:
        return True

    def silent(self) -> set[int]:
        return set()

    def last_record(self, run: Run) -> LastRecord:
        return NO_RECORD  # all go on from a checkpoint, which has the counts

    def hosts(self) -> list[str]:
        keys = [_host_key(worker) for worker in range(self.workers)]
        return self.connection.call(lambda store: [store.get(key).decode() for key in keys])

    def decide(self, question: str, answer: Callable[[], str]) -> Decision:
        """Let worker 0 answer; the others wait for it."""
        key = f"decided/{question}"
        if self.worker != 0:
            return Decision(self.connection.call(lambda store: store.get(key).decode()), mine=False)
        decided = answer()
        self.connection.call(lambda store: store.set(key, decided))
        return Decision(decided, mine=True)

    def gather(self) -> None:
        dist.barrier()

    def shares(self, source: str) -> Shares:
        return _GatheredShares(self.worker, source)

    def add_up(self, figures: Sequence[float], *, workers: int) -> list[float]:
        return _sum_over_workers(figures)

    def takes_over(self, is_written: Callable[[], bool]) -> bool:
        return False

    def explain(self, error: BaseException) -> str:
        """Return the error; if another worker's came first, also that this one only followed."""
        text = describe_error(error)
        me = str(self.worker)
        try:
            first = self.connection.call(lambda store: store.compare_set("failed", "", me).decode())
        except StoreLostError:
            return text
        return text if first == me else f"Stopped, because worker {first} failed. ({text})"


class _GatheredShares:
    """Gathers the shares of held-out metrics: all workers measure at the same step, and all know what came of it."""

    def __init__(self, worker: int, source: str) -> None:
        self._worker, self._source = worker, source
        self._found: list[Evaluation] = []

    def post(self, step: int, members: tuple[int, ...], share: Share) -> None:
        shares: list[Share] = _gather(share)
        metrics = means(shares)
        if "loss" not in metrics:
            count = sum(one["loss"][1] for one in shares)
            raise UsageError(
                f"{self._source} has evaluated nothing: the counts of all {len(members)} workers add up to {count:g}."
            )
        self._found.append(Evaluation(step, metrics, write=self._worker == min(members)))

    def collect(self, *, wait: bool = False) -> list[Evaluation]:
        found, self._found = self._found, []
        return found


def _sum_over_workers(figures: Sequence[float]) -> list[float]:
    total = torch.tensor(figures, dtype=torch.float64, device=control_device(resolve(None)))
    dist.all_reduce(total)
    summed: list[float] = total.tolist()
    return summed


def _gather(value: Any) -> list[Any]:
    """Return the values of all workers, which JSON can hold: nothing that comes over a network is unpickled."""
    device = control_device(resolve(None))
    text = torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8, device=device)
    longest = torch.tensor(len(text), device=device)
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    mine = torch.full((int(longest),), ord(" "), dtype=torch.uint8, device=device)
    mine[: len(text)] = text
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(found, mine)
    return [json.loads(bytes(one.tolist())) for one in found]


def _host_key(worker: int) -> str:
    return f"host/{worker}"


@contextmanager
def _process_group(config: Config) -> Iterator[None]:
    if dist.is_initialized():
        yield
        return
    backend = _backend(config)
    try:
        if "RANK" in os.environ:
            dist.init_process_group(backend)
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    except (RuntimeError, ValueError) as error:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise CadenzaError(f"The workers could not come together at {where} by {backend}: {error}") from error
    try:
        yield
    finally:
        dist.destroy_process_group()


def _backend(config: Config) -> str:
    wanted = config.launch.backend
    if wanted == "nccl" or (wanted == "auto" and torch.cuda.is_available() and dist.is_nccl_available()):
        return "cpu:gloo,cuda:nccl"
    return "gloo"

"""Workers that may die, come late and come back: they share a store that outlives them, and wait for nobody.

Held-out losses are put together in the store, a checkpoint counts without those that were not there, and all stop at
one step if they can.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from cadenza.checkpoint.selection import select_any_part
from cadenza.participants.membership import Membership, join
from cadenza.participants.store import StoreConnection
from cadenza.training.config import Config
from cadenza.training.crew import Decision, describe_error
from cadenza.training.exit_records import LastRecord, last_record
from cadenza.training.held_out_shares import Shares, StoreShares
from cadenza.training.runs import Run

__all__ = ["ElasticCrew", "elastic_crew"]

_RESULTS_S = 10.0  # for the leader to write what came of the run; then the next one does
_LOOK_S = 0.1


@contextmanager
def elastic_crew(config: Config) -> Iterator[ElasticCrew]:
    """Be a worker of a job inside the block, as the launcher's environment says."""
    faults = config.faults
    membership = join(
        lease_s=faults.lease_s,
        wait_s=faults.first_s,
        preparing=True,
        accept_rollback=True if faults.accept_rollback else None,  # else as the environment says
    )
    try:
        yield ElasticCrew(config, membership)
    finally:
        membership.close()


class ElasticCrew:
    """The workers of a job with a store of its own; a `cadenza.training.crew.Crew`."""

    select = staticmethod(select_any_part)

    def __init__(self, config: Config, membership: Membership) -> None:
        self.worker, self.workers = membership.worker, _most_workers(config, membership)
        self.membership: Membership | None = membership
        self.uses_cuda = config.launch.backend != "gloo" and torch.cuda.is_available()
        self.leaves_on_sigterm = config.launch.nnodes != "1"
        self.connection = membership.connection()
        self._membership = membership
        self._grace_s = config.faults.grace_s

    def connect(self) -> StoreConnection:
        return self._membership.connection()

    @property
    def connected(self) -> bool:
        return self._membership.heartbeat.connected

    def silent(self) -> set[int]:
        return self._membership.heartbeat.silent()

    def last_record(self, run: Run) -> LastRecord:
        """Return where this worker's earlier process stood; the others have gone on counting the seconds."""
        elapsed = max((last_record(path).elapsed for path in run.metrics.glob("*.jsonl")), default=0.0)
        return replace(last_record(run.metrics_of(self.worker)), elapsed=elapsed)

    def hosts(self) -> list[str]:
        return []

    def decide(self, question: str, answer: Callable[[], str]) -> Decision:
        """Let the worker that is the first to answer decide."""
        mine = f"{self.worker} {answer()}"
        decided = self.connection.call(lambda store: store.compare_set(question, "", mine)).decode()
        return Decision(decided.partition(" ")[2], mine=decided == mine)

    def gather(self) -> None:
        """Wait for nobody: who is late comes to a later round."""

    def shares(self, source: str) -> Shares:
        return StoreShares(self.connection, self.worker, patience_s=self._grace_s)

    def add_up(self, figures: Sequence[float], *, workers: int) -> list[float]:
        """Return the sums as they are if every worker has done what this one has."""
        return [workers * figure for figure in figures]

    def takes_over(self, is_written: Callable[[], bool]) -> bool:
        """Wait for the leader to write the results; it may have died with its last step done."""
        deadline = time.monotonic() + _RESULTS_S
        while not is_written():
            if time.monotonic() > deadline:
                return True
            time.sleep(_LOOK_S)
        return False

    def explain(self, error: BaseException) -> str:
        return describe_error(error)


def _most_workers(config: Config, membership: Membership) -> int:
    """Return among how many workers the data is shared out: also those that may come later have shares of their own."""
    nodes = int(config.launch.nnodes.rpartition(":")[2])
    return max(membership.workers, membership.worker + 1, nodes * config.launch.workers)

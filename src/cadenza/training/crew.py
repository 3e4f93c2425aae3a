"""The workers that train a run together, as one of them sees the others.

There are two kinds. A *fixed* crew (`cadenza.training.fixed_crew`) is a process group: all workers are always there,
and if one fails, all do. The workers of an *elastic* crew (`cadenza.training.elastic_crew`) may die, come late and come
back; nobody is waited for except in rounds. The loop does not know which it has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from cadenza.checkpoint.selection import Selector
from cadenza.errors import CadenzaError
from cadenza.participants.membership import Membership
from cadenza.training.connections import Connection
from cadenza.training.exit_records import LastRecord
from cadenza.training.held_out_shares import Shares
from cadenza.training.runs import Run

__all__ = ["Crew", "Decision", "describe_error"]


@dataclass(frozen=True)
class Decision:
    """What one worker has decided for all, and whether this worker is the one."""

    answer: str
    mine: bool


class Crew(Protocol):
    """One worker's view of all workers of a run."""

    @property
    def worker(self) -> int:
        """This worker's number."""

    @property
    def workers(self) -> int:
        """Among how many workers the data is shared out."""

    @property
    def membership(self) -> Membership | None:
        """What `cadenza.attach` needs beside the process group, if anything."""

    @property
    def uses_cuda(self) -> bool:
        """Whether the model goes to a GPU."""

    @property
    def leaves_on_sigterm(self) -> bool:
        """Whether a worker that gets SIGTERM leaves while the others go on."""

    @property
    def connection(self) -> Connection:
        """The training loop's connection to the store that all share."""

    @property
    def select(self) -> Selector:
        """What a checkpoint needs to be gone on from, and which files a worker takes."""

    def connect(self) -> Connection:
        """Return one more connection, for another thread."""

    @property
    def connected(self) -> bool:
        """Whether the store that all share answers."""

    def silent(self) -> set[int]:
        """Return the workers that are known to be gone."""

    def last_record(self, run: Run) -> LastRecord:
        """Return where an earlier process of this worker stood, if training has gone on since."""

    def hosts(self) -> list[str]:
        """Return the host of every worker; nothing if that changes while the run goes on."""

    def decide(self, question: str, answer: Callable[[], str]) -> Decision:
        """Return one worker's answer to a question, the same on all workers that start together."""

    def gather(self) -> None:
        """Wait until all workers that start together have come to this point."""

    def shares(self, source: str) -> Shares:
        """Return how held-out losses are put together; `source` names the function that measures them."""

    def add_up(self, figures: Sequence[float], *, workers: int) -> list[float]:
        """Return figures of this worker summed over all, as well as that can be known; all workers call it."""

    def takes_over(self, is_written: Callable[[], bool]) -> bool:
        """Say whether this worker, which does not lead, writes a run's results because the leader has not."""

    def explain(self, error: BaseException) -> str:
        """Return what this worker's metrics say of the error that ends it."""


def describe_error(error: BaseException) -> str:
    """Return an error in a line; the kind of Cadenza's own is no news to users.

    >>> describe_error(ValueError("no")), describe_error(CadenzaError("Worker 1 is gone."))
    ('ValueError: no', 'Worker 1 is gone.')
    """
    return str(error) if isinstance(error, CadenzaError) else f"{type(error).__name__}: {error}"

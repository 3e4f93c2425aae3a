"""The supervisor of one node's elastic workers: one that dies is started again, alone, while the others train on.

Torch's elastic agent ends all workers of a node when one dies, so each worker has a context of its own here. `cadenza
train` starts the supervisor as ``python -m cadenza.cli.supervisor PLAN`` with a `SupervisorPlan` as JSON. It also keeps
the store that the workers share running, unless that is elsewhere: a store that is started again is empty, and the
workers write into it again what they know.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from torch.distributed.elastic.multiprocessing import PContext

from cadenza.cli.exit_codes import BAD_INPUT, FULL_DISK, NOBODY_LEFT
from cadenza.cli.job_names import JobNames
from cadenza.cli.parent_death import PARENT, SAVING_S, end_with_parent
from cadenza.cli.plans import SupervisorPlan, WorkerCommand
from cadenza.cli.store_keeper import StoreKeeper, StoreNotStartedError
from cadenza.cli.worker_processes import report_failures, report_problem, start_workers
from cadenza.errors import StoreLostError
from cadenza.participants.heartbeat import announce_death
from cadenza.participants.signing import Signer, shared_secret
from cadenza.participants.store import StoreConnection
from cadenza.training.exit_records import last_record, write_end, write_event
from cadenza.training.metrics import metrics_file

_POLL_S = 0.1
_MOST_BEGINNINGS = 10
_ASKED = (signal.SIGTERM, signal.SIGINT)  # to end; a worker that had only just begun is ended by them


class Supervisor:
    """Starts workers, and starts them again.

    Args:
        plan: Which workers.
        address: The store's "host:port".
        received: The signals that have come; whoever catches them adds to it at any moment. Once there is one, no
            worker is started any more, and those that run get it: they save and end.
    """

    def __init__(self, plan: SupervisorPlan, address: str, received: Sequence[int]) -> None:
        self._plan, self._received = plan, received
        self._commands = {command.worker: command for command in plan.commands}
        self._address = address
        self._names = JobNames(address, plan.job)
        self._begin_as(self._names.current())
        self._running: dict[int, PContext] = {}
        self._starts = dict.fromkeys(self._commands, 0)
        self._restarts = dict.fromkeys(self._commands, 0)
        self._finished: set[int] = set()
        self._anew = 0
        self._store_is_empty = False
        self._failures: dict[int, int] = {}
        self._passed_on = 0
        self._stopping_since = 0.0

    def run(self, keeper: StoreKeeper | None) -> bool:
        """Return when all have ended: whether some, and so the run, have ended well."""
        for worker in self._commands:
            self._start(worker)
        while self._running:
            self._pass_on_signals()
            if keeper is not None:
                self._look_after(keeper)
            for worker, context in list(self._running.items()):
                result = context.wait(0) if self._running.get(worker) is context else None
                if result is not None:
                    del self._running[worker]
                    self._handle_exit(worker, result.failures[0].exitcode if result.is_failed() else 0)
            self._end_the_slow()
            time.sleep(_POLL_S)
        if not self._finished:
            report_failures(self._failures)
        return bool(self._finished)

    def _pass_on_signals(self) -> None:
        """Give all workers the signals that have come since, each once.

        It is done here and not where signals are caught: there a worker that is just being started is not known yet.
        """
        while self._passed_on < len(self._received):
            number = self._received[self._passed_on]
            self._passed_on += 1
            self._stopping_since = self._stopping_since or time.monotonic()
            for context in self._running.values():
                for pid in context.pids().values():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, number)

    def _begin_as(self, job: str) -> None:
        self._job = job
        self._signer = Signer(job, secret=shared_secret())
        self._connection = StoreConnection(self._address, self._signer)

    def _start(self, worker: int) -> bool:
        """Start a worker, unless all were asked to end; return whether it was."""
        if self._received:
            return False
        command, attempt = self._commands[worker], self._starts[worker]
        self._starts[worker] += 1
        env = {
            **command.env,
            PARENT: str(os.getpid()),
            "CADENZA_STORE": self._address,
            "CADENZA_JOB": self._job,
        }
        started = WorkerCommand(worker, command.command, env)
        context = start_workers(f"worker {worker}", [started], Path(self._plan.logs), attempt=attempt)
        self._running[worker] = context
        _log(f"Worker {worker} was started as process {context.pids()[0]} (attempt {attempt}).")
        return True

    def _handle_exit(self, worker: int, code: int) -> None:
        """Decide what becomes of a worker that has ended."""
        _log(f"Worker {worker} ended with code {code}.")
        if code == 0:
            self._finished.add(worker)
            return
        if code == NOBODY_LEFT and self._begin_anew():
            return
        self._failures[worker] = code
        restarts, why = self._decide_restart(worker, code)
        self._record_exit(worker, code, restarts, why)
        if self._plan.eager or not restarts:
            self._announce_death(worker)
        if restarts:
            self._restarts[worker] += 1
            if not self._start(worker):
                write_end(self._metrics(worker), "lost", "All were asked to end before it was started again.")

    def _record_exit(self, worker: int, code: int, restarts: bool, why: str) -> None:
        """Write into a worker's metrics how it ended, and what comes of it."""
        metrics = self._metrics(worker)
        error = last_record(metrics).error if code > 0 else ""
        how = f"ended with code {code}" if code > 0 else f"was ended by {signal.Signals(-code).name}"
        status = "restarting" if restarts else "dead"
        write_event(metrics, f"Worker {worker} {how}; {why}." + (f" {error}" if error else ""), status=status)
        if not restarts:
            write_end(metrics, "lost", error or f"It {how}.")

    def _metrics(self, worker: int) -> Path:
        return Path(self._plan.metrics) / metrics_file(worker)

    def _begin_anew(self) -> bool:
        """Start all workers together, from their last checkpoint, in a place of the store that has no history.

        Also those that were given up: a beginning may need more workers than are left.
        """
        if self._received or self._finished or self._anew >= _MOST_BEGINNINGS:
            return False
        self._anew += 1
        self._begin_as(self._names.after(self._job))
        for context in self._running.values():
            context.close(signal.SIGKILL)
        self._running.clear()
        _log(f"All workers begin anew, as {self._job}.")
        for worker in self._commands:
            self._start(worker)
        return True

    def _decide_restart(self, worker: int, code: int) -> tuple[bool, str]:
        """Say whether a worker is started again, and why, or why not."""
        attempt, most = self._restarts[worker] + 1, self._plan.restarts
        if code in (BAD_INPUT, FULL_DISK) or self._received or self._finished or -code in _ASKED:
            return False, "it is not started again"
        if attempt > most:
            return False, f"it had been started again {_times(most)}, and the others go on without it"
        return True, f"it is started again, for the {_ordinal(attempt)} time of {most}"

    def _look_after(self, keeper: StoreKeeper) -> None:
        """Start the store again if it has ended; once it answers, write into it under which name the job goes on."""
        self._store_is_empty = keeper.restart_if_ended() or self._store_is_empty
        if self._store_is_empty and keeper.answers():
            self._store_is_empty = False
            self._names.remember(self._job)

    def _announce_death(self, worker: int) -> None:
        """Write into the store that a worker is gone, so that nobody waits for its heartbeat."""
        try:
            self._connection.call(lambda store: announce_death(store, self._signer, worker))
        except StoreLostError as error:
            _log(str(error))

    def _end_the_slow(self) -> None:
        """Kill workers that were asked to stop long ago."""
        if self._stopping_since and time.monotonic() - self._stopping_since > SAVING_S:
            for context in self._running.values():
                context.close(signal.SIGKILL)


def _times(count: int) -> str:
    """Return how often something happened.

    >>> _times(1), _times(3)
    ('once', '3 times')
    """
    return "once" if count == 1 else f"{count} times"


def _ordinal(number: int) -> str:
    """Return a number as it is said.

    >>> _ordinal(1), _ordinal(2), _ordinal(12)
    ('1st', '2nd', '12th')
    """
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th") if number % 100 not in (11, 12, 13) else "th"
    return f"{number}{ending}"


def _log(text: str) -> None:
    """Write into the supervisor's log, which is its standard error."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def main() -> int:
    """Keep the workers running, and report how it ended; the exit code is 0 if some have finished."""
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"  # the others are ours
    plan = SupervisorPlan.from_json(sys.argv[1])
    received: list[int] = []
    for number in _ASKED:
        signal.signal(number, lambda number, _: received.append(number))
    end_with_parent(signal.SIGTERM)
    os.environ[PARENT] = str(os.getpid())
    keeper = None
    try:
        keeper = StoreKeeper(plan.store, plan.host, plan.port) if plan.store else None
        address = keeper.address if keeper is not None else f"{plan.host}:{plan.port}"
        return 0 if Supervisor(plan, address, received).run(keeper) else 1
    except (StoreNotStartedError, StoreLostError) as error:
        report_problem(str(error))
        return 1
    finally:
        if keeper is not None:
            keeper.close()


if __name__ == "__main__":
    sys.exit(main())

"""The supervisor of one node's workers under `skip_round` and `shrink`: who dies is started again, alone.

Torch's elastic agent ends all workers of a node when one dies, so each worker has a context of its own here. `cadenza
train` starts the supervisor as ``python -m cadenza.cli.supervisor PLAN`` with a `Plan` as JSON, and reads lines of JSON
from its standard output. It also keeps the store in which the workers meet, unless that is elsewhere: a process of its
own that is started again on its port if it ends; the workers find it again and tell it what they know.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import PContext, start_processes

from cadenza.cli.agent import WorkerLogs, tell
from cadenza.cli.exit_codes import BAD_INPUT, NOBODY_LEFT
from cadenza.cli.leash import PARENT, SAVING_S, follow_parent
from cadenza.errors import StoreLostError
from cadenza.participants.store import Line
from cadenza.training.exit_records import last_record, write_end, write_event
from cadenza.training.metrics import metrics_file

__all__ = ["Plan", "Post"]

_POLL_S = 0.1
_STORE_S = 60.0  # for another node to start the store
_STORE_PAUSE_S = 0.5
_MOST_BEGINNINGS = 10
_ASKED = (signal.SIGTERM, signal.SIGINT)  # a worker that had only just begun was asked to end


@dataclass(frozen=True)
class Post:
    """A worker's place: its number, what is started there, and its environment."""

    worker: int
    command: list[str]
    env: dict[str, str]


@dataclass(frozen=True)
class Plan:
    """What a supervisor is to keep running.

    Attributes:
        metrics: The folder of the run's metrics.
        logs: The folder for what the workers print.
        job: What tells this job from others that use the store.
        host: The host of the store.
        port: Its port; 0 for a free one.
        store: The command that serves the store, without its port; empty if somebody else does.
        restarts: How often each worker is started again.
        eager: Whether the others are told at once when a worker died, or only when it will not come back.
    """

    posts: list[Post]
    metrics: str
    logs: str
    job: str
    host: str
    port: int
    store: list[str]
    restarts: int
    eager: bool

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Plan:
        told = json.loads(text)
        return cls(**{**told, "posts": [Post(**post) for post in told["posts"]]})


class StoreKeeper:
    """Keeps the store's process running, on one port."""

    def __init__(self, command: list[str], host: str, port: int) -> None:
        self._command, self._host, self._port = command, host, port
        self._started = time.monotonic()
        self._process = self._start()
        self._port = self._listen()

    @property
    def address(self) -> str:
        return f"{self._host}:{self._port}"

    def mind(self) -> bool:
        """Start it again if it has ended; return whether it had."""
        code = self._process.poll()
        if code is None or time.monotonic() - self._started < _STORE_PAUSE_S:
            return False
        tell(event="store", exitcode=code)
        self._started = time.monotonic()
        self._process = self._start()
        return True

    def serves(self) -> bool:
        """Say whether it has begun to, without waiting."""
        try:
            socket.create_connection((self._host, self._port), 0.1).close()
        except OSError:
            return False
        return True

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _start(self) -> subprocess.Popen[bytes]:
        command = [*self._command, "--host", self._host, "--port", str(self._port)]
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True)

    def _listen(self) -> int:
        """Return the port, which the process tells when it serves."""
        assert self._process.stdout is not None
        told = self._process.stdout.readline()
        if not told.strip():
            raise RuntimeError(f"The store could not be started at {self._host}:{self._port}.")
        return int(told)


class Beginnings:
    """The names of a job in the store: a new one whenever all workers begin together, from nothing or a checkpoint.

    So those who begin find nothing of what came before, also in a store that outlives many launches.
    """

    def __init__(self, address: str, job: str) -> None:
        self._job = job
        self._line = Line(address, prefix=f"cadenza/{job}")

    def current(self) -> str:
        """Return the name under which workers train now, or will; waits for the store.

        Raises:
            StoreLostError: It cannot be reached.
        """
        deadline = time.monotonic() + _STORE_S
        while True:
            try:
                return self._line.call(self._unfinished)
            except StoreLostError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(_STORE_PAUSE_S)

    def next(self, name: str) -> str:
        """Return the name after one that nobody has a future under; the same on all nodes."""
        number = self._number(name)
        try:
            told = self._line.call(lambda store: store.compare_set("beginning", str(number), str(number + 1)))
        except StoreLostError:
            return self._name(number + 1)
        return self._name(max(int(told), number + 1))

    def remember(self, name: str) -> None:
        """Tell a store that has lost everything."""
        with contextlib.suppress(StoreLostError):
            self._line.call(lambda store: store.compare_set("beginning", "", str(self._number(name))))

    def _unfinished(self, store: dist.Store) -> str:
        number = int(store.compare_set("beginning", "", "1"))
        past = dist.PrefixStore(str(number), store)
        if past.check(["finished"]):
            number = int(store.compare_set("beginning", str(number), str(number + 1)))
        return self._name(number)

    def _name(self, number: int) -> str:
        return f"{self._job}/{number}"

    def _number(self, name: str) -> int:
        return int(name.rpartition("/")[2])


class Supervisor:
    """Starts workers, and starts them again."""

    def __init__(self, plan: Plan, address: str) -> None:
        self._plan = plan
        self._posts = {post.worker: post for post in plan.posts}
        self._address = address
        self._beginnings = Beginnings(address, plan.job)
        self._job = self._beginnings.current()
        self._line = Line(address, prefix=f"cadenza/{self._job}")
        self._running: dict[int, PContext] = {}
        self._starts = dict.fromkeys(self._posts, 0)
        self._restarts = dict.fromkeys(self._posts, 0)
        self._finished: set[int] = set()
        self._anew = 0
        self._forgotten = False
        self._failures: dict[int, int] = {}
        self._stopping_since: float | None = None

    def run(self, keeper: StoreKeeper | None) -> bool:
        """Return when all have ended: whether some, and so the run, have ended well."""
        for worker in self._posts:
            self._start(worker)
        while self._running:
            if keeper is not None and keeper.mind():
                self._forgotten = True
            self._remind_the_store(keeper)
            for worker, context in list(self._running.items()):
                result = context.wait(0) if self._running.get(worker) is context else None
                if result is not None:
                    del self._running[worker]
                    self._take_leave(worker, result.failures[0].exitcode if result.is_failed() else 0)
            self._end_the_slow()
            time.sleep(_POLL_S)
        if not self._finished:
            tell(event="failed", failures=[{"worker": w, "exitcode": code} for w, code in self._failures.items()])
        return bool(self._finished)

    def stop(self, number: int, frame: FrameType | None) -> None:
        """Pass a signal on: the workers save and end, and none is started again."""
        self._stopping_since = self._stopping_since or time.monotonic()
        for context in self._running.values():
            for pid in context.pids().values():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)

    def _start(self, worker: int) -> None:
        post, attempt = self._posts[worker], self._starts[worker]
        self._starts[worker] += 1
        env = {
            **post.env,
            PARENT: str(os.getpid()),
            "RANK": str(worker),
            "CADENZA_STORE": self._address,
            "CADENZA_JOB": self._job,
            "TORCHELASTIC_RESTART_COUNT": str(attempt),
        }
        logs = WorkerLogs(Path(self._plan.logs))
        context = start_processes(f"worker {worker}", post.command[0], {0: tuple(post.command[1:])}, {0: env}, logs)
        self._running[worker] = context
        tell(event="started", worker=worker, pid=context.pids()[0], attempt=attempt)

    def _take_leave(self, worker: int, code: int) -> None:
        """Decide what becomes of a worker that has ended."""
        tell(event="ended", worker=worker, exitcode=code)
        if code == 0:
            self._finished.add(worker)
            return
        if code == NOBODY_LEFT and self._begin_anew():
            return
        self._failures[worker] = code
        metrics = Path(self._plan.metrics) / metrics_file(worker)
        error = last_record(metrics).error
        how = f"ended with code {code}" if code > 0 else f"was ended by {signal.Signals(-code).name}"
        again, why = self._prospect(worker, code)
        write_event(metrics, f"Worker {worker} {how}; {why}." + (f" {error}" if error and code > 0 else ""))
        if not again:
            write_end(metrics, "lost", error if error and code > 0 else f"It {how}.")
        if self._plan.eager or not again:
            self._tell_the_others(worker)
        if again:
            self._restarts[worker] += 1
            self._start(worker)

    def _begin_anew(self) -> bool:
        """Start all workers together, from their last checkpoint, in a place of the store that has no history.

        Also those that were given up: a beginning may need more workers than are left.
        """
        if self._stopping_since is not None or self._finished or self._anew >= _MOST_BEGINNINGS:
            return False
        self._anew += 1
        self._job = self._beginnings.next(self._job)
        self._line = Line(self._address, prefix=f"cadenza/{self._job}")
        for context in self._running.values():
            context.close(signal.SIGKILL)
        self._running.clear()
        tell(event="anew", job=self._job)
        for worker in self._posts:
            self._start(worker)
        return True

    def _prospect(self, worker: int, code: int) -> tuple[bool, str]:
        """Say whether a worker is started again, and why, or why not."""
        attempt, most = self._restarts[worker] + 1, self._plan.restarts
        if code == BAD_INPUT or self._stopping_since is not None or self._finished or -code in _ASKED:
            return False, "it is not started again"
        if attempt > most:
            return False, f"it had been started again {_times(most)}, and the others go on without it"
        return True, f"it is started again, for the {_ordinal(attempt)} time of {most}"

    def _remind_the_store(self, keeper: StoreKeeper | None) -> None:
        """Tell a store that was started again, once it serves, under which name the job goes on."""
        if self._forgotten and keeper is not None and keeper.serves():
            self._forgotten = False
            self._beginnings.remember(self._job)

    def _tell_the_others(self, worker: int) -> None:
        """Say in the store that a worker is gone, so that nobody waits for its heart-beat."""
        try:
            self._line.call(lambda store: store.set(f"beat/{worker}", f"seen to be gone at {time.time()} gone"))
        except StoreLostError as error:
            print(error, file=sys.stderr)

    def _end_the_slow(self) -> None:
        """Kill workers that were asked to stop long ago."""
        if self._stopping_since is not None and time.monotonic() - self._stopping_since > SAVING_S:
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


def main() -> int:
    """Keep the workers running, and tell how it ended; the exit code is 0 if some have finished."""
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"  # the others are ours
    plan = Plan.from_json(sys.argv[1])
    keeper = None
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    follow_parent(signal.SIGTERM)
    os.environ[PARENT] = str(os.getpid())
    address = f"{plan.host}:{plan.port}"
    if plan.store:
        try:
            keeper = StoreKeeper(plan.store, plan.host, plan.port)
        except RuntimeError as error:
            tell(event="apart", error=str(error))
            return 1
        address = keeper.address
    try:
        try:
            supervisor = Supervisor(plan, address)
        except StoreLostError as error:
            tell(event="apart", error=str(error))
            return 1
        if told:
            return 128 + told[0]
        signal.signal(signal.SIGTERM, supervisor.stop)
        return 0 if supervisor.run(keeper) else 1
    finally:
        if keeper is not None:
            keeper.close()


if __name__ == "__main__":
    sys.exit(main())

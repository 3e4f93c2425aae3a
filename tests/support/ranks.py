"""A pool of rank processes that lives as long as the pytest session: ``ranks.run(4, function)``.

Importing torch is what makes distributed suites slow, so a fork server imports it once and the ranks are forked from
it; a killed rank is replaced in milliseconds. Every call gets its own part of the store and a process group of its own.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch.distributed as dist

from support.rank_process import IDLE, RELEASE, Failure, Job, Result, serve

# How long the others may go on once one rank has failed; the call has failed anyway, so this decides nothing else.
GRACE_S = 3.0


class RankFailure(AssertionError):
    """A rank raised, died or hung; ``failures`` maps ranks to what was seen of them."""

    def __init__(self, failures: dict[int, Failure]) -> None:
        self.failures = failures
        parts = [f"rank {rank}: {failures[rank].type_name}\n{failures[rank].text}" for rank in sorted(failures)]
        super().__init__(f"{len(failures)} rank(s) failed\n" + "\n".join(parts))


def outcome(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """``("ok", value)``, or ``("error", type name, message)``: a result that all ranks can send home."""
    try:
        return ("ok", function(*args, **kwargs))
    except Exception as error:
        return ("error", type(error).__name__, str(error))


@dataclass
class _RankProcess:
    process: Any
    connection: Connection
    stack_path: Path
    busy: bool = True  # until it says IDLE

    def becomes_idle(self, within_s: float) -> bool:
        """Whether the rank has cleaned up after its last job, waiting for it if need be."""
        with suppress(EOFError, OSError):
            if self.busy and self.connection.poll(within_s):
                self.busy = self.connection.recv_bytes() != IDLE
        return not self.busy and self.process.is_alive()

    def stack(self) -> str:
        """The Python stacks of all the rank's threads, now."""
        before = self.stack_path.stat().st_size
        with suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGUSR1)
        deadline = time.monotonic() + 2
        text = ""
        while time.monotonic() < deadline:
            time.sleep(0.02)
            last, text = text, self.stack_path.read_text()[before:]
            if text and text == last:
                break
        return text or "(no stack: the process did not answer a signal)"

    def crash(self) -> str:
        """What faulthandler wrote when the process crashed, if it did."""
        return self.stack_path.read_text() if self.stack_path.exists() else ""

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()


class RankPool:
    """Rank processes kept between calls; used through the ``ranks`` fixture."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._directory = tempfile.TemporaryDirectory(prefix="rank-pool-")
        self._ranks: list[_RankProcess] = []
        self._started = 0
        self._calls = 0
        # One server for the session, in this process: it outlives any rank, and ranks connect to it only once (where
        # names cannot be resolved, torch waits seconds for a reverse look-up at some connections).
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        atexit.register(self.close)

    def run(
        self,
        world_size: int,
        function: Callable[..., Any],
        *args: Any,
        timeout_s: float = 60,
        group_timeout_s: float = 20,
        expect_dead: Collection[int] = (),
        init: bool = True,
        env: Mapping[str, str] | None = None,
        discard: bool = False,
        **kwargs: Any,
    ) -> list[Any]:
        """The results of ``function(*args, **kwargs)`` on ``world_size`` ranks, in rank order.

        Args:
            timeout_s: A rank that has not answered by then is killed, and reported with its stack.
            group_timeout_s: The timeout of the collectives of the default group.
            expect_dead: Ranks that must die in the call; their result is None.
            init: Without it no group is initialised, but ``init_process_group("gloo")`` finds the store by itself.
            env: Environment variables that the ranks get beside those of torchrun.
            discard: Use the processes no more after this call, since it leaves collectives hanging in them.
        """
        ranks = self._checkout(world_size)
        self._calls += 1
        call = _Call(ranks, frozenset(expect_dead))
        try:
            for index in range(world_size):
                job = Job(
                    call=self._calls,
                    rank=index,
                    world_size=world_size,
                    function=function,
                    args=args,
                    kwargs=kwargs,
                    store_port=self._store.port,
                    group_timeout_s=group_timeout_s,
                    init=init,
                    env=dict(env or {}),
                )
                ranks[index].busy = True
                # Functions are found by importing their module, so the rank needs this process's path before the job.
                ranks[index].connection.send_bytes(pickle.dumps((sys.path, pickle.dumps(job))))
            call.collect(timeout_s)
        finally:
            if call.complete and not discard:
                for rank in ranks:
                    rank.connection.send_bytes(RELEASE)
            else:  # also after Ctrl-C: whoever is in an unknown state is replaced at the next call
                self._discard(ranks)
        if call.failures:
            raise RankFailure(call.failures)
        return [pickle.loads(call.payloads[i]) if i in call.payloads else None for i in range(world_size)]

    @property
    def pids(self) -> list[int]:
        """The process ids of the ranks that exist now."""
        return [rank.process.pid for rank in self._ranks]

    def close(self) -> None:
        """End every rank."""
        atexit.unregister(self.close)
        self._discard(self._ranks)
        self._directory.cleanup()

    def _checkout(self, world_size: int) -> list[_RankProcess]:
        deadline = time.monotonic() + GRACE_S
        self._discard([r for r in self._ranks[:world_size] if not r.becomes_idle(max(0, deadline - time.monotonic()))])
        while len(self._ranks) < world_size:
            self._ranks.append(self._start())
        for rank in self._ranks[:world_size]:
            assert rank.becomes_idle(within_s=60), "a new rank process did not come up"
        return self._ranks[:world_size]

    def _start(self) -> _RankProcess:
        self._start_fork_server()
        ours, theirs = self._context.Pipe()
        stack_path = Path(self._directory.name) / f"{self._started}.stack"
        self._started += 1
        process = self._context.Process(target=serve, args=(theirs, str(stack_path), self._store.port), daemon=True)
        process.start()
        theirs.close()
        return _RankProcess(process, ours, stack_path)

    def _start_fork_server(self) -> None:
        if self._started:
            return
        # The fork server is a new interpreter: it finds the tests' and Cadenza's modules where this one does.
        path = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        try:
            self._context.set_forkserver_preload(["support.rank_preload", "support.rank_process", "pytest"])
            forkserver.ensure_running()
        finally:
            os.environ.pop("PYTHONPATH")
            if path is not None:
                os.environ["PYTHONPATH"] = path

    def _discard(self, ranks: list[_RankProcess]) -> None:
        for rank in ranks[:]:
            self._ranks.remove(rank)
            rank.kill()


@dataclass
class _Call:
    """One call's answers as they come in."""

    ranks: list[_RankProcess]
    expect_dead: frozenset[int]
    payloads: dict[int, bytes] = field(default_factory=dict)
    failures: dict[int, Failure] = field(default_factory=dict)
    dead: set[int] = field(default_factory=set)

    @property
    def complete(self) -> bool:
        """Whether every rank answered well, so that all of them can be used again."""
        return len(self.payloads) == len(self.ranks)

    def collect(self, timeout_s: float) -> None:
        """Wait for every rank's answer, its death, or the end of the time."""
        start = time.monotonic()
        deadline = start + timeout_s
        while waiting := self._waiting():
            by_connection = {self.ranks[index].connection: index for index in waiting}
            ready = wait(list(by_connection), timeout=max(0, deadline - time.monotonic()))
            for connection in ready:
                self._receive(by_connection[connection])  # type: ignore[index]
            if not ready:
                self._report_hung(waiting, time.monotonic() - start)
            elif self.failures:
                deadline = min(deadline, time.monotonic() + GRACE_S)

    def _waiting(self) -> list[int]:
        return [i for i in range(len(self.ranks)) if i not in {*self.payloads, *self.failures, *self.dead}]

    def _receive(self, index: int) -> None:
        rank = self.ranks[index]
        try:
            answer = pickle.loads(rank.connection.recv_bytes())
        except (EOFError, OSError):
            self._report_dead(index)
            return
        if isinstance(answer, Failure):
            self.failures[index] = answer
        elif index in self.expect_dead:
            self.failures[index] = Failure("returned", "it was expected to die")
        else:
            assert isinstance(answer, Result)
            self.payloads[index] = answer.payload

    def _report_dead(self, index: int) -> None:
        rank = self.ranks[index]
        rank.process.join(5)
        if index in self.expect_dead:
            self.dead.add(index)
        else:
            self.failures[index] = Failure(f"died with exit code {rank.process.exitcode}", rank.crash())

    def _report_hung(self, waiting: list[int], seconds: float) -> None:
        for index in waiting:
            self.failures[index] = Failure(f"still running after {seconds:.1f} s", self.ranks[index].stack())

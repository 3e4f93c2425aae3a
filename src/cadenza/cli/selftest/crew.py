"""The workers of a selftest as processes, and what became of each trial."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeAlias

import torch.distributed as dist

from cadenza.cli.parent_death import PARENT
from cadenza.cli.selftest.plan import Plan, Trial, result_key

__all__ = ["Crew", "Outcome", "Verdict"]

Verdict: TypeAlias = Literal["passed", "failed", "not here"]
_POLL_S = 0.05
_LAST_LINES = 20


@dataclass(frozen=True)
class Outcome:
    """What came of a trial.

    Attributes:
        verdict: Whether it passed, or why there was nothing to try.
        text: What was seen, in words.
        seconds: How long the slowest worker took.
        details: Tracebacks of workers that failed, for whoever is to mend it.
    """

    verdict: Verdict
    text: str
    seconds: float = 0.0
    details: tuple[str, ...] = ()


class Crew:
    """Starts the workers; ends them, whatever they are doing, at the end of the block."""

    def __init__(self, plan: Plan, store: dist.TCPStore) -> None:
        self._plan, self._store = plan, store
        self._folder = tempfile.TemporaryDirectory(prefix="cadenza-selftest-")
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Crew:
        environment = {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1", **os.environ, PARENT: str(os.getpid())}
        for rank in range(self._plan.workers):
            command = [sys.executable, "-m", "cadenza.cli.selftest.worker", self._plan.to_json(), str(rank)]
            with self._log(rank).open("wb") as log:
                self._processes.append(
                    subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
                )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
        self._folder.cleanup()

    def outcome(self, number: int, deadline: float) -> Outcome:
        """Wait for all workers of a trial."""
        trial = self._plan.trials[number]
        ranks = [rank for rank in range(trial.setup.workers) if rank != trial.dies]
        results: dict[int, dict[str, Any]] = {}
        while len(results) < len(ranks):
            for rank in ranks:
                if rank not in results and self._store.check([result_key(number, rank)]):
                    results[rank] = json.loads(self._store.get(result_key(number, rank)))
            missing = [rank for rank in ranks if rank not in results]
            dead = [rank for rank in missing if self._processes[rank].poll() is not None]
            if missing and (dead or time.monotonic() > deadline):
                return self._unanswered(missing, dead, results)
            if missing:
                time.sleep(_POLL_S)
        return self._judge(trial, results)

    def _judge(self, trial: Trial, results: dict[int, dict[str, Any]]) -> Outcome:
        seconds = max(result["seconds"] for result in results.values())
        failed = {rank: result for rank, result in results.items() if not result["ok"]}
        if failed:
            rank, first = next(iter(failed.items()))
            details = tuple(f"worker {r}: {result['traceback']}" for r, result in failed.items())
            return Outcome("failed", f"worker {rank}: {first['text']}", seconds, details)
        if len({result["same"] for result in results.values()}) > 1:
            told = tuple(f"worker {rank}: {result['same']}" for rank, result in results.items())
            return Outcome("failed", "the workers do not hold the same bits", seconds, told)
        if trial.dies is not None and self._died(trial.dies) is None:
            return Outcome("failed", f"worker {trial.dies} was to be killed, and lives", seconds)
        return Outcome("passed", results[0]["text"], seconds)

    def _unanswered(self, missing: list[int], dead: list[int], results: dict[int, dict[str, Any]]) -> Outcome:
        if dead:
            text = f"worker {dead[0]} ended with exit code {self._processes[dead[0]].returncode}"
        else:
            text = f"no answer from worker{'s' * (len(missing) > 1)} {', '.join(map(str, missing))} in time"
        details = [f"worker {rank}: {self._last_words(rank)}" for rank in missing]
        details += [f"worker {rank}: {r['traceback']}" for rank, r in results.items() if not r["ok"]]
        return Outcome("failed", text, details=tuple(details))

    def _died(self, rank: int) -> int | None:
        try:
            return self._processes[rank].wait(10)
        except subprocess.TimeoutExpired:
            return None

    def _log(self, rank: int) -> Path:
        return Path(self._folder.name) / f"worker-{rank}.log"

    def _last_words(self, rank: int) -> str:
        lines = self._log(rank).read_text(errors="replace").splitlines()
        return "\n".join(lines[-_LAST_LINES:]) or "it has printed nothing"


def run_all(
    plan: Plan, store: dist.TCPStore, deadline: float, report: Callable[[Trial], None]
) -> dict[tuple[str, str], Outcome]:
    """Return what came of every trial, by part and setup; once a worker is gone, the rest cannot be tried."""
    outcomes: dict[tuple[str, str], Outcome] = {}
    with Crew(plan, store) as crew:
        for number, trial in enumerate(plan.trials):
            report(trial)
            until = min(deadline, time.monotonic() + 2 * plan.timeout_s)
            outcomes[trial.part, trial.setup.name] = crew.outcome(number, until)
    return outcomes

"""`cadenza train` under shrink and skip_round: what is killed comes back alone, and the run ends well."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from cadenza.training.runs import open_run, read_metrics
from support.commands import PATIENCE_S, QUIET, TASK, cadenza, command, environment, has_begun, processes_of, wait_until

pytestmark = pytest.mark.timeout(300)

PERIOD = 10
QUICK = ["--period", PERIOD, "--no-report", *QUIET, "--set", "faults.lease_s=0.6", "--set", "options.constant_lr=true"]


def slow_until(file: Path) -> list[str]:
    """Let a run take its time until a file is there."""
    return ["--set", "options.slow=0", "--set", f"options.slow_until='{file}'"]


@contextmanager
def started(*arguments: object, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """The command, at work; ended in any case."""
    front = subprocess.Popen(
        command(*arguments),
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield front
    finally:
        if front.poll() is None:
            front.kill()
        front.communicate()


def outcome(front: subprocess.Popen[str], code: int = 0) -> str:
    """What a command printed, once it has ended."""
    printed = front.communicate(timeout=PATIENCE_S)[0]
    assert front.returncode == code, printed
    return printed


def lines(run: Path, worker: int, kind: str) -> list[dict[str, Any]]:
    """All that a worker has written of a kind, also what is stale."""
    path = run / "metrics" / f"worker-{worker:05}.jsonl"
    found = [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [line for line in found if line["kind"] == kind]


def worker_process(run: Path, worker: int) -> psutil.Process:
    found = [p for p in processes_of(run) if "cadenza.cli.worker" in p.cmdline()]
    return next(process for process in found if process.environ().get("RANK") == str(worker))


def store_process(run: Path) -> psutil.Process:
    supervisor = next(process for process in processes_of(run) if "cadenza.cli.supervisor" in process.cmdline())
    return next(process for process in supervisor.children() if "cadenza.cli.store" in process.cmdline())


def meets(run: Path, members: list[int], after: int) -> Callable[[], bool]:
    """Whether just these workers have held a round after a step, as worker 0 says."""
    return lambda: any(r["participants"] == members and r["step"] > after for r in lines(run, 0, "round"))


def last_step(run: Path) -> int:
    return int(lines(run, 0, "step")[-1]["step"])


@pytest.fixture(scope="module")
def survived(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run in which a worker was killed, came back, and was killed once too often, and the store was killed as well."""
    folder = tmp_path_factory.mktemp("survived")
    run, go = folder / "run", folder / "go"
    flags = ["--workers", 3, "--steps", 1500, "--faults", "shrink", "--set", "faults.restarts=1", *slow_until(go)]
    with started("train", TASK, "--run", run, *flags, *QUICK, folder=folder) as front:
        wait_until(has_begun(run, 3, 2 * PERIOD))
        others = [worker_process(run, worker).pid for worker in (0, 2)]
        worker_process(run, 1).kill()
        wait_until(lambda: len(lines(run, 1, "start")) == 2)
        wait_until(meets(run, [0, 1, 2], after=lines(run, 1, "start")[1]["step"]))
        store_process(run).kill()
        wait_until(lambda: any("reached the store again" in line["text"] for line in lines(run, 0, "event")))
        wait_until(meets(run, [0, 1, 2], after=last_step(run)))
        worker_process(run, 1).kill()
        wait_until(meets(run, [0, 2], after=last_step(run)))
        assert [worker_process(run, worker).pid for worker in (0, 2)] == others
        go.touch()
        printed = outcome(front)
    assert processes_of(run) == []
    return run, printed


def test_a_killed_worker_is_started_again_alone_and_joins_the_others(survived: tuple[Path, str]) -> None:
    run, _ = survived
    first, again = lines(run, 1, "start")
    assert first["step"] == 0 < again["step"]
    assert [len(lines(run, worker, "start")) for worker in (0, 2)] == [1, 1]
    steps = [line["step"] for line in lines(run, 0, "step")]
    assert steps == list(range(1, 1501))  # the others lost none


def test_after_the_last_restart_the_others_go_on_without_it(survived: tuple[Path, str]) -> None:
    run, _ = survived
    assert open_run(run).summary()["status"] == "finished"
    assert open_run(run).summary()["workers"] == 2
    assert (run / "model.safetensors").exists()
    metrics = read_metrics(run)
    assert [metrics.status(worker) for worker in range(3)] == ["finished", "lost", "finished"]


def test_what_happened_is_told(survived: tuple[Path, str]) -> None:
    run, printed = survived
    for text in (
        "worker 1: Worker 1 was ended by SIGKILL; it is started again, for the 1st time of 1.",
        "Worker 1 caught up with the others.",
        "reached the store again",
        "it had been started again 1 times, and the others go on without it",
    ):
        assert text in printed, text
    page = Path(cadenza("report", run, folder=run.parent).split()[-1])
    shown = (run.parent / page).read_text()
    assert "started again, for the 1st time of 1" in shown
    assert "the store" in shown

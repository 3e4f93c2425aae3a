"""`cadenza train` under shrink and skip_round: what is killed comes back alone, and the run ends well."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from cadenza.errors import TurnedAwayError
from cadenza.participants.signing import Signer
from cadenza.participants.store import StoreConnection
from cadenza.training.runs import open_run, read_metrics
from support.commands import (
    PATIENCE_S,
    QUIET,
    TASK,
    cadenza,
    free_port,
    has_begun,
    processes_of,
    started,
    wait_until,
)

pytestmark = pytest.mark.timeout(600)  # a busy machine takes four times as long

PERIOD = 10
QUICK = ["--period", PERIOD, "--no-report", *QUIET, "--set", "faults.lease_s=2.0", "--set", "options.constant_lr=true"]


def slow_until(file: Path) -> list[str]:
    """Let a run take its time until a file is there."""
    return ["--set", "options.slow=-2", "--set", f"options.slow_until='{file}'"]


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


def store_address(run: Path) -> str:
    return str(worker_process(run, 0).environ()["CADENZA_STORE"])


def meets(run: Path, members: list[int], after: int) -> Callable[[], bool]:
    """Whether just these workers have held a round after a step, as worker 0 says."""
    return lambda: any(r["participants"] == members and r["step"] > after for r in lines(run, 0, "round"))


def last_step(run: Path) -> int:
    return int(lines(run, 0, "step")[-1]["step"])


@pytest.fixture(scope="module")
def survived(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run in which a worker was killed, came back, and was killed once too often; its private store died, too."""
    folder = tmp_path_factory.mktemp("survived")
    run, go = folder / "run", folder / "go"
    flags = ["--workers", 3, "--steps", 1500, "--faults", "shrink", "--set", "faults.restarts=1", *slow_until(go)]
    with started("train", TASK, "--run", run, *flags, *QUICK, folder=folder, CADENZA_SECRET="our word") as front:
        wait_until(has_begun(run, 3, 2 * PERIOD))
        with pytest.raises(TurnedAwayError):
            StoreConnection(store_address(run), Signer("job", secret=None)).call(lambda store: store.read("latest"))
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
    without_store = next(line["step"] for line in lines(run, 0, "event") if "cannot be reached" in line["text"])
    steps = [line["step"] for line in lines(run, 0, "step") if line["step"] < without_store]
    assert steps == list(range(1, without_store))  # the others lost none


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
        "it had been started again once, and the others go on without it",
    ):
        assert text in printed, text
    page = Path(cadenza("report", run, folder=run.parent).split()[-1])
    shown = (run.parent / page).read_text()
    assert "started again, for the 1st time of 1" in shown
    assert "the store" in shown


def test_a_run_goes_on_from_its_last_whole_checkpoint_whatever_was_killed(tmp_path: Path) -> None:
    # Worker 0, which leads, dies twice while it saves; then all workers die at once, then everything.
    run, go = tmp_path / "run", tmp_path / "go"
    flags = ["--workers", 2, "--steps", 4000, "--faults", "shrink", "--set", "checkpoint.every=15", *slow_until(go)]
    dying = ["--set", "options.die_saving=0", "--set", "faults.grace_s=3.0"]
    with started("train", TASK, "--run", run, *flags, *dying, *QUICK, folder=tmp_path) as front:
        wait_until(lambda: has_begun(run, 2)() and len(lines(run, 0, "checkpoint")) >= 2)
        assert len(lines(run, 0, "start")) == 3
        saved = lines(run, 0, "checkpoint")
        for worker in range(2):
            worker_process(run, worker).kill()
        wait_until(lambda: len(lines(run, 0, "start")) == 4 and len(lines(run, 1, "start")) == 2)
        assert lines(run, 0, "start")[-1]["step"] == lines(run, 1, "start")[-1]["step"] >= saved[-2]["step"] > 0
        wait_until(lambda: len(lines(run, 0, "checkpoint")) >= len(saved) + 1)
        doomed = [psutil.Process(front.pid), *psutil.Process(front.pid).children(recursive=True)]
        for process in doomed:
            process.kill()
        psutil.wait_procs(doomed)
    saved = [line["step"] for line in lines(run, 0, "checkpoint")]
    alive = ["--set", "options.die_saving=-1", "--set", "checkpoint.every=0", "--set", "faults.grace_s=30.0"]
    with started("train", "--resume", run, *alive, folder=tmp_path) as front:
        wait_until(lambda: all(len(lines(run, worker, "start")) == 5 - 2 * worker for worker in range(2)))
        begun = [lines(run, worker, "start")[-1]["step"] for worker in range(2)]
        assert begun[0] == begun[1]
        assert begun[0] in saved[-2:]  # it may have been killed before it could say that it saved
        wait_until(lambda: last_step(run) > begun[0] + 3)
        front.send_signal(signal.SIGINT)
        printed = outcome(front, 130)
    ends = [lines(run, worker, "end")[-1] for worker in range(2)]
    step = ends[0]["step"]
    assert [(end["status"], end["step"]) for end in ends] == 2 * [("interrupted", step)]
    assert f"Interrupted after step {step}, and saved." in printed
    cadenza("train", "--resume", run, "--steps", step + 20, folder=tmp_path)
    for worker in range(2):
        told = read_metrics(run)
        assert told.status(worker) == "finished"
        after = [line["step"] for line in told.of("step", worker) if line["step"] > begun[0]]
        assert after == list(range(begun[0] + 1, step + 21))
    assert processes_of(run) == []


def test_a_task_that_is_wrong_is_refused_once_and_nobody_is_started_again(tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text("def build(config):\n    'Forget to return the task.'\n")
    flags = ["--workers", 2, "--faults", "shrink"]
    printed = cadenza("train", "wrong:build", *flags, "--run", "run", folder=tmp_path, code=2)
    assert "Error: wrong:build must return a cadenza.training.Task; it returned None" in printed
    assert not (tmp_path / "run").exists()


def test_a_node_that_is_told_to_end_leaves_and_the_others_finish(tmp_path: Path) -> None:
    run, go = tmp_path / "run", tmp_path / "go"
    endpoint = f"127.0.0.1:{free_port()}"
    flags = ["--nnodes", 2, "--rdzv-endpoint", endpoint, "--workers", 1, "--steps", 1000, "--faults", "skip_round"]
    flags += ["--run", run, *slow_until(go), *QUICK]
    with (
        started("train", TASK, "--node-rank", 0, *flags, folder=tmp_path) as first,
        started("train", TASK, "--node-rank", 1, *flags, folder=tmp_path) as second,
    ):
        wait_until(has_begun(run, 2, PERIOD + 3))
        second.send_signal(signal.SIGTERM)
        assert "have left; others go on." in outcome(second, 143)
        wait_until(meets(run, [0], after=last_step(run)))
        go.touch()
        outcome(first)
    assert [read_metrics(run).status(worker) for worker in range(2)] == ["finished", "left"]

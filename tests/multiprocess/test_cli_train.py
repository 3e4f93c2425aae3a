"""`cadenza train` as people run it: to its end, interrupted and resumed, killed, and with what workers refuse."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import time
from contextlib import closing
from pathlib import Path

import pytest

from cadenza.cli.app import main
from cadenza.training.runs import open_run, read_metrics
from support.commands import (
    PATIENCE_S,
    QUIET,
    SLOW,
    TASK,
    Terminal,
    cadenza,
    has_begun,
    processes_of,
    started,
    wait_until,
)

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run that has finished, and what was printed."""
    folder = tmp_path_factory.mktemp("finished")
    printed = cadenza(
        "train", TASK, "--workers", 2, "--steps", 24, "--period", 4, "--run", "run", *QUIET, folder=folder
    )
    return folder / "run", printed


def test_a_run_is_a_folder_with_all_that_came_of_it(finished: tuple[Path, str]) -> None:
    run, printed = finished
    found = {path.name for path in run.iterdir()}
    assert {"config.toml", "environment.json", "metrics", "checkpoints", "summary.json", "report.html"} <= found
    assert open_run(run).config().strategy.arguments["period"] == 4
    assert open_run(run).summary()["status"] == "finished"
    assert "held-out loss, last" in printed
    assert printed.rstrip().endswith("Report: run/report.html")


def test_without_a_terminal_there_are_plain_lines(finished: tuple[Path, str]) -> None:
    _, printed = finished
    assert "\x1b" not in printed
    assert "worker 1 of 2 started on " in printed
    assert re.search(
        r"step 24/24 · loss \S+ · .* samples/s · sent .*B a worker \(DDP .*\) · stall .* · drift ", printed
    )
    assert re.search(r"step 24/24 · held-out loss \d", printed)


def test_what_workers_print_is_in_the_runs_logs(finished: tuple[Path, str]) -> None:
    run, _ = finished
    logs = {path.name for path in (run / "logs" / "launch-001").iterdir()}
    assert logs == {f"worker-0000{rank}.{stream}" for rank in range(2) for stream in ("out", "err")}
    assert processes_of(run) == []


def test_a_finished_run_says_how_to_go_on(finished: tuple[Path, str], capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["train", "--resume", str(finished[0])])
    assert "has finished its 24 steps; --steps 48" in " ".join(capfd.readouterr().err.split())


def test_a_checkpoint_of_another_model_is_refused_and_nothing_changes(
    finished: tuple[Path, str], tmp_path: Path
) -> None:
    shutil.copytree(finished[0], tmp_path / "run")
    before = (tmp_path / "run" / "config.toml").read_text()
    wider = ["--steps", 30, "--workers", 1, "--set", "options.width=8"]
    printed = cadenza("train", "--resume", "run", *wider, folder=tmp_path, code=2)
    assert "saved with another model: 0.weight: (16, 8) float32 in the state" in printed
    assert "Traceback" not in printed
    assert (tmp_path / "run" / "config.toml").read_text() == before


def test_ctrl_c_saves_and_the_command_it_prints_goes_on(tmp_path: Path) -> None:
    run = tmp_path / "a run"
    flags = ["--workers", 2, "--steps", 100_000, "--period", 4, "--set", "checkpoint.every=0", *QUIET, *SLOW]
    with closing(Terminal("train", TASK, "--run", run, *flags, folder=tmp_path)) as terminal:
        wait_until(has_begun(run, 2, 8))
        wait_until(lambda: "in 1" in terminal.read())
        terminal.press(b"\x03")
        assert terminal.wait() == 130
        shown = terminal.printed
    assert "━" in shown or "─" in shown
    for figure in ("next sync", "samples/s", "DDP would have sent", "stall", "drift", "left", "Stopping: the workers"):
        assert figure in shown, figure
    assert processes_of(run) == []
    told = re.search(r"Interrupted after step (\d+), and saved\. Go on with:\s+cadenza (.*)", shown)
    assert told is not None
    step, resume = int(told[1]), shlex.split(told[2])
    assert open_run(run).checkpoint(step).is_dir()
    assert {read_metrics(run).status(worker) for worker in range(2)} == {"interrupted"}

    printed = cadenza(*resume, "--steps", step + 10, "--no-report", *QUIET, folder=tmp_path)
    assert f"worker 0 of 2 started on {os.uname().nodename} from step {step}" in printed
    steps = [line["step"] for line in read_metrics(run).of("step", 1)]
    assert steps == list(range(1, step + 11))
    assert not (run / "report.html").exists()


def test_a_second_ctrl_c_does_not_wait_for_the_workers(tmp_path: Path) -> None:
    run = tmp_path / "run"
    flags = ["--workers", 1, "--steps", 10, "--set", "options.slow=0", "--set", "options.slow_s=200", *QUIET]
    with closing(Terminal("train", TASK, "--run", run, *flags, folder=tmp_path, columns=60)) as terminal:
        wait_until(lambda: "0/10" in terminal.read())
        terminal.press(b"\x03")
        wait_until(lambda: "again ends them" in terminal.read())
        time.sleep(0.6)  # at once it would count as the same
        terminal.press(b"\x03")
        assert terminal.wait() == 130
        assert "Interrupted before anything was saved." in terminal.printed
    assert processes_of(run) == []


@pytest.mark.parametrize("victim", ["front", "agent"])
def test_nothing_is_left_running_after_a_kill(victim: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    flags = ["--workers", 1, "--steps", 100_000, *QUIET, *SLOW]
    with started("train", TASK, "--run", run, *flags, folder=tmp_path) as front:
        wait_until(has_begun(run, 1, 2))
        agent = next(process for process in processes_of(run) if process.ppid() == front.pid)
        os.kill(front.pid if victim == "front" else agent.pid, signal.SIGKILL)
        wait_until(lambda: processes_of(run) == [])
        printed = front.communicate(timeout=PATIENCE_S)[0]
    if victim == "front":  # the workers still had the time to save
        assert read_metrics(run).status() == "interrupted"
    else:
        assert front.returncode == 1
        assert "The elastic agent was ended by SIGKILL" in printed


def test_a_worker_that_raises_fails_the_run_with_its_own_words(tmp_path: Path) -> None:
    event = ["--set", "options.at=6", "--set", "options.event=raise", "--set", "checkpoint.every=4"]
    flags = ["--workers", 1, "--steps", 20, *QUIET]
    printed = cadenza("train", TASK, "--run", "run", *flags, *event, folder=tmp_path, code=1)
    assert "Error: Worker 0 failed (exit code 1): RuntimeError: the task went wrong" in printed
    assert "tiny_task.py" in printed
    assert "torch/distributed/elastic" not in printed
    assert "The last checkpoint is of step 4. Go on with:  cadenza train --resume run" in printed


def test_a_task_that_is_none_is_refused_in_a_paragraph_and_leaves_no_folder(tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text("def build(config):\n    'Forget to return the task.'\n")
    printed = cadenza("train", "wrong:build", "--workers", 1, "--run", "run", folder=tmp_path, code=2)
    assert "Error: wrong:build must return a cadenza.training.Task; it returned None" in printed
    assert "Traceback" not in printed
    assert not (tmp_path / "run").exists()


def test_workers_are_started_anew_from_the_last_checkpoint(tmp_path: Path) -> None:
    # It dies at its 25th step. Started anew at step 20, it has only 10 to go.
    event = ["--set", "options.at=25", "--set", "options.event=die", "--set", "options.worker=1"]
    flags = ["--workers", 2, "--steps", 30, "--set", "checkpoint.every=10", "--max-restarts", 1, "--no-report", *QUIET]
    cadenza("train", TASK, "--run", "run", *flags, *event, folder=tmp_path)
    run = open_run(tmp_path / "run")
    starts = [line["step"] for line in _lines(run.metrics_of(0)) if line["kind"] == "start"]
    assert starts == [0, 20]
    assert run.summary()["status"] == "finished"
    assert (run.folder / "logs" / "launch-001" / "worker-00001.attempt-1.err").exists()


def _lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]

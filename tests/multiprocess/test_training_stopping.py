"""All workers stop at one step, whoever is asked; what goes wrong on one is said by all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest

from cadenza.checkpoint import latest
from cadenza.training import Config, runs, stop_agreement
from cadenza.training.loop import run_worker
from support import tiny_task
from support.ranks import RankPool, outcome

ROOT = Path(__file__).parents[2]
LATE = {"name": "diloco", "period": 5, "delay": 4, "codec": "int8"}


def make(folder: Path, **changes: Any) -> runs.Run:
    settings = {
        "task": tiny_task.NAME,
        "steps": 24,
        "strategy": {"name": "local_sgd", "period": 4},
        "launch": {"workers": 2},
        "log": {"tensorboard": False},
    }
    return runs.create(folder, Config.model_validate({**settings, **changes}))


def ends(run: runs.Run) -> list[dict[str, Any]]:
    return runs.read_metrics(run.folder).of("end")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("strategy", [LATE, {"name": "ddp"}, {"name": "local_sgd", "period": 4}])
def test_a_signal_to_one_worker_stops_all_at_the_same_step(
    ranks: RankPool, tmp_path: Path, number: signal.Signals, strategy: dict[str, Any]
) -> None:
    """Worker 0 is slow, so the others wait for it inside rounds when the signal comes."""
    options = {"at": 6, "worker": 1, "event": "signal", "signal": int(number), "slow": 0}
    run = make(tmp_path / "run", strategy=strategy, options=options)
    assert ranks.run(3, run_worker, run.folder) == ["interrupted"] * 3
    [step] = {line["step"] for line in ends(run)}
    assert 6 <= step < 24
    assert latest(run.checkpoints) == run.checkpoint(step)
    assert run.summary()["status"] == "interrupted"
    assert {line["status"] for line in ends(run)} == {"interrupted"}
    assert "after step" in runs.read_metrics(run.folder).of("event")[-1]["text"]


def test_a_signal_in_the_last_step_lets_the_run_finish(ranks: RankPool, tmp_path: Path) -> None:
    run = make(tmp_path / "run", options={"at": 24, "worker": 1, "event": "signal"})
    assert ranks.run(2, run_worker, run.folder) == ["finished"] * 2


def test_a_second_signal_ends_a_worker_at_once(ranks: RankPool, tmp_path: Path) -> None:
    run = make(tmp_path / "run", options={"at": 6, "worker": 1, "event": "two signals"})
    ended = ranks.run(2, outcome, run_worker, run.folder, expect_dead={1})
    assert ended[0][0] == "error"
    [line] = ends(run)
    assert line["status"] == "failed"


def test_a_signal_after_another_worker_has_died_does_not_wait_for_ever(ranks: RankPool, tmp_path: Path) -> None:
    options = {"at": 3, "worker": 1, "event": "die", "slow": 0, "slow_s": 0.5, "zero_is_asked_at": 6}
    run = make(tmp_path / "run", strategy={"name": "local_sgd", "period": 24}, options=options)
    [ended, _] = ranks.run(2, train_in_a_hurry, run.folder, expect_dead={1})
    assert ended[0] == "error"
    assert "worker 1 did not answer" in ended[2]


def train_in_a_hurry(folder: Path) -> tuple[Any, ...]:
    with mock.patch.object(stop_agreement, "_ANSWER_S", 2):
        return outcome(run_worker, folder)


def test_an_error_on_one_worker_is_named_by_all(ranks: RankPool, tmp_path: Path) -> None:
    run = make(tmp_path / "run", options={"at": 6, "worker": 1, "event": "raise"})
    ended = ranks.run(2, outcome, run_worker, run.folder)
    assert ended[1][1:] == ("RuntimeError", "the task went wrong")
    assert ended[0][0] == "error"
    zero, one = ends(run)
    assert one["error"] == "RuntimeError: the task went wrong"
    assert one["step"] == 5
    assert zero["error"].startswith("Stopped, because worker 1 failed.")
    assert run.summary()["status"] == "failed"


def test_a_loss_that_is_not_finite_is_an_error_before_it_is_taken(ranks: RankPool, tmp_path: Path) -> None:
    run = make(tmp_path / "run", options={"at": 6, "worker": 1, "event": "nan"})
    ended = ranks.run(2, outcome, run_worker, run.folder)
    assert ended[1][:2] == ("error", "NotFiniteError")
    assert "worker 1 is nan at step 6" in ended[1][2]


def test_a_checkpoint_of_another_model_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    run = make(tmp_path / "run", steps=4)
    ranks.run(2, run_worker, run.folder)
    run.write_config(run.config().with_(steps=8, **{"options.width": 24}))
    for kind, name, text in ranks.run(2, outcome, run_worker, run.folder):
        assert (kind, name) == ("error", "CheckpointError")
        assert "another model" in text


def test_too_few_workers_for_the_hierarchy_are_refused(ranks: RankPool, tmp_path: Path) -> None:
    run = make(tmp_path / "run", strategy={"name": "hierarchical", "levels": {"2": 3, "4": "all"}})
    for kind, name, text in ranks.run(2, outcome, run_worker, run.folder):
        assert (kind, name) == ("error", "TopologyError")
        assert "2" in text


# ---- real processes --------------------------------------------------------------------------------------------------


def torchrun(*arguments: str | Path) -> subprocess.Popen[str]:
    path = os.pathsep.join(map(str, [ROOT / "src", ROOT / "tests", os.environ.get("PYTHONPATH", "")]))
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.Popen(
        [*launch, "-m", "cadenza.cli.worker", *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.timeout(240)
def test_under_torchrun_a_run_is_made_and_interrupted(ranks: RankPool, tmp_path: Path) -> None:
    whole = make(tmp_path / "whole", strategy=LATE)
    ranks.run(2, run_worker, whole.folder)
    config = whole.config().with_(options={"slow": 0, "slow_s": 0.3})
    (tmp_path / "config.toml").write_text(config.to_toml())
    run = runs.Run(tmp_path / "run")
    launcher = torchrun(run.folder, "--config", tmp_path / "config.toml")
    try:
        while launcher.poll() is None and not has_begun(run):
            time.sleep(0.05)
        workers = psutil.Process(launcher.pid).children()
        workers[-1].send_signal(signal.SIGTERM)
        _, told = launcher.communicate(timeout=120)
    finally:
        launcher.kill()
    assert launcher.returncode == 0, told
    assert [line["status"] for line in ends(run)] == ["interrupted"] * 2
    run.write_config(whole.config())
    assert ranks.run(2, run_worker, run.folder) == ["finished"] * 2
    assert run.model_file.read_bytes() == whole.model_file.read_bytes()
    assert run.environment()["hosts"]


def has_begun(run: runs.Run) -> bool:
    return run.config_file.exists() and bool(runs.read_metrics(run.folder).of("step", 1))

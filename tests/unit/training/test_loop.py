"""One worker alone, in this process: what a task may get wrong while it trains, and what a run leaves behind."""

from __future__ import annotations

import itertools
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from cadenza.cli.worker import main
from cadenza.errors import CadenzaError, UsageError
from cadenza.training import Config, runs
from cadenza.training.data import BatchStream, to_device
from cadenza.training.loop import run_worker
from support import tiny_task


def make(folder: Path, **changes: Any) -> runs.Run:
    settings = {
        "task": tiny_task.NAME,
        "steps": 12,
        "strategy": {"name": "diloco", "period": 4, "codec": "int8"},
        "evaluate": {"every": 4},
        "checkpoint": {"every": 2, "keep": 3},
        "log": {"tensorboard": False},
    }
    return runs.create(folder, Config.model_validate({**settings, **changes}))


def test_a_finished_run_tells_everything(tmp_path: Path) -> None:
    run = make(tmp_path / "run")
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    assert run_worker(run.folder) == "finished"
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == handlers
    metrics = runs.read_metrics(run.folder)
    start = metrics.start()
    assert (start["worker"], start["workers"], start["strategy"], start["period"]) == (0, 1, "diloco", 4)
    assert (start["steps"], start["unit"], start["resumed"], start["gradient_bytes"]) == (12, "samples", False, 0)
    lines = metrics.of("step")
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert [line["next_sync"] for line in lines] == [4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12, 16]
    assert [line["samples"] for line in lines] == list(range(4, 49, 4))
    assert lines[0]["lr"] == 0.02 > lines[-1]["lr"]
    rounds = metrics.of("round")
    assert [line["step"] for line in rounds] == [4, 8, 12]
    assert all(0 <= line["launched"] <= line["landed"] for line in rounds)
    assert {"wire_s", "stall_s", "drift", "weights", "participants", "codec_error"} <= rounds[0].keys()
    assert [line["step"] for line in metrics.of("evaluation")] == [4, 8, 12]
    assert [line["path"] for line in metrics.of("checkpoint")][-1] == "checkpoints/step-00000012"
    assert sorted(path.name[-2:] for path in run.checkpoints.iterdir()) == ["08", "10", "12"]
    assert metrics.status() == "finished"
    summary = run.summary()
    assert summary["status"] == "finished"
    assert (summary["strategy"], summary["codec"], summary["steps"], summary["rounds"]) == ("diloco", "int8", 12, 3)
    assert summary["held_out"] == metrics.of("evaluation")[-1]["loss"]
    assert set(load_file(run.model_file)) >= {"0.weight", "4.bias"}


@pytest.mark.parametrize(
    ("event", "said"),
    [
        ("item", "(float)"),
        ("detached", "does not depend on the parameters"),
        ("vector", "shape (3,)"),
    ],
)
def test_a_loss_that_cannot_be_minimised_is_refused(tmp_path: Path, event: str, said: str) -> None:
    run = make(tmp_path / "run", options={"at": 3, "event": event})
    with pytest.raises(UsageError, match="tensor with one value") as raised:
        run_worker(run.folder)
    assert said in str(raised.value)
    end = runs.read_metrics(run.folder).of("end")[-1]
    assert (end["status"], end["step"], end["error"]) == ("failed", 2, str(raised.value))
    assert run.summary()["status"] == "failed"


def test_there_is_no_next_sync_to_tell_of_before_the_warm_up_ends(tmp_path: Path) -> None:
    run = make(tmp_path / "run", strategy={"name": "post_local_sgd", "period": 4, "warmup_steps": 6})
    run_worker(run.folder)
    lines = runs.read_metrics(run.folder).of("step")
    assert [line["next_sync"] for line in lines][:8] == [None] * 5 + [10] * 3


def test_the_worker_program_makes_a_run_and_goes_on_with_it(tmp_path: Path) -> None:
    config = make(tmp_path / "first").config_file
    new = runs.Run(tmp_path / "new")
    assert main([str(new.folder), "--config", str(config)]) == 0
    assert main([str(new.folder), "--config", str(config)]) == 0  # as a launcher does that starts workers anew
    assert main([str(new.folder)]) == 0
    assert [line["step"] for line in runs.read_metrics(new.folder).of("start")] == [0, 12, 12]


def test_the_worker_program_says_what_was_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "gone")]) == 2
    assert "There is no folder" in capsys.readouterr().err
    assert main([str(make(tmp_path / "usage", options={"widht": 3}).folder)]) == 2
    assert 'Did you mean "options.width"?' in capsys.readouterr().err
    assert main([str(make(tmp_path / "nan", options={"at": 3, "event": "nan"}).folder)]) == 1
    assert "is nan at step 3" in capsys.readouterr().err
    assert main([str(make(tmp_path / "raise", options={"at": 3, "event": "raise"}).folder)]) == 1
    assert "the task went wrong" in capsys.readouterr().err
    other = make(tmp_path / "other", steps=5)
    assert main([str(other.folder), "--config", str(make(tmp_path / "first").config_file)]) == 2
    assert "another configuration" in capsys.readouterr().err


def test_a_schedule_that_cannot_be_saved_is_refused_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Schedule:
        def step(self) -> None:
            pytest.fail("a step was taken")

        def state_dict(self) -> dict[str, Any]:
            return {"secret": object()}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    monkeypatch.setattr(torch.optim.lr_scheduler, "CosineAnnealingLR", lambda *_: Schedule())
    with pytest.raises(CadenzaError, match="secret"):
        run_worker(make(tmp_path / "run").folder)


# ---- batches ---------------------------------------------------------------------------------------------------------


def test_batches_that_end_begin_anew_with_the_epoch_told() -> None:
    class Epochs:
        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Any:
            return iter([10 * self.epoch, 10 * self.epoch + 1])

    stream = BatchStream(Epochs(), source="batches")
    assert [next(stream) for _ in range(5)] == [0, 1, 10, 11, 20]
    resumed = BatchStream(Epochs(), source="batches")
    resumed.load_state_dict(stream.state_dict())
    assert next(resumed) == 21


@pytest.mark.parametrize(
    ("batches", "said"),
    [([], "has no batches"), (iter([1, 2]), "ended after 2 batches"), (3, "returned 3 (int)")],
)
def test_batches_that_cannot_go_on_are_refused(batches: Any, said: str) -> None:
    with pytest.raises(UsageError) as raised:
        list(itertools.islice(BatchStream(batches, source="batches(0, 1)"), 3))
    assert said in str(raised.value)
    assert "batches(0, 1)" in str(raised.value)


def test_the_tensors_of_a_batch_are_moved_wherever_they_are() -> None:
    batch = {"pixels": [torch.zeros(2), (torch.ones(3), "name")]}
    moved = to_device(batch, torch.device("meta"))
    assert moved["pixels"][0].is_meta
    assert moved["pixels"][1][0].is_meta
    assert moved["pixels"][1][1] == "name"

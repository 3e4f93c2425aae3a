"""A disk that is full for a while: a line instead of a traceback, and training that goes on if it can."""

from __future__ import annotations

import io
import logging
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from cadenza.cli.exit_codes import FULL_DISK
from cadenza.cli.train import finish
from cadenza.cli.worker import main
from cadenza.training import Config, loop, runs
from cadenza.training.best_model import BestModel
from cadenza.training.held_out_shares import Evaluation
from cadenza.training.job import Job
from cadenza.training.metrics import MetricsWriter, read_lines
from cadenza.training.recording import LogEvents
from cadenza.training.saved import last_whole_step
from support import tiny_task


@contextmanager
def full_disk() -> Iterator[None]:
    """Inside the block no file can grow, as on a full disk; the kernel says so with another number."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def train(folder: Path, monkeypatch: pytest.MonkeyPatch, *, full_at: set[int]) -> int:
    """Train 8 steps with a checkpoint after every second; return the worker's exit code."""
    saves = Job.save

    def save(job: Job, *arguments: Any, **options: Any) -> int:
        if job.sync.clock not in full_at:
            return saves(job, *arguments, **options)
        with full_disk():
            return saves(job, *arguments, **options)

    monkeypatch.setattr(Job, "save", save)
    settings = {"task": tiny_task.NAME, "steps": 8, "checkpoint": {"every": 2}, "log": {"tensorboard": False}}
    return main([str(runs.create(folder, Config.model_validate(settings)).folder)])


def test_training_goes_on_without_a_checkpoint_that_could_not_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert train(tmp_path / "run", monkeypatch, full_at={4}) == 0
    metrics = runs.read_metrics(tmp_path / "run")
    assert [line["step"] for line in metrics.of("checkpoint")] == [2, 6, 8]
    (event,) = [line for line in metrics.of("event") if line["level"] == "warning"]
    assert event["text"].startswith("The checkpoint of step 4 could not be written: ")
    assert "Traceback" not in capfd.readouterr().err


def test_two_in_a_row_end_the_run_with_a_line_and_a_checkpoint_that_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert train(tmp_path / "run", monkeypatch, full_at={4, 6}) == 4
    said = capfd.readouterr().err
    assert "The checkpoint of step 6 could not be written" in said
    assert "Traceback" not in said
    assert not list((tmp_path / "run" / "checkpoints" / "step-00000006").iterdir())  # what room there is stays free
    assert last_whole_step(runs.Run(tmp_path / "run"), tolerant=False) == 2


def test_a_model_that_finds_no_room_at_the_end_is_told_as_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    write = loop.write_model

    def write_on_a_full_disk(target: Path, model: torch.nn.Module) -> None:
        with full_disk():
            write(target, model)

    monkeypatch.setattr(loop, "write_model", write_on_a_full_disk)
    assert train(tmp_path / "run", monkeypatch, full_at=set()) == FULL_DISK
    assert "model.safetensors: File too large." in capfd.readouterr().err


def test_a_report_that_finds_no_room_does_not_spoil_a_run_that_has_ended_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert train(tmp_path / "run", monkeypatch, full_at=set()) == 0
    with Console(file=io.StringIO(), width=200) as console, full_disk():
        finish([tmp_path / "run"], tmp_path / "run" / "report.html", console, report=True)
    assert "There is no report:" in console.file.getvalue()  # type: ignore[attr-defined]
    assert not list((tmp_path / "run").glob("report*"))


def test_a_log_on_a_full_disk_does_not_end_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/full", "w") as full, LogEvents(logging.getLogger("cadenza")) as log:
        monkeypatch.setattr(sys, "stderr", full)
        logging.getLogger("cadenza").warning("a line that finds no room")
        monkeypatch.undo()
        told: list[str] = []
        log.write(SimpleNamespace(event=lambda step, text, level: told.append(text)), 3)  # type: ignore[arg-type]
        with suppress(OSError):
            full.close()
    assert told == ["a line that finds no room"]


def test_a_best_model_that_finds_no_room_leaves_the_one_before(tmp_path: Path) -> None:
    run = runs.create(tmp_path / "run", Config())
    warned: list[str] = []
    best = BestModel(run, "loss", [], warn=warned.append)
    model = torch.nn.Linear(4, 4)
    best.offer(1, model)
    best.judge(Evaluation(1, {"loss": 2.0}, write=True))
    with full_disk():
        best.offer(2, model)
        best.judge(Evaluation(2, {"loss": 1.0}, write=True))
    assert "could not be written" in warned[0]
    assert run.best() == {"step": 1, "metric": "loss", "value": 2.0}
    assert run.best_model.exists()
    assert not list(run.folder.glob("*candidate*"))


def test_metrics_wait_for_room(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path / "worker-00000.jsonl") as writer:
        with full_disk():
            for step in range(1, 6):
                writer.write("evaluation", step, loss=1.0)
        assert len(read_lines(tmp_path).of("evaluation")) < 5
        writer.write("evaluation", 6, loss=1.0)
    assert [line["step"] for line in read_lines(tmp_path).of("evaluation")] == [1, 2, 3, 4, 5, 6]

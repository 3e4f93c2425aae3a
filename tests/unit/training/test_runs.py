"""The folder of a run, and what readers make of lines that a crash tore or a resume overtook."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cadenza.errors import UsageError
from cadenza.training import Config, runs
from cadenza.training.metrics import MetricsWriter


@pytest.fixture
def run(tmp_path: Path) -> runs.Run:
    return runs.create(tmp_path / "run", Config(steps=10))


def write(run: runs.Run, *lines: tuple[str, int, dict[str, Any]], worker: int = 0) -> None:
    with MetricsWriter(run.metrics_of(worker)) as writer:
        for kind, step, figures in lines:
            writer.write(kind, step, **figures)


def steps(run: runs.Run, kind: str = "step", worker: int = 0) -> list[int]:
    return [line["step"] for line in runs.read_metrics(run.folder).of(kind, worker)]


def test_a_new_run_knows_its_configuration_and_its_machine(run: runs.Run) -> None:
    assert runs.open_run(run.folder).config().to_toml() == Config(steps=10).to_toml()
    assert {"cadenza", "torch", "python", "git", "host"} <= run.environment().keys()
    assert run.summary() is None


def test_a_folder_with_something_in_it_is_not_made_a_run(run: runs.Run, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is there already"):
        runs.create(run.folder, Config())
    with pytest.raises(UsageError, match="is not a run"):
        runs.open_run(tmp_path)
    with pytest.raises(UsageError, match="There is no folder"):
        runs.read_metrics(tmp_path / "gone")
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot be made"):
        runs.create(tmp_path / "file" / "run", Config())


def test_lines_have_the_time_and_the_step(run: runs.Run) -> None:
    write(run, ("step", 1, {"loss": float("inf")}))
    [line] = runs.read_metrics(run.folder).of("step")
    assert list(line)[:4] == ["kind", "time", "elapsed", "step"]
    assert line["loss"] == "inf"
    json.loads(run.metrics_of(0).read_text(), parse_constant=lambda name: pytest.fail(name))


def test_a_line_that_a_crash_tore_is_left_out_and_cut_off(run: runs.Run) -> None:
    write(run, ("step", 1, {}), ("step", 2, {}))
    with run.metrics_of(0).open("a") as file:
        file.write('{"kind": "step", "time": 17')
    assert steps(run) == [1, 2]
    write(run, ("step", 3, {}))
    assert steps(run) == [1, 2, 3]
    for line in run.metrics_of(0).read_text().splitlines():
        json.loads(line)


def test_a_file_that_is_nothing_but_a_torn_line_begins_anew(run: runs.Run) -> None:
    run.metrics_of(0).write_text('{"ki' + "n" * 100_000)
    write(run, ("step", 1, {}))
    assert steps(run) == [1]


def test_what_a_resumed_run_takes_again_is_dropped(run: runs.Run) -> None:
    write(run, ("start", 0, {}), *[("step", step, {"loss": 1.0}) for step in range(1, 8)], ("evaluation", 6, {}))
    write(run, ("event", 4, {"text": "damaged"}), ("start", 4, {}), *[("step", s, {"loss": 2.0}) for s in (5, 6)])
    metrics = runs.read_metrics(run.folder)
    assert [(line["step"], line["loss"]) for line in metrics.of("step")] == [
        (1, 1.0), (2, 1.0), (3, 1.0), (4, 1.0), (5, 2.0), (6, 2.0),
    ]  # fmt: skip
    assert metrics.of("evaluation") == []
    assert len(metrics.of("event")) == 1
    assert metrics.start(0)["step"] == 4


def test_a_round_that_landed_after_the_checkpoint_is_dropped_though_it_was_launched_before(run: runs.Run) -> None:
    late = {"delay": 3, "bytes_sent": 7}
    write(run, ("start", 0, {}), ("round", 4, late), ("round", 8, late))
    write(run, ("start", 9, {}), ("round", 8, late))
    assert steps(run, "round") == [4, 8]


def test_workers_are_told_apart(run: runs.Run) -> None:
    write(run, ("start", 0, {}), ("step", 1, {}))
    write(run, ("start", 0, {}), ("step", 1, {}), ("step", 2, {}), worker=11)
    metrics = runs.read_metrics(run.folder)
    assert metrics.workers == [0, 11]
    assert len(metrics.of("step")) == 3
    assert [line["step"] for line in metrics.of("step", 11)] == [1, 2]


def test_the_status_is_that_of_the_last_time(run: runs.Run) -> None:
    assert runs.read_metrics(run.folder).status() == "running"
    write(run, ("start", 0, {}), ("end", 4, {"status": "interrupted"}))
    assert runs.read_metrics(run.folder).status() == "interrupted"
    write(run, ("start", 4, {}))
    assert runs.read_metrics(run.folder).status() == "running"
    write(run, ("end", 10, {"status": "finished"}))
    assert runs.read_metrics(run.folder).status() == "finished"


def test_steps_wait_for_each_other_and_everything_else_is_written_at_once(run: runs.Run) -> None:
    with MetricsWriter(run.metrics_of(0)) as writer:
        writer.write("start", 0)
        for step in range(1, 4):
            writer.write("step", step)
        assert steps(run, "start") == [0]
        writer.write("round", 3)
        assert steps(run) == [1, 2, 3]
        assert steps(run, "round") == [3]

"""Observers: every report arrives, on disk too, and nothing that they do disturbs the training."""

from __future__ import annotations

import json
import logging
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

import cadenza.observers.loggers
from cadenza.observers import jsonl, log, mlflow, notify, read_jsonl, tensorboard, wandb
from cadenza.reports import RoundReport

REPORT = RoundReport(
    step=1500,
    level=1,
    level_name="world",
    fragment=3,
    fragment_name="blocks 9 to 11",
    bytes_sent=1_500_064,
    encoded_bytes=1_000_000,
    raw_bytes=4_000_000,
    stall_s=0.0625,
    wire_s=1.25,
    delay=5,
    drift=0.0125,
    codec="int8",
    codec_error=0.0065,
    weights=(1.0, 0.5, 0.1),
    participants=(0, 4, 8),
)


@pytest.mark.parametrize(
    "report",
    [
        REPORT,
        replace(REPORT, drift=None, codec_error=None, weights=(), participants=()),
        replace(REPORT, drift=math.inf, codec_error=-math.inf),
        replace(REPORT, level_name='a "quoted"\nname', fragment_name="tête"),
        replace(REPORT, stall_s=0.1 + 0.2, weights=(1 / 3,)),
    ],
)
def test_a_report_comes_back_from_json_as_it_was(report: RoundReport) -> None:
    text = report.to_json()
    assert "\n" not in text
    assert RoundReport.from_json(text) == report


def test_reports_are_strict_json_also_where_a_figure_is_no_number() -> None:
    def refuse(constant: str) -> Any:
        raise AssertionError(f"{constant} is no JSON")

    text = replace(REPORT, drift=math.nan, weights=(math.inf,)).to_json()
    assert json.loads(text, parse_constant=refuse)["drift"] == "nan"
    back = RoundReport.from_json(text)
    assert back.drift is not None
    assert math.isnan(back.drift)
    assert back.weights == (math.inf,)


def test_a_report_without_its_figures_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="A report names its level, level_name, fragment"):
        RoundReport.from_json('{"step": 3}')
    with pytest.raises(ValueError, match="is a JSON object"):
        RoundReport.from_json("[3]")


def test_notify_tells_everyone_also_after_one_that_raises(caplog: pytest.LogCaptureFixture) -> None:
    told = []

    def broken(report: RoundReport) -> None:
        raise OSError("no space left")

    for _ in range(3):
        notify([broken, told.append], REPORT)
    assert told == [REPORT] * 3
    [record] = caplog.records
    assert "broken" in record.getMessage()
    assert "at step 1500" in record.getMessage()
    assert record.exc_info is not None
    assert "no space left" in str(record.exc_info[1])


def test_each_observer_that_raises_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def method(self, report: RoundReport) -> None:
            raise ValueError

    one, other = Broken(), Broken()
    for _ in range(2):
        notify([one.method, other.method], REPORT)
    assert len(caplog.records) == 2


def test_notify_lets_an_interrupt_through() -> None:
    def interrupt(report: RoundReport) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        notify([interrupt], REPORT)


def test_log_writes_a_line_a_round_at_its_level(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="cadenza"):
        log()(REPORT)
        log(level=logging.DEBUG)(REPORT)
    assert [record.getMessage() for record in caplog.records] == [
        "step 1500: level world, fragment blocks 9 to 11, 1.50 MB sent in 1.250 s, stalled 0.062 s, drift 0.0125, "
        "int8 with error 0.0065, 3 workers"
    ]


def test_log_writes_to_the_logger_it_is_given(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="mine"):
        log(logging.getLogger("mine"), logging.WARNING)(replace(REPORT, drift=None, codec_error=None))
    [record] = caplog.records
    assert record.name == "mine"
    assert "drift" not in record.getMessage()


def test_jsonl_makes_its_folders_and_has_every_line_on_disk_at_once(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "today" / "rank0.jsonl"
    observer = jsonl(path)
    for step in (16, 32, 48):
        observer(replace(REPORT, step=step))
        assert [report.step for report in read_jsonl(path)] == list(range(16, step + 1, 16))
    observer.close()
    assert len(path.read_text().splitlines()) == 3


def test_jsonl_appends_to_what_an_earlier_run_wrote(tmp_path: Path) -> None:
    path = tmp_path / "rounds.jsonl"
    for step in (16, 32):
        with jsonl(str(path)) as observer:
            observer(replace(REPORT, step=step))
    assert read_jsonl(path) == [replace(REPORT, step=16), replace(REPORT, step=32)]


def test_a_line_torn_at_any_byte_is_left_out_and_cut_off_by_the_next_run(tmp_path: Path) -> None:
    path = tmp_path / "rounds.jsonl"
    report = replace(REPORT, fragment_name="tête")
    line = report.to_json().replace("\\u00ea", "ê").encode() + b"\n"
    for kept in range(1, len(line)):
        path.write_bytes(line + line[:kept])
        whole = 2 if kept == len(line) - 1 else 1  # only its end was missing
        assert read_jsonl(path) == [report] * whole
        with jsonl(path) as observer:
            observer(REPORT)
        assert read_jsonl(path) == [report] * whole + [REPORT]


def test_what_is_not_ours_at_the_end_of_a_file_is_never_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("my notes\nlast words")
    with jsonl(path) as observer:
        observer(REPORT)
    assert path.read_text() == f"my notes\nlast words\n{REPORT.to_json()}\n"
    with pytest.raises(ValueError, match=r"Line 1 of .*notes\.txt is not a report .* take that line out"):
        read_jsonl(path)


def test_a_broken_line_in_the_middle_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rounds.jsonl"
    path.write_text(f'{REPORT.to_json()}\n{{"step": 3, "lev\n{REPORT.to_json()}\n')
    with pytest.raises(ValueError, match="Line 2 of"):
        read_jsonl(path)


def test_an_empty_file_has_no_reports(tmp_path: Path) -> None:
    jsonl(tmp_path / "rounds.jsonl").close()
    assert read_jsonl(tmp_path / "rounds.jsonl") == []


def test_reports_survive_a_process_that_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "rounds.jsonl"
    program = (
        "import os, signal, sys\n"
        "from cadenza.observers import jsonl\n"
        "from cadenza.reports import RoundReport\n"
        "observer = jsonl(sys.argv[1])\n"
        "observer(RoundReport.example(step=16))\n"
        "observer(RoundReport.example(step=32))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program, str(path)], check=False)
    assert ended.returncode == -9
    assert [report.step for report in read_jsonl(path)] == [16, 32]


def test_a_full_disk_costs_the_reports_of_that_time_and_no_others(tmp_path: Path) -> None:
    class HalfFull:
        def __init__(self, file: Any) -> None:
            self.file = file

        def write(self, data: bytes) -> int:
            return int(self.file.write(data[:20]))

        def close(self) -> None:
            self.file.close()

    path = tmp_path / "rounds.jsonl"
    observer = jsonl(path)
    observer(replace(REPORT, step=16))
    observer._file = HalfFull(observer._file)  # type: ignore[assignment]
    with pytest.raises(OSError, match=r"Only 20 of \d+ bytes"):
        observer(replace(REPORT, step=32))
    observer(replace(REPORT, step=48))
    observer.close()
    assert [report.step for report in read_jsonl(path)] == [16, 48]


class Writer:
    def __init__(self) -> None:
        self.scalars: list[tuple[str, float, int]] = []
        self.closed = False

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.scalars.append((tag, value, step))

    def close(self) -> None:
        self.closed = True


def test_tensorboard_draws_each_figure_of_each_level_and_fragment() -> None:
    writer = Writer()
    observer = tensorboard(writer)
    observer(REPORT)
    observer.close()
    assert ("cadenza/world/blocks 9 to 11/drift", 0.0125, 1505) in writer.scalars
    assert ("cadenza/world/blocks 9 to 11/bytes_sent", 1_500_064, 1505) in writer.scalars
    assert ("cadenza/world/blocks 9 to 11/codec_error", 0.0065, 1505) in writer.scalars
    assert not writer.closed  # it is the giver's


def test_tensorboard_leaves_out_what_was_not_measured() -> None:
    writer = Writer()
    tensorboard(writer)(replace(REPORT, drift=None, codec_error=None, level_name="", fragment_name=""))
    tags = {tag for tag, _, _ in writer.scalars}
    assert "cadenza/1/3/stall_s" in tags
    assert not {tag for tag in tags if "drift" in tag or "error" in tag}


def test_tensorboard_closes_the_writer_that_it_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    writer = Writer()
    monkeypatch.setattr(cadenza.observers.loggers, "_writer_at", lambda path: writer)
    tensorboard(tmp_path).close()
    assert writer.closed


def test_without_tensorboard_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ImportError, match=r"pip install 'cadenza\[tensorboard\]'"):
        tensorboard(tmp_path / "runs")


def test_tensorboard_refuses_what_cannot_write() -> None:
    with pytest.raises(TypeError, match=r"a folder or a SummaryWriter .*; got 3"):
        tensorboard(3)


class WandbRun:
    def __init__(self, step: int) -> None:
        self.step = step
        self.rows: list[tuple[int, dict[str, float]]] = []

    def define_metric(self, name: str, **options: object) -> None:
        pass

    def log(self, figures: dict[str, float], step: int) -> None:
        self.rows.append((step, figures))


def test_wandb_never_goes_back_behind_the_runs_own_count() -> None:
    run = WandbRun(step=4000)  # its user logs twice a step
    wandb(run)(REPORT)
    [(step, figures)] = run.rows
    assert step == 4000
    assert figures["cadenza/step"] == 1505
    assert figures["cadenza/world/blocks 9 to 11/drift"] == 0.0125


def test_wandb_refuses_what_is_no_run() -> None:
    with pytest.raises(TypeError, match=r"the run that wandb\.init\(\) returned; got 'cadenza'"):
        wandb("cadenza")


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_without_a_loggers_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=f"pip install {name}"):
        {"wandb": wandb, "mlflow": mlflow}[name]()


def test_mlflow_gets_names_that_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    class Package:
        rows: ClassVar[list[Any]] = []

        def log_metrics(self, figures: dict[str, float], step: int, run_id: str) -> None:
            self.rows.append((run_id, step, set(figures)))

    monkeypatch.setitem(sys.modules, "mlflow", Package())
    mlflow("a1b2")(replace(REPORT, kind="failed", fragment_name="head[0]"))
    names = {f"cadenza/world/head_0_/{name}" for name in ("failed", "bytes_sent", "stall_s")}
    assert Package.rows == [("a1b2", 1505, names)]
    with pytest.raises(TypeError, match=r"run_id is the id of an MLflow run, a text; got 3"):
        mlflow(3)  # type: ignore[arg-type]

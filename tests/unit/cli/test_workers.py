"""What the front makes of the program that looks after its workers: its reports, its end, and the processes it has."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from cadenza.cli.display import PlainDisplay
from cadenza.cli.exit_codes import BAD_INPUT, FULL_DISK
from cadenza.cli.failures import TrainingFailedError
from cadenza.cli.following import Follower
from cadenza.cli.launching import Crash, Workers
from cadenza.cli.plans import SupervisorPlan, WorkerCommand
from cadenza.cli.programs import Program, program_for
from cadenza.cli.watching import watch
from cadenza.errors import UsageError
from cadenza.training.config import Config
from cadenza.training.metrics import metrics_file

START_A_WORKER = """
import subprocess, sys, time
arguments = ["cadenza.cli.worker", "cadenza.cli.store"]
children = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", name]) for name in arguments]
time.sleep(60)
"""


def workers_of(code: str, folder: Path, **options: bool) -> Workers:
    return Workers(Program("The program", "program", [sys.executable, "-c", code], leads=True, **options), folder)


def ended(workers: Workers) -> bool:
    while (well := workers.poll()) is None:
        time.sleep(0.01)
    return well


def reporting(code: int, *reports: object) -> str:
    lines = "\n".join(json.dumps(report) for report in reports)
    return f"import sys; print({lines!r}); sys.exit({code})"


def test_a_program_that_ends_well_has_workers_that_did(tmp_path: Path) -> None:
    workers = workers_of("print('noise of a library')", tmp_path)
    assert ended(workers)
    assert (workers.crashes, workers.problem) == ([], "")


def test_failures_and_problems_are_what_the_program_reports(tmp_path: Path) -> None:
    failures = [{"worker": 1, "exitcode": -9}, {"worker": 0, "exitcode": 1}]
    workers = workers_of(reporting(1, {"event": "failed", "failures": failures}), tmp_path)
    assert not ended(workers)
    assert workers.crashes == [Crash(1, -9), Crash(0, 1)]
    workers = workers_of(reporting(1, {"event": "problem", "error": "no store"}), tmp_path)
    assert not ended(workers)
    assert workers.problem == "no store"


def test_a_program_that_is_killed_is_named(tmp_path: Path) -> None:
    workers = workers_of("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", tmp_path)
    assert not ended(workers)
    assert workers.problem == "The program was ended by SIGKILL."


def test_only_workers_are_found_and_all_is_killed(tmp_path: Path) -> None:
    workers = workers_of(START_A_WORKER, tmp_path)
    try:
        deadline = time.monotonic() + 30
        while not workers.processes() and time.monotonic() < deadline:
            time.sleep(0.02)
        [process] = workers.processes()
        assert process.cmdline()[-1] == "cadenza.cli.worker"
        started = psutil.Process(process.ppid()).children()
        assert len(started) == 2
    finally:
        workers.kill()
    assert workers.poll() is False
    assert not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in started)


@pytest.mark.parametrize("passes_interrupts", [True, False])
def test_ctrl_c_is_passed_on_as_such_only_where_it_means_something_else(
    tmp_path: Path, passes_interrupts: bool
) -> None:
    sent = []

    class Process:
        send_signal = staticmethod(sent.append)

    workers = workers_of("", tmp_path, passes_interrupts=passes_interrupts)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        workers.ask(Process(), number)
    first = signal.SIGINT if passes_interrupts else signal.SIGTERM
    assert sent == [first, signal.SIGTERM, signal.SIGTERM]
    ended(workers)


def test_elastic_workers_have_a_supervisor_and_fixed_ones_an_agent() -> None:
    logs = Path("runs/first/logs/launch-001")
    fixed = program_for(Path("runs/first"), Config(), logs, None)
    elastic = program_for(Path("runs/first"), Config().with_(**{"faults.policy": "shrink"}), logs, None)
    assert (fixed.title, elastic.title) == ("The elastic agent", "The supervisor")
    assert not elastic.passes_interrupts  # on one node, whoever is asked stops all


@pytest.mark.parametrize(
    ("name", "value"),
    [("CADENZA_JOB", "caf\udce9"), ("CADENZA_SECRET", "caf\udce9"), ("CADENZA_ACCEPT_ROLLBACK", "perhaps")],
)
def test_what_no_worker_could_join_with_is_refused_before_one_is_started(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    logs = Path("runs/first/logs/launch-001")
    with pytest.raises(UsageError, match=name):
        program_for(Path("runs/first"), Config().with_(**{"faults.policy": "shrink"}), logs, None)


FAILED = {"kind": "end", "step": 25, "time": 9.0, "status": "failed"}


@pytest.mark.parametrize(
    ("failures", "ends", "said"),
    [
        # It failed first, and was slow to end: the launcher's SIGTERM is not why.
        ([(0, 1), (1, -15)], {0: "Stopped, because worker 1 failed. (x)", 1: "no data"}, "Worker 1 failed: no data."),
        ([(0, -15), (1, 1)], {}, "Worker 1 failed (exit code 1): it said nothing."),
        ([(0, 4)], {}, "Worker 0 failed (exit code 4): there is no room left on the disk of {run}."),
        ([(0, 4)], {0: "The disk is full."}, "Worker 0 failed (exit code 4): The disk is full."),
        ([(0, 1), (1, -9)], {0: "Stopped, because worker 1 failed. (x)"}, "Worker 1 failed: It was ended by SIGKILL"),
    ],
)
def test_the_worker_that_failed_first_is_named_with_its_reason(
    tmp_path: Path, failures: list[tuple[int, int]], ends: dict[int, str], said: str
) -> None:
    reported = [{"worker": worker, "exitcode": code} for worker, code in failures]
    workers = workers_of(reporting(1, {"event": "failed", "failures": reported}), tmp_path)
    follower = Follower(tmp_path / "metrics")
    (tmp_path / "metrics").mkdir()
    for worker, error in ends.items():
        (tmp_path / "metrics" / metrics_file(worker)).write_text(json.dumps({**FAILED, "error": error}) + "\n")
    display = PlainDisplay(Console(quiet=True), "")
    with pytest.raises(TrainingFailedError) as raised:
        watch(workers, follower, display, folder=tmp_path, logs=tmp_path / "logs" / "launch-001")
    assert str(raised.value).startswith(said.format(run=tmp_path))


@pytest.mark.parametrize(
    ("code", "starts"), [(FULL_DISK, 1), (BAD_INPUT, 1), (1, 3)], ids=["full disk", "bad input", "failure"]
)
def test_who_would_fail_in_the_same_way_is_not_started_again(
    tmp_path: Path, store: int, code: int, starts: int
) -> None:
    for name in ("metrics", "logs"):
        (tmp_path / name).mkdir()
    command = WorkerCommand(0, [sys.executable, "-c", f"raise SystemExit({code})"], {})
    places = {"metrics": str(tmp_path / "metrics"), "logs": str(tmp_path / "logs"), "host": "127.0.0.1", "port": store}
    plan = SupervisorPlan([command], job="job", store=[], restarts=2, eager=True, **places)
    arguments = [sys.executable, "-m", "cadenza.cli.supervisor", plan.to_json()]
    assert subprocess.run(arguments, capture_output=True, timeout=120, check=False).returncode == 1
    assert len(list((tmp_path / "logs").glob("*.err"))) == starts

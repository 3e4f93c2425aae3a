"""What the front makes of the program that looks after its workers: its reports, its end, and the processes it has."""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from cadenza.cli.launching import Crash, Workers
from cadenza.cli.programs import Program, program_for
from cadenza.training.config import Config

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

"""Whoever asks the supervisor to end reaches every worker, also one that is only just being started."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cadenza.cli.exit_codes import NOBODY_LEFT
from cadenza.cli.plans import SupervisorPlan, WorkerCommand

# A worker that says that it runs, and what it was asked; one that is forgotten ends by itself, for the test's sake.
WORKER = """
import os, signal, sys, time
from pathlib import Path

folder, worker, first_code = Path(sys.argv[1]), os.environ["RANK"], int(sys.argv[2])
if first_code and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    sys.exit(first_code)

def note(number, frame):
    with (folder / f"asked-{worker}").open("a") as file:
        file.write(f"{number} ")

signal.signal(signal.SIGTERM, note)
signal.signal(signal.SIGINT, note)
(folder / f"runs-{worker}").touch()
deadline = time.monotonic() + 15
while not (folder / f"asked-{worker}").exists():
    if time.monotonic() > deadline:
        sys.exit(3)
    time.sleep(0.01)
time.sleep(0.3)  # a signal that comes twice is noted
"""


# A supervisor that is asked to end after it has started a worker, and before it has it in its list.
SUPERVISOR = """
import os, sys, time
from pathlib import Path
from cadenza.cli import supervisor

folder, attempt_asked, number = Path(sys.argv.pop()), int(sys.argv.pop()), int(sys.argv.pop())
start_workers = supervisor.start_workers

def start(name, commands, logs, *, attempt):
    context = start_workers(name, commands, logs, attempt=attempt)
    if attempt == attempt_asked:
        while not (folder / "runs-0").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), number)
    return context

supervisor.start_workers = start
sys.exit(supervisor.main())
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("first_code", [0, 1, NOBODY_LEFT], ids=["first start", "restart", "all begin anew"])
def test_a_signal_reaches_a_worker_that_is_just_being_started(
    tmp_path: Path, store: int, first_code: int, number: signal.Signals
) -> None:
    commands = [WorkerCommand(0, [sys.executable, "-c", WORKER, str(tmp_path), str(first_code)], {})]
    if not first_code:
        commands.append(WorkerCommand(1, [sys.executable, "-c", "raise SystemExit(1)"], {}))
    for name in ("metrics", "logs"):
        (tmp_path / name).mkdir()
    places = {"metrics": str(tmp_path / "metrics"), "logs": str(tmp_path / "logs"), "host": "127.0.0.1", "port": store}
    plan = SupervisorPlan(commands, job="job", store=[], restarts=2, eager=True, **places)
    asked = [plan.to_json(), str(int(number)), str(int(first_code > 0)), str(tmp_path)]
    arguments = [sys.executable, "-c", SUPERVISOR, *asked]
    ended = subprocess.run(arguments, capture_output=True, text=True, timeout=120, check=False)
    assert (tmp_path / "asked-0").exists(), f"it was never asked: {ended.stderr}"
    assert (tmp_path / "asked-0").read_text() == f"{int(number)} ", "twice would mean: at once, without saving"
    assert ended.returncode == 0, ended.stderr
    logs = sorted(path.name for path in (tmp_path / "logs").glob("*.err"))
    assert logs == ["worker-00000.attempt-1.err", "worker-00000.err"][not first_code :], "nobody is started after it"

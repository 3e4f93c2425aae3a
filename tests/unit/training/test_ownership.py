"""A run has one owner at a time; what a crash leaves of one is known to be stale."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cadenza.cli.app import main
from cadenza.errors import UsageError
from cadenza.training import Config, runs
from cadenza.training.ownership import owning
from support import tiny_task


def test_a_second_owner_is_refused_with_the_name_of_the_first(tmp_path: Path) -> None:
    with owning(tmp_path) as lock:
        with pytest.raises(UsageError, match=rf"process {os.getpid()} on .*, since \d+-"), owning(tmp_path):
            pass
        assert lock.before is None
    with owning(tmp_path) as lock:
        assert lock.before is None  # the first one has ended as it should


def test_an_owner_that_was_killed_is_recognised(tmp_path: Path) -> None:
    code = "import os, sys; from pathlib import Path; from cadenza.training.ownership import owning\n"
    code += "with owning(Path(sys.argv[1])): os.kill(os.getpid(), 9)"
    killed = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)])
    killed.wait()
    with owning(tmp_path) as lock:
        assert lock.before is not None
        assert lock.before.process == killed.pid


def test_a_run_is_owned_until_those_have_ended_that_were_handed_the_lock(tmp_path: Path) -> None:
    with owning(tmp_path) as lock:
        assert lock.file is not None
        worker = subprocess.Popen(["sleep", "600"], pass_fds=[lock.file])
    try:
        with pytest.raises(UsageError, match="is being trained by"), owning(tmp_path):
            pass
    finally:
        worker.kill()
        worker.wait()
    with owning(tmp_path):
        pass


def test_the_nodes_of_one_launch_share_a_run_and_those_of_another_do_not(tmp_path: Path) -> None:
    with owning(tmp_path, job="a"), owning(tmp_path, job="a") as second:
        assert second.before is None
        for job in ("b", ""):
            with pytest.raises(UsageError, match="is being trained by"), owning(tmp_path, job=job):
                pass


def test_a_second_resume_is_refused_and_changes_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = runs.create(tmp_path / "run", Config(task=tiny_task.NAME, steps=4))
    before = run.config_file.read_text()
    with owning(run.folder), pytest.raises(SystemExit) as end:
        main(["train", "--resume", str(run.folder), "--steps", "9"])
    assert end.value.code == 2
    assert f"process {os.getpid()} on" in " ".join(capfd.readouterr().err.split())
    assert run.config_file.read_text() == before
    assert not (run.folder / "logs").exists()


def test_another_task_asks_for_force(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = runs.create(tmp_path / "run", Config(task=tiny_task.NAME, steps=4))
    with pytest.raises(SystemExit) as end:
        main(["train", "other.task:build", "--resume", str(run.folder)])
    assert end.value.code == 2
    assert "--force" in capfd.readouterr().err
    with pytest.raises(SystemExit):
        main(["train", "other.task:build", "--resume", str(run.folder), "--force"])
    assert 'there is no module "other"' in " ".join(capfd.readouterr().err.split())
    assert json.loads((run.folder / "owner.json").read_text() or "null") is None

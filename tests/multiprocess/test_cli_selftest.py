"""`cadenza selftest` for real: on this machine all of it passes, and a fault that is planted is found."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cadenza.cli.app import main
from cadenza.codecs import native


def selftest(*arguments: str, cwd: Path, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cadenza.cli.selftest", *arguments]
    path = os.pathsep.join(filter(None, sys.path))
    environment = {**os.environ, "PYTHONPATH": path, "COLUMNS": "100", **(env or {})}
    return subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, check=False)


@pytest.mark.timeout(400)
def test_all_of_it_passes_here(tmp_path: Path) -> None:
    done = selftest("--json", "selftest.json", "--timeout", "100", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads((tmp_path / "selftest.json").read_text())
    verdicts = {(result["part"], result["where"]): result["verdict"] for result in told["results"]}
    assert told["passed"] is True
    for part in ("drop-in", "strategies", "codecs", "overlap", "resume"):
        assert verdicts[part, "cpu · shared memory"] == verdicts[part, "cpu · gloo"] == "passed"
    assert verdicts["killed-worker", "cpu · gloo"] == "passed"
    assert done.stdout.count("✓") >= 2 * 11
    assert "✗" not in done.stdout
    assert told["versions"]["torch"]
    assert str(Path.home()) not in json.dumps(told)


@pytest.mark.skipif(native.compiler() is None, reason="needs a C compiler")
@pytest.mark.timeout(200)
def test_a_codec_that_is_wrong_by_a_bit_is_found(tmp_path: Path) -> None:
    wrong = tmp_path / "cc"
    wrong.write_text(f'#!/bin/sh\nexec {shutil.which("cc")} -Drintf=floorf "$@"\n')  # rounds down
    wrong.chmod(0o755)
    env = {"CC": str(wrong), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = selftest("--only", "codecs", "--workers", "3", "--json", "it.json", cwd=tmp_path, env=env)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "✗" in done.stdout
    assert "int8 by native: other bytes for normal values" in done.stdout
    assert "For a bug report, attach it.json" in done.stdout
    told = json.loads((tmp_path / "it.json").read_text())
    assert told["passed"] is False
    assert "AssertionError" in told["results"][0]["details"][0]
    assert {result["part"] for result in told["results"]} == {"codecs"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--only", "codec"], 'no part "codec"'),
        (["--workers", "2"], "between 3"),
        (["--minutes", "0"], "more than 0"),
        (["--json", "/nowhere/it.json"], "no folder"),
    ],
)
def test_bad_input_is_told_in_a_paragraph(capsys: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["selftest", *arguments])
    assert ended.value.code == 2
    assert words in " ".join(capsys.readouterr().err.split())

"""What the command answers without torch: help, the version, mistakes in settings, a misspelt task."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from cadenza.cli.app import app

# Runs lines of the command one after the other in one process, in which torch cannot be imported.
WITHOUT_TORCH = """
import json, sys
class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise AssertionError("torch was imported")
sys.meta_path.insert(0, NoTorch())
from cadenza.cli.app import main
for line in json.loads(sys.argv[1]):
    try:
        main(line)
    except SystemExit as end:
        print(f"exit {end.code}", flush=True)
"""

MISTAKES = [
    (["--set", "lunch.workers=2"], "lunch: there is no such key"),
    (["--strategy", "dilocco"], "there is no strategy of this name"),
    (["--set", "strategy.outer_lr=-1"], "lr must be a number above 0"),
    (["--codec", "int9"], "there is no codec of this name"),
    (["--codec", "topk", "--strategy", "streaming_diloco", "--delay", "-1"], "delay"),
    (["--faults", "shrink", "--set", "faults.quorum=2"], "faults.quorum"),
    (["--faults", "shrink", "--strategy", "ddp"], "does not go with"),
    (["--steps", "0"], "steps = 0"),
    (["--config", "wrong.toml"], "In wrong.toml"),
    (["nowhere.task:build"], 'there is no module "nowhere"'),
    (["cadenza.training.standard_library_gpt:biuld"], 'did you mean "build"?'),
    (["--resume", "nowhere"], "There is no folder nowhere"),
]


def answers(folder: Path, *lines: list[str]) -> list[str]:
    """What the command prints for each line, up to its exit code."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, json.dumps(lines)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=100,
        env={"PYTHONPATH": ":".join(filter(None, sys.path)), "COLUMNS": "300", "PATH": "/usr/bin:/bin"},
    )
    assert done.returncode == 0, done.stderr
    return (done.stdout + done.stderr).split("\n")


def test_help_and_version_come_without_torch(tmp_path: Path) -> None:
    names = [command.name or command.callback.__name__ for command in app.registered_commands if command.callback]
    assert {"train", "report", "doctor", "bench"} <= set(names)
    lines = [["--version"], ["--help"], *([name, "--help"] for name in names), ["train", "--print-config"]]
    lines += [["recipes", "list"], ["recipes", "show", "gpt-ddp"], ["recipes", "copy", "gpt-ddp"]]
    printed = answers(tmp_path, *lines)
    assert printed.count("exit 0") == len(lines)


def test_mistakes_are_told_without_torch(tmp_path: Path) -> None:
    (tmp_path / "wrong.toml").write_text("[strategy]\nname = 'diloco'\nperiod = 0\n")
    printed = answers(tmp_path, *(["train", *words] for words, _ in MISTAKES))
    assert printed.count("exit 2") == len(MISTAKES)
    told = [line for line in printed if line.startswith("Error: ")]
    for line, (_, words) in zip(told, MISTAKES, strict=True):
        assert words in line
    assert not (tmp_path / "runs").exists()


def test_public_names_bring_torch_and_strategies_do_not() -> None:
    code = (
        "import sys, cadenza.presets; assert 'torch' not in sys.modules; cadenza.attach; assert 'torch' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

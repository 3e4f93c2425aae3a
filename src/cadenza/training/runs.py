"""A run is a folder: its configuration, where it ran, its metrics, its checkpoints, how it ended.

::

    config.toml        what was asked for
    owner.json         who trains it now (cadenza.training.ownership)
    environment.json   versions, the git commit, hosts
    metrics/           lines of JSON, a file a worker (cadenza.training.metrics)
    tensorboard/       the same as TensorBoard events
    checkpoints/       step-00000100/ and so on, the last few
    model.safetensors  the trained model, once the run has finished
    best.safetensors   the best averaged model, and best.json which it is, if `checkpoint.keep_best` asks for it
    summary.json       how it ended
    report.html        the page that `cadenza report` makes

>>> import tempfile
>>> run = create(Path(tempfile.mkdtemp()) / "first", Config(steps=10))
>>> open_run(run.folder).config().steps
10
"""

from __future__ import annotations

import json
import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cadenza.common.later import torch
from cadenza.errors import CadenzaError, UsageError
from cadenza.training.config import Config, read_config
from cadenza.training.metrics import Metrics, MetricsWriter, Stopwatch, metrics_file, plain, read_lines
from cadenza.version import __version__

__all__ = [
    "Metrics",
    "MetricsWriter",
    "Run",
    "Stopwatch",
    "create",
    "describe_environment",
    "open_run",
    "read_metrics",
    "write_model",
]


@dataclass(frozen=True)
class Run:
    """A run's folder, and where everything in it is.

    >>> Run(Path("runs/first")).checkpoint(100).as_posix()
    'runs/first/checkpoints/step-00000100'
    """

    folder: Path

    @property
    def config_file(self) -> Path:
        return self.folder / "config.toml"

    @property
    def environment_file(self) -> Path:
        return self.folder / "environment.json"

    @property
    def metrics(self) -> Path:
        return self.folder / "metrics"

    @property
    def tensorboard(self) -> Path:
        return self.folder / "tensorboard"

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def model_file(self) -> Path:
        return self.folder / "model.safetensors"

    @property
    def best_model(self) -> Path:
        return self.folder / "best.safetensors"

    @property
    def best_note(self) -> Path:
        return self.folder / "best.json"

    @property
    def summary_file(self) -> Path:
        return self.folder / "summary.json"

    @property
    def report_file(self) -> Path:
        return self.folder / "report.html"

    def metrics_of(self, worker: int) -> Path:
        """Return the file that a worker writes its lines to."""
        return self.metrics / metrics_file(worker)

    def checkpoint(self, step: int) -> Path:
        """Return the folder of the checkpoint of a step."""
        return self.checkpoints / f"step-{step:08}"

    def config(self) -> Config:
        """Return the configuration that the run was made with."""
        return read_config(self.config_file)

    def write_config(self, config: Config) -> None:
        """Replace the configuration, as when a run is resumed for more steps."""
        _write(self.config_file, config.to_toml())

    def environment(self) -> dict[str, Any]:
        """Return where the run was made, and on which hosts its workers run; {} if that was not written."""
        return _read_json(self.environment_file)

    def write_environment(self, environment: Mapping[str, Any]) -> None:
        _write(self.environment_file, json.dumps(environment, indent=1))

    def best(self) -> dict[str, Any] | None:
        """Return which step's model is kept as the best, by which metric and at which value; None if none is."""
        return _read_json(self.best_note) or None

    def write_best(self, best: Mapping[str, Any], model: Path) -> None:
        """Keep the model in a file as the best one."""
        note = _written(self.best_note, json.dumps(best))
        os.replace(model, self.best_model)
        os.replace(note, self.best_note)

    def candidate(self, step: int) -> Path:
        """Return the file of an average that may turn out to be the best model."""
        return self.folder / f"best-candidate-{step:08}.safetensors"

    def forget_best(self, *, kept: bool = False) -> None:
        """Delete candidates that nobody has judged and, unless it is to be kept, the best model."""
        for path in self.folder.glob("best-candidate-*"):
            path.unlink(missing_ok=True)
        if not kept:
            self.best_note.unlink(missing_ok=True)
            self.best_model.unlink(missing_ok=True)

    def summary(self) -> dict[str, Any] | None:
        """Return how the run ended; None if it did not."""
        return _read_json(self.summary_file) or None

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        _write(self.summary_file, json.dumps(plain(summary), indent=1, allow_nan=False))


def create(folder: str | Path, config: Config) -> Run:
    """Make the folder of a new run, with its configuration and what is known of this machine.

    >>> import tempfile
    >>> create(Path(tempfile.mkdtemp()) / "first", Config()).config_file.name
    'config.toml'
    """
    run = Run(Path(folder))
    if run.folder.exists() and (not run.folder.is_dir() or any(run.folder.iterdir())):
        raise UsageError(
            f"{run.folder} is there already, and is not an empty folder: give the new run another one, or go on with "
            "that run by `cadenza train --resume`."
        )
    try:
        run.metrics.mkdir(parents=True)
    except OSError as error:
        raise UsageError(f"The folder {run.folder} cannot be made: {error.strerror}.") from None
    run.write_environment(describe_environment())
    run.write_config(config)
    return run


def open_run(path: str | Path) -> Run:
    """Return the run in a folder; raise if it is not one.

    >>> open_run("no/such/folder")
    Traceback (most recent call last):
      ...
    cadenza.errors.UsageError: There is no folder no/such/folder.
    """
    run = Run(Path(path))
    if not run.folder.exists():
        raise UsageError(f"There is no folder {run.folder}.")
    if not run.config_file.is_file():
        raise UsageError(
            f"{run.folder} is not a run: it has no config.toml. `cadenza train` makes runs, in runs/ unless told "
            "otherwise."
        )
    return run


def read_metrics(folder: str | Path) -> Metrics:
    """Return all metrics that the workers of a run have written, without stale ones.

    >>> import tempfile
    >>> read_metrics(create(Path(tempfile.mkdtemp()) / "first", Config()).folder).workers
    []
    """
    return read_lines(open_run(folder).metrics)


def describe_environment() -> dict[str, Any]:
    """Return versions, the machine and the git commit, as far as they are known.

    >>> describe_environment()["cadenza"] == __version__
    True
    """
    return {
        "cadenza": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": socket.gethostname(),
        "cpus": os.cpu_count(),
        "cuda": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "git": _git_commit(),
        "command": sys.argv,
        "created": round(time.time(), 3),
    }


def write_model(target: Path, model: torch.nn.Module) -> None:
    """Write a model, which all workers have alike, to a file."""
    from safetensors import SafetensorError
    from safetensors.torch import save_model

    from cadenza.checkpoint.files import as_os_error

    partial = target.with_suffix(f".{socket.gethostname()}-{os.getpid()}.partial")
    try:
        save_model(model, str(partial))
        os.replace(partial, target)
    except (OSError, SafetensorError) as error:
        partial.unlink(missing_ok=True)
        reason = as_os_error(error, target)
        raise CadenzaError(f"The model could not be written to {target}: {reason.strerror}.") from reason


def _git_commit() -> str | None:
    """Return the commit of the current folder, with a mark if it holds changes; None where there is no git."""
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return described.stdout.strip() or None


def _write(path: Path, text: str) -> None:
    """Write a file so that readers find the old one or the new one, and never a part, whoever else writes it."""
    os.replace(_written(path, text), path)


def _written(path: Path, text: str) -> Path:
    """Return a file beside the path that holds the text, to be put in its place."""
    partial = path.with_name(f"{path.name}.{socket.gethostname()}-{os.getpid()}.partial")
    try:
        partial.write_text(text)
    except OSError:  # a full disk, most likely: leave it what room there is
        partial.unlink(missing_ok=True)
        raise
    return partial


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}

"""Rounds as curves in TensorBoard, W&B and MLflow, each figure at the step at which its round landed.

They are given on one rank only, the one that logs. Nothing here is imported before it is asked for.
"""

from __future__ import annotations

import importlib
import os
import re
from typing import Any, Protocol

from cadenza.reports import RoundReport

__all__ = ["MLflow", "TensorBoard", "WandB", "mlflow", "tensorboard", "wandb"]

_NOT_IN_A_NAME = re.compile(r"[^\w\-. :/]")  # of MLflow's metrics


class _Writer(Protocol):
    def add_scalar(self, tag: str, scalar_value: float, global_step: int, /) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """An observer that draws a round's figures as TensorBoard's curves; made by `tensorboard`.

    >>> class Paper:
    ...     def add_scalar(self, tag, value, step):
    ...         print(tag, value, step)
    >>> TensorBoard(Paper())(RoundReport.example(drift=0.02))
    cadenza/world/all/bytes_sent 3000064 500
    cadenza/world/all/encoded_bytes 2000000 500
    cadenza/world/all/stall_s 0.01 500
    cadenza/world/all/wire_s 0.25 500
    cadenza/world/all/participants 4 500
    cadenza/world/all/drift 0.02 500
    """

    def __init__(self, writer_or_path: Any) -> None:
        self._owned = isinstance(writer_or_path, str | os.PathLike)
        self._writer: _Writer = _writer_at(writer_or_path) if self._owned else writer_or_path
        if not callable(getattr(self._writer, "add_scalar", None)):
            raise TypeError(
                f"tensorboard() takes a folder or a SummaryWriter (something with add_scalar); got {writer_or_path!r}."
            )

    def __call__(self, report: RoundReport) -> None:
        for name, value in report.figures(prefix="cadenza").items():
            self._writer.add_scalar(name, value, report.landed_at)

    def close(self) -> None:
        """Close the writer if it was made here; one that was given belongs to its giver."""
        if self._owned:
            self._writer.close()


def tensorboard(writer_or_path: Any) -> TensorBoard:
    """Return an observer that writes to TensorBoard: into a folder, or by a SummaryWriter of yours.

    A folder needs the tensorboard package: `pip install 'cadenza[tensorboard]'`.

    >>> class Writer:
    ...     def add_scalar(self, tag, value, step):
    ...         pass
    >>> tensorboard(Writer())(RoundReport.example(step=16))
    """
    return TensorBoard(writer_or_path)


class WandB:
    """An observer that logs a round's figures to a run of Weights & Biases; made by `wandb`.

    W&B drops what is logged at an earlier step than the last. So figures go to the step at which the round landed, or
    to the run's own count if that is further; the charts' axis is `cadenza/step`, which is true in any case.

    >>> class Paper:
    ...     step = 0
    ...     def define_metric(self, name, **options):
    ...         pass
    ...     def log(self, figures, step):
    ...         print(step, figures)
    >>> WandB(Paper())(RoundReport.example(step=16, kind="failed", delay=2))
    18 {'cadenza/step': 18, 'cadenza/world/all/failed': 1, ...}
    """

    def __init__(self, run: Any) -> None:
        if not all(callable(getattr(run, name, None)) for name in ("log", "define_metric")):
            raise TypeError(f"wandb() takes the run that wandb.init() returned; got {run!r}.")
        self._run = run
        run.define_metric("cadenza/step", hidden=True)
        run.define_metric("cadenza/*", step_metric="cadenza/step")

    def __call__(self, report: RoundReport) -> None:
        figures = {"cadenza/step": report.landed_at, **report.figures(prefix="cadenza")}
        self._run.log(figures, step=max(report.landed_at, self._run.step))


def wandb(run: Any = None) -> WandB:
    """Return an observer that logs to a run of Weights & Biases: the given one, or the one that `wandb.init()` began.

    >>> class Run:
    ...     step = 0
    ...     def define_metric(self, name, **options):
    ...         pass
    ...     def log(self, figures, step):
    ...         pass
    >>> wandb(Run())(RoundReport.example(step=16))
    """
    if run is None:
        package = _package("wandb")
        run = package.run
        if run is None:
            raise ValueError("There is no W&B run: call wandb.init() first, on the rank that logs, or pass its run.")
    return WandB(run)


class MLflow:
    """An observer that logs a round's figures to a run of MLflow; made by `mlflow`.

    >>> class Paper:
    ...     def log_metrics(self, figures, step, run_id):
    ...         print(run_id, step, figures)
    >>> MLflow(Paper(), "a1b2")(RoundReport.example(step=16, kind="failed"))
    a1b2 16 {'cadenza/world/all/failed': 1, ...}
    """

    def __init__(self, package: Any, run_id: str) -> None:
        self._package = package
        self.run_id = run_id

    def __call__(self, report: RoundReport) -> None:
        figures = {_NOT_IN_A_NAME.sub("_", name): value for name, value in report.figures(prefix="cadenza").items()}
        self._package.log_metrics(figures, step=report.landed_at, run_id=self.run_id)


def mlflow(run_id: str | None = None) -> MLflow:
    """Return an observer that logs to a run of MLflow: the one of this id, or the active one.

    >>> import sys, types
    >>> sys.modules["mlflow"] = types.SimpleNamespace(active_run=lambda: None)  # to show what is said without a run
    >>> mlflow()
    Traceback (most recent call last):
      ...
    ValueError: There is no active MLflow run: call mlflow.start_run() first, on the rank that logs, or pass run_id.
    >>> del sys.modules["mlflow"]
    """
    package = _package("mlflow")
    if run_id is None:
        active = package.active_run()
        if active is None:
            raise ValueError(
                "There is no active MLflow run: call mlflow.start_run() first, on the rank that logs, or pass run_id."
            )
        run_id = active.info.run_id
    if not isinstance(run_id, str):
        raise TypeError(f"run_id is the id of an MLflow run, a text; got {run_id!r}. Of a run it is run.info.run_id.")
    return MLflow(package, run_id)


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            f"cadenza.observers.{name} needs the package {name}, which is not installed; install it with: pip install "
            f"{name}. Without it, use cadenza.observers.jsonl."
        ) from error


def _writer_at(path: str | os.PathLike[str]) -> _Writer:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError(
            f"Writing TensorBoard files to {os.fspath(path)!r} needs the tensorboard package, which is not installed; "
            "install it with: pip install 'cadenza[tensorboard]'. Without it, use cadenza.observers.jsonl."
        ) from error
    writer: _Writer = SummaryWriter(os.fspath(path))
    return writer

"""Curves of a run for TensorBoard, W&B and MLflow, drawn by the worker that leads.

A run that is resumed goes on in its own curves. A logger that cannot be had is told of, and never ends a training.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from cadenza import RoundReport, observers
from cadenza.training.runs import Run

__all__ = ["BOARDS", "Board", "open_boards"]

_MLFLOW_ID = "mlflow_run_id"  # the file of a run that holds it


class Board(Protocol):
    """Curves over the steps."""

    def observe_round(self, report: RoundReport) -> None:
        """Draw a round's figures."""
        ...

    def draw(self, step: int, figures: Mapping[str, float]) -> None:
        """Add a point to each curve."""
        ...

    def close(self) -> None:
        """Write what waits."""
        ...


class TensorBoardBoard:
    """Events in the run's folder `tensorboard`."""

    def __init__(self, run: Run, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # What a resumed run draws again replaces what was drawn.
        self._writer = SummaryWriter(str(run.tensorboard), purge_step=step + 1)
        self.observe_round = observers.tensorboard(self._writer)

    def draw(self, step: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandbBoard:
    """A run of W&B, of the same id after a resume; WANDB_MODE, WANDB_PROJECT and its other variables count."""

    def __init__(self, run: Run, step: int) -> None:
        import wandb

        made = f"{run.folder.name}/{run.environment().get('created')}"
        self._run = wandb.init(
            project=None if wandb.setup().settings.project else "cadenza",
            id=hashlib.blake2b(made.encode(), digest_size=8).hexdigest(),
            name=run.folder.name,
            dir=str(run.folder),
            resume="allow",
            config=run.config().model_dump(mode="json"),
        )
        self.observe_round = observers.wandb(self._run)
        self._run.define_metric("*", step_metric="cadenza/step")

    def draw(self, step: int, figures: Mapping[str, float]) -> None:
        self._run.log({"cadenza/step": step, **figures}, step=max(step, self._run.step))

    def close(self) -> None:
        self._run.finish()


class MLflowBoard:
    """A run of MLflow, the same after a resume; MLFLOW_TRACKING_URI says where, MLFLOW_EXPERIMENT_NAME in which."""

    def __init__(self, run: Run, step: int) -> None:
        import mlflow

        known = run.folder / _MLFLOW_ID
        self._package = mlflow
        self._run = mlflow.start_run(
            run_id=known.read_text() if known.exists() else None, run_name=run.folder.name, log_system_metrics=False
        )
        known.write_text(self._run.info.run_id)
        self.observe_round = observers.mlflow(self._run.info.run_id)
        if not step:
            mlflow.log_params(dict(_flat(run.config().model_dump(mode="json"))))

    def draw(self, step: int, figures: Mapping[str, float]) -> None:
        self._package.log_metrics(dict(figures), step=step, run_id=self._run.info.run_id)

    def close(self) -> None:
        self._package.end_run()


def _flat(settings: Mapping[str, Any], under: str = "") -> Iterator[tuple[str, Any]]:
    """Yield settings by their keys, as the configuration's file has them.

    >>> dict(_flat({"steps": 10, "strategy": {"period": 4}}))
    {'steps': 10, 'strategy.period': 4}
    """
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{under}{name}.")
        else:
            yield f"{under}{name}", value


BOARDS: dict[str, Callable[[Run, int], Board]] = {
    "tensorboard": TensorBoardBoard,
    "wandb": WandbBoard,
    "mlflow": MLflowBoard,
}


def open_boards(run: Run, step: int, warn: Callable[[str], Any]) -> list[Board]:
    """Return the boards that the run's configuration asks for; tell of those that there cannot be."""
    boards = []
    for name, make in BOARDS.items():
        if getattr(run.config().log, name):
            try:
                boards.append(make(run, step))
            except ImportError as error:
                warn(f"There is no log for {name}, since it is not installed ({error}).")
            except Exception as error:  # of the logger's own: no network, no key
                warn(f"There is no log for {name}: {error}")
    return boards

"""Keeping the best model of a run: the workers' average at the evaluation whose metric was the best.

At an evaluation, one worker writes the average down as a candidate. Once the metric is known, the candidate becomes
`best.safetensors`, with `best.json` beside it, or is deleted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection

import torch

from cadenza.errors import CadenzaError, UsageError
from cadenza.training.held_out_shares import Evaluation
from cadenza.training.runs import Run, write_model

__all__ = ["BestModel"]


class BestModel:
    """The best model so far, by one metric, in a run's folder.

    Args:
        run: The run.
        metric: The metric's name.
        higher_is_better: The names of the metrics that are the better the higher they are.
        warn: What is told if a model could not be written.

    >>> import tempfile
    >>> from pathlib import Path
    >>> from cadenza.training.config import Config
    >>> from cadenza.training.runs import create
    >>> run = create(Path(tempfile.mkdtemp()) / "first", Config())
    >>> best = BestModel(run, "accuracy", ["accuracy"], warn=print)
    >>> for step, accuracy in (10, 0.5), (20, 0.7), (30, 0.6):
    ...     best.offer(step, torch.nn.Linear(1, 1))
    ...     best.judge(Evaluation(step, {"loss": 1.0, "accuracy": accuracy}, write=True))
    >>> run.best()
    {'step': 20, 'metric': 'accuracy', 'value': 0.7}
    """

    def __init__(
        self, run: Run, metric: str, higher_is_better: Collection[str], *, warn: Callable[[str], object]
    ) -> None:
        self._run, self._metric, self._warn = run, metric, warn
        self._sign = 1.0 if metric in higher_is_better else -1.0

    def offer(self, step: int, model: torch.nn.Module) -> None:
        """Write down the average of this step: it may turn out to be the best."""
        try:
            write_model(self._run.candidate(step), model)
        except CadenzaError as error:  # a full disk must not end the training
            self._warn(str(error))

    def judge(self, found: Evaluation) -> None:
        """Keep the average of an evaluation if it is the best, on the worker that has written it."""
        if self._metric not in found.metrics:
            raise UsageError(
                f'checkpoint.keep_best = "{self._metric}": the task\'s evaluate() measures no such metric, but '
                f"{', '.join(found.metrics)}."
            )
        candidate = self._run.candidate(found.step)
        if not found.write or not candidate.exists():
            return
        value = found.metrics[self._metric]
        if not self._is_best(value):
            candidate.unlink()
            return
        try:
            self._run.write_best({"step": found.step, "metric": self._metric, "value": value}, candidate)
        except OSError as error:
            candidate.unlink(missing_ok=True)
            self._warn(f"The best model, of step {found.step}, could not be kept: {error.strerror}.")

    def _is_best(self, value: float) -> bool:
        before = self._run.best()
        if before is None or before.get("metric") != self._metric:
            return math.isfinite(value)
        return self._sign * value > self._sign * float(before["value"])

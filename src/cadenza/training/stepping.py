"""One step of a worker: batches, loss, backward, optimizer, schedule, `sync.step()`, and a line about it."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from cadenza.errors import NotFiniteError, UsageError
from cadenza.training.data import count_samples, to_device
from cadenza.training.job import Job
from cadenza.training.recording import Recorder

__all__ = ["Stepper", "is_due", "step_schedules"]


def is_due(step: int, every: int) -> bool:
    """Say whether something that happens every so many steps, 0 for never, happens after this one.

    >>> is_due(200, 100), is_due(200, 0)
    (True, False)
    """
    return every > 0 and step % every == 0


def step_schedules(job: Job, steps: int = 1) -> None:
    """Step the learning rate's schedules, also for steps that a scaler left out or the others took alone."""
    for _ in range(steps):
        for scheduler in job.task.schedulers:
            scheduler.step()


@dataclass
class _Batches:
    """What the batches of one step have come to."""

    samples: int = 0
    losses: list[torch.Tensor] = field(default_factory=list)
    logged: list[Any] = field(default_factory=list)


class Stepper:
    """Takes a worker's steps."""

    def __init__(self, job: Job, recorder: Recorder) -> None:
        self._job, self._recorder = job, recorder
        self._task, self._sync = job.task, job.sync

    def take(self, step: int) -> dict[str, float]:
        """Take a step, whose number is the clock's next; return its figures."""
        task = self._task
        for optimizer in task.optimizers:
            optimizer.zero_grad()
        batches = _Batches()
        for number in range(task.accumulate):
            with self._gradients_stay(until_last=number + 1 < task.accumulate):
                self._backward(batches)
        self._average_gradients(step)
        loss = self._checked(fmean(loss.item() for loss in batches.losses), step)
        lr = float(task.optimizers[0].param_groups[0]["lr"])
        self._optimize()
        self._recorder.mark(step, delay=self._sync.strategy.delay)
        self._sync.step(samples=batches.samples)
        values = self._means(batches.logged)
        self._recorder.step(
            step, loss=loss, samples=batches.samples, lr=lr, next_sync=self._sync.next_round, values=values
        )
        return {**values, "loss": loss, "lr": lr, "samples": batches.samples}

    def _backward(self, batches: _Batches) -> None:
        """Add the gradients of the next batch, and what it came to."""
        task = self._task
        batch = to_device(next(self._job.stream), self._job.device)
        loss, logged = self._loss(batch)
        batches.losses.append(loss.detach())
        batches.logged.append(logged)
        batches.samples += (task.samples or count_samples)(batch)
        loss = loss / task.accumulate if task.accumulate > 1 else loss
        (loss if task.scaler is None else task.scaler.scale(loss)).backward()

    def _gradients_stay(self, *, until_last: bool) -> AbstractContextManager[Any]:
        """Let DDP average what several batches have come to together, and not each."""
        model = self._job.model
        return model.no_sync() if until_last and isinstance(model, DistributedDataParallel) else nullcontext()

    def _optimize(self) -> None:
        """Clip the gradients, and step the optimizers and their schedules."""
        task, scaler = self._task, self._task.scaler
        if task.clip_gradients is not None:
            if scaler is not None:
                for optimizer in task.optimizers:
                    scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(task.model.parameters(), task.clip_gradients)
        for optimizer in task.optimizers:
            optimizer.step() if scaler is None else scaler.step(optimizer)
        if scaler is None:
            step_schedules(self._job)
            return
        scaler.update()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch's, if the scaler left out the first step
            step_schedules(self._job)

    def _loss(self, batch: Any) -> tuple[torch.Tensor, Any]:
        """Return a batch's loss, and what the task wants to log beside it."""
        returned: Any = self._task.loss(self._job.model, batch)
        loss, logged = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, {})
        if not isinstance(loss, torch.Tensor):
            told = f"{str(loss)[:80]} ({type(loss).__name__})"
        elif loss.numel() != 1:
            told = f"a tensor of shape {tuple(loss.shape)}"
        elif not loss.requires_grad:
            told = "a tensor that does not depend on the parameters, as under torch.no_grad() or after detach()"
        else:
            return loss.reshape(()), logged
        raise UsageError(
            f"loss(model, batch) of the task {self._job.config.task} must return a tensor with one value, to be "
            f"minimised; it returned {told}."
        )

    def _means(self, logged: Sequence[Any]) -> dict[str, float]:
        """Return the means of what was logged with the batches of a step."""
        found: dict[str, list[float]] = {}
        for values in logged:
            try:
                for name, value in values.items():
                    found.setdefault(str(name), []).append(float(value))
            except (AttributeError, TypeError, ValueError, RuntimeError):
                raise UsageError(
                    f"loss(model, batch) of the task {self._job.config.task} must return beside the loss a dict of "
                    f'numbers to log, such as {{"accuracy": 0.5}}; it returned {str(values)[:80]} '
                    f"({type(values).__name__})."
                ) from None
        return {name: fmean(numbers) for name, numbers in found.items()}

    def _average_gradients(self, step: int) -> None:
        """Average the gradients in the warm-up, which for `ddp` is all of the run."""
        if step > self._sync.strategy.warmup_steps:
            return
        started = time.perf_counter()
        self._sync.average_gradients()  # DDP has done it in backward()
        self._recorder.stall_s += time.perf_counter() - started
        self._recorder.bytes_sent += self._job.gradient_bytes

    def _checked(self, loss: float, step: int) -> float:
        """Refuse a loss that is no number, unless the next round makes up for it: poison is left out there."""
        if math.isfinite(loss) or self._sync.strategy.faults.tolerant:
            return loss
        raise NotFiniteError(
            f"The loss of worker {self._job.worker} is {loss} at step {step}, and training cannot go on from it. A "
            "smaller learning rate, a longer warm-up or clip_gradients in the task may help."
        )

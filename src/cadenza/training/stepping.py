"""One step of a worker: batch, loss, backward, optimizer, schedule, `sync.step()`, and a line about it."""

from __future__ import annotations

import math
import time
from typing import Any

import torch

from cadenza.errors import NotFiniteError, UsageError
from cadenza.training.data import count_samples, to_device
from cadenza.training.job import Job
from cadenza.training.recording import Recorder

__all__ = ["Stepper", "is_due"]


def is_due(step: int, every: int) -> bool:
    """Say whether something that happens every so many steps, 0 for never, happens after this one.

    >>> is_due(200, 100), is_due(200, 0)
    (True, False)
    """
    return every > 0 and step % every == 0


class Stepper:
    """Takes a worker's steps."""

    def __init__(self, job: Job, recorder: Recorder) -> None:
        self._job, self._recorder = job, recorder
        self._task, self._sync = job.task, job.sync

    def take(self, step: int) -> None:
        """Take a step; its number is the clock's next."""
        task = self._task
        batch = to_device(next(self._job.stream), self._job.device)
        for optimizer in task.optimizers:
            optimizer.zero_grad()
        loss = self._loss(batch)
        loss.backward()
        self._average_gradients(step)
        value = self._checked(loss.item(), step)
        if task.clip_gradients is not None:
            torch.nn.utils.clip_grad_norm_(task.model.parameters(), task.clip_gradients)
        lr = float(task.optimizers[0].param_groups[0]["lr"])
        for optimizer in task.optimizers:
            optimizer.step()
        for scheduler in task.schedulers:
            scheduler.step()
        samples = (task.samples or count_samples)(batch)
        self._recorder.mark(step, delay=self._sync.strategy.delay)
        self._sync.step(samples=samples)
        self._recorder.step(step, loss=value, samples=samples, lr=lr, next_sync=self._sync.next_round)

    def _loss(self, batch: Any) -> torch.Tensor:
        loss: Any = self._task.loss(self._job.model, batch)
        if isinstance(loss, torch.Tensor) and loss.numel() == 1 and loss.requires_grad:
            return loss.reshape(())
        if not isinstance(loss, torch.Tensor):
            returned = f"{str(loss)[:80]} ({type(loss).__name__})"
        elif loss.numel() != 1:
            returned = f"a tensor of shape {tuple(loss.shape)}"
        else:
            returned = "a tensor that does not depend on the parameters, as under torch.no_grad() or after detach()"
        raise UsageError(
            f"loss(model, batch) of the task {self._job.config.task} must return a tensor with one value, to be "
            f"minimised; it returned {returned}."
        )

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

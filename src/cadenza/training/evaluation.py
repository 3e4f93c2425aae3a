"""The held-out loss of the workers' average: each worker judges its share, and the shares are added."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from cadenza.common.process_groups import control_device, resolve
from cadenza.errors import UsageError
from cadenza.training.randomness import undisturbed
from cadenza.training.task import Task

__all__ = ["held_out_loss", "share_of_loss", "sum_over_workers"]


def held_out_loss(task: Task, *, worker: int, workers: int, source: str) -> float:
    """Return the held-out loss of the model as it is now; all workers call this, and none is the worse for it."""
    total, count = sum_over_workers(*share_of_loss(task, worker=worker, workers=workers, source=source))
    if count <= 0:
        raise UsageError(f"{source} has evaluated nothing: the counts of all {workers} workers add up to {count:g}.")
    return total / count


def share_of_loss(task: Task, *, worker: int, workers: int, source: str) -> tuple[float, float]:
    """Return the sum of the losses over a worker's share of the held-out data, and how many there are."""
    assert task.evaluate is not None
    with torch.no_grad(), undisturbed(), _in_eval_mode(task.model):
        return _checked(task.evaluate(task.model, worker, workers), source)


def sum_over_workers(*figures: float) -> list[float]:
    """Return each figure summed over all workers."""
    total = torch.tensor(figures, dtype=torch.float64, device=control_device(resolve(None)))
    dist.all_reduce(total)
    summed: list[float] = total.tolist()
    return summed


def _checked(returned: Any, source: str) -> tuple[float, float]:
    try:
        total, count = returned
        return float(total), float(count)
    except (TypeError, ValueError):
        raise UsageError(
            f"{source} must return (the sum of the losses, how many there are) of its share; it returned "
            f"{str(returned)[:80]} ({type(returned).__name__})."
        ) from None


@contextmanager
def _in_eval_mode(model: torch.nn.Module) -> Iterator[None]:
    """Let every module be as it was afterwards: some may be kept in eval mode all along."""
    trained = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in trained:
            module.training = True

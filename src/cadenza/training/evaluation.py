"""Held-out metrics of the workers' average: each worker measures its share of the data, and the shares are added."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from cadenza.errors import UsageError
from cadenza.training.best_model import BestModel
from cadenza.training.held_out_shares import Evaluation, Share, Shares
from cadenza.training.job import Job
from cadenza.training.randomness import undisturbed

__all__ = ["HeldOut"]


class HeldOut:
    """Measures a worker's share of the held-out metrics; training goes on as if nothing had been.

    Args:
        job: What is trained.
        shares: What adds the shares of all workers.
        source: What to call the function that measures, in errors.
        best: What keeps the best model, if one is to be kept.
    """

    def __init__(self, job: Job, shares: Shares, *, source: str, best: BestModel | None = None) -> None:
        self._job, self._shares, self._source, self._best = job, shares, source, best

    def measure(self, *, averaged: bool = True) -> None:
        """Measure the workers' average, or the model as it is; without a round in common there is nothing to measure.

        Args:
            averaged: Whether the workers' models still differ, so that their average must be taken first.
        """
        job, sync = self._job, self._job.sync
        members = sync.members
        if job.task.evaluate is None or job.worker not in members or (averaged and sync.behind):
            return
        with sync.averaged() if averaged and not job.is_ddp else nullcontext():
            share = self._share(members.index(job.worker), len(members))
            if self._best is not None and job.worker == min(members):
                self._best.offer(sync.clock, job.task.model)
        self._shares.post(sync.clock, members, share)

    def collect(self, *, wait: bool = False) -> list[Evaluation]:
        """Return the evaluations that have come to be known since the last call."""
        found = self._shares.collect(wait=wait)
        if self._best is not None:
            for evaluation in found:
                self._best.judge(evaluation)
        return found

    def _share(self, position: int, workers: int) -> Share:
        """Return this worker's sums over a share of the held-out data, and over how many they are."""
        task = self._job.task
        assert task.evaluate is not None
        with torch.no_grad(), undisturbed(), _in_eval_mode(task.model):
            returned: Any = task.evaluate(task.model, position, workers)
            pairs = returned if isinstance(returned, Mapping) else {"loss": returned}
            try:
                share = {str(name): (float(total), float(count)) for name, (total, count) in pairs.items()}
            except (TypeError, ValueError):
                share = {}
        if "loss" in share:
            return share
        raise UsageError(
            f"{self._source} must return (the sum of the losses, how many there are) of its share, or a dict of such "
            f'pairs, one of them named "loss"; it returned {str(returned)[:80]} ({type(returned).__name__}).'
        )


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

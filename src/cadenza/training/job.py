"""What one worker trains, and all that it must find again to go on: task, model, synchronizer, place in the data."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

import cadenza
from cadenza.checkpoint.folders import collect_part, restore
from cadenza.checkpoint.loop import collect_loop
from cadenza.checkpoint.selection import Selection
from cadenza.errors import UsageError
from cadenza.observers import Observer
from cadenza.training.config import Config
from cadenza.training.crew import Crew
from cadenza.training.data import BatchStream, to_device
from cadenza.training.randomness import seed_everything, seed_of
from cadenza.training.task import Task, check_task, load_build

__all__ = ["Job"]


class Job:
    """A task in the hands of one worker, with its strategy attached; all workers make theirs together.

    Args:
        config: What to train, and how.
        observer: What gets a report of every round.
        crew: This worker's view of all of them.
    """

    def __init__(self, config: Config, observer: Observer, crew: Crew) -> None:
        self.config = config
        self.worker, self.workers = crew.worker, crew.workers
        self.device = _device(crew.uses_cuda)
        self.task = self._build_task()
        self.strategy = config.build_strategy()
        self.is_ddp = config.strategy.name == "ddp"
        self.model: torch.nn.Module = self.task.model.to(self.device)
        if self.is_ddp:
            self.model = DistributedDataParallel(self.model)
        self.sync = cadenza.attach(
            self.model, self.task.optimizers, self.strategy, observers=[observer], membership=crew.membership
        )
        batches = self.task.batches(self.worker, self.workers)
        self.stream = BatchStream(batches, source=f"batches({self.worker}, {self.workers}) of the task {config.task}")
        self._refuse_what_cannot_be_saved()

    @property
    def parameters(self) -> int:
        """How many numbers the model has."""
        return sum(p.numel() for p in self.task.model.parameters())

    @property
    def gradient_bytes(self) -> int:
        """What a ring all-reduce of the gradients would have this worker send in one step."""
        size = sum(p.numel() * p.element_size() for p in self.task.model.parameters() if p.requires_grad)
        return round(2 * (self.workers - 1) / self.workers * size)

    def save(self, folder: Path, extra: Mapping[str, Any], *, shared: bool) -> int:
        """Write this worker's part of a checkpoint, and what all share if it is to; return its size in bytes."""
        part = collect_part(self.model, self.task.optimizers, self.sync, {**self.place(), **extra})
        return part.write(folder, shared=shared, overwrite=self.config.faults.tolerant)

    def load(self, selection: Selection) -> dict[str, Any]:
        """Go on from a checkpoint; return the `extra` that was saved with it."""
        if self.is_ddp:
            self._rehearse()
        extra = restore(selection, self.model, self.task.optimizers, self.sync) or {}
        self.set_place(extra)
        return extra

    def set_place(self, extra: Mapping[str, Any]) -> None:
        """Let schedules and data go on from where they were saved."""
        then, now = extra.get("schedulers", []), self.task.schedulers
        if len(then) != len(now):
            raise UsageError(
                f"The checkpoint is of a task with {len(then)} learning rate schedules; {self.config.task} has "
                f"{len(now)}. Go on with the task that was trained."
            )
        for scheduler, state in zip(now, then, strict=True):
            scheduler.load_state_dict(state)
        if self.task.scaler is not None and extra.get("scaler"):
            self.task.scaler.load_state_dict(extra["scaler"])
        self.stream.load_state_dict(extra["data"], own=extra["place"] == [self.worker, self.workers])

    def _rehearse(self) -> None:
        """Let DDP arrange its buckets, as it does after its first backward pass: sums depend on the arrangement.

        Whatever this changes, the checkpoint that is loaded next sets right.
        """
        batch = next(iter(self.task.batches(self.worker, self.workers)))
        self.model.train()
        self.task.loss_alone(self.model, to_device(batch, self.device)).backward()

    def _build_task(self) -> Task:
        """Build the task: the same model on every worker, then random numbers of its own."""
        name = self.config.task
        build = load_build(name)
        seed_everything(seed_of(self.config.seed, "model"))
        task = check_task(build(self.config), source=name)
        seed_everything(seed_of(self.config.seed, "worker", self.worker))
        return task

    def place(self) -> dict[str, Any]:
        """Return where schedules and data stand, for a checkpoint."""
        return {
            "place": [self.worker, self.workers],
            "schedulers": [scheduler.state_dict() for scheduler in self.task.schedulers],
            "scaler": {} if self.task.scaler is None else self.task.scaler.state_dict(),
            "data": self.stream.state_dict(),
        }

    def _refuse_what_cannot_be_saved(self) -> None:
        """Raise now what would otherwise be raised at the first checkpoint."""
        collect_loop("worker/0", self.model, self.task.optimizers, self.place())


def _device(uses_cuda: bool) -> torch.device:
    if uses_cuda:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        return device
    return torch.device("cpu")

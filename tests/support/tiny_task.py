"""A task that takes milliseconds a step and has all that a resumed run could get wrong: dropout, a schedule, epochs.

What a test wants to happen in the middle of a run is said in [options], since ranks build the task by its name.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import torch
from pydantic import Field
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from cadenza.training import Config, Settings, Task

NAME = "support.tiny_task:build"


class Options(Settings):
    data: str = Field(default="shuffled", pattern="^(shuffled|list|stateful)$")
    draws_in_evaluation: int = 0  # random numbers that the evaluation draws
    width: int = 16
    constant_lr: bool = False
    at: int = 0  # the step at which `worker` does what `event` says; 0: never
    worker: int = 0
    event: str = ""
    signal: int = int(signal.SIGTERM)
    zero_is_asked_at: int = 0  # the step at which worker 0 gets a signal, whatever happens to others
    slow: int = -1  # a worker that sleeps in every step; -2: all of them
    slow_s: float = 0.05
    slow_until: str = ""  # a file: as soon as it is there, no worker is slow any more
    die_saving: int = -1  # a worker that is killed while it saves, at another write the second time


def build(config: Config) -> Task:
    options = config.options_as(Options)
    if options.die_saving >= 0:
        die_saving(options.die_saving)
    width = options.width
    model = nn.Sequential(nn.Linear(8, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    held_out = examples(48, seed=99)

    def evaluate(model: nn.Module, worker: int, workers: int) -> tuple[float, int]:
        torch.rand(options.draws_in_evaluation)
        inputs, wanted = (t[worker::workers] for t in held_out)
        return float(nn.functional.mse_loss(model(inputs), wanted, reduction="sum")), len(inputs)

    return Task(
        model=model,
        optimizer=optimizer,
        batches=lambda worker, workers: batches(options.data, config.seed * 100 + worker),
        loss=Loss(options),
        evaluate=evaluate,
        scheduler=() if options.constant_lr else torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, config.steps),
        clip_gradients=1.0,
    )


def die_saving(worker: int) -> None:
    """Let this worker die before its part, and then before what all share, is finished by its manifest."""
    attempt, replace, calls = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), os.replace, 0

    def replace_or_die(source: Any, target: Any) -> None:
        nonlocal calls
        if "checkpoints" in str(target) and int(os.environ["RANK"]) == worker:
            calls += 1
            if calls == 2 * (attempt + 1) and attempt < 2:
                os.kill(os.getpid(), signal.SIGKILL)
        replace(source, target)

    os.replace = replace_or_die


class Loss:
    """The loss, and what is to happen in the middle of a run."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.steps = 0

    def __call__(self, model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> Any:
        self.steps += 1
        worker = torch.distributed.get_rank() if torch.distributed.is_initialized() else int(os.environ["RANK"])
        if self.options.slow in (worker, -2) and not os.path.exists(self.options.slow_until):
            time.sleep(self.options.slow_s)
        if worker == 0 and self.steps == self.options.zero_is_asked_at:
            os.kill(os.getpid(), signal.SIGTERM)
        loss = nn.functional.mse_loss(model(batch[0]), batch[1])
        if worker != self.options.worker or self.steps != self.options.at:
            return loss
        match self.options.event:
            case "signal":
                os.kill(os.getpid(), self.options.signal)
            case "two signals":
                os.kill(os.getpid(), self.options.signal)
                time.sleep(1)
                os.kill(os.getpid(), self.options.signal)
                time.sleep(60)
            case "raise":
                raise RuntimeError("the task went wrong")
            case "nan":
                return loss * float("nan")
            case "item":
                return loss.item()
            case "detached":
                return loss.detach()
            case "vector":
                return loss.expand(3)
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
        return loss


def examples(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(count, 8, generator=torch.Generator().manual_seed(seed))
    return inputs, inputs.square().sum(1, keepdim=True)


def batches(kind: str, seed: int) -> Any:
    """28 batches and a bit are an epoch, so runs of some dozen steps begin a few."""
    inputs, wanted = examples(28, seed)
    if kind == "shuffled":  # by torch's own random numbers, which dropout draws from as well
        return DataLoader(TensorDataset(inputs, wanted), batch_size=4, shuffle=True)
    if kind == "list":
        return list(zip(inputs.split(4), wanted.split(4), strict=True))
    return Stateful(seed)


class Stateful:
    """Batches without end that cannot be skipped to, only restored."""

    def __init__(self, seed: int) -> None:
        self.taken = 0
        self.seed = seed

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        while True:
            self.taken += 1
            yield examples(4, self.seed * 1000 + self.taken)

    def state_dict(self) -> dict[str, int]:
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.taken = state["taken"]

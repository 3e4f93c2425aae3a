"""A task with all that a task may have: metrics, logged values, accumulated gradients, a scaler, callbacks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from cadenza.training import Config, Moment, Settings, Task

NAME = "support.full_task:build"
heard: list[tuple[str, int, dict[str, float]]] = []  # what the callbacks of this process were told


class Options(Settings):
    batch: int = 4
    accumulate: int = 1
    scale: float = 0.0  # at which a GradScaler begins; 0: there is none
    overflow_at: int = 0  # the batch whose loss is too large for its gradients to be finite
    clip: float = 1.0
    evaluated: str = "metrics"
    logged: str = "numbers"


class Counted:
    """Batches that are the same rows in the same order, however large they are."""

    def __init__(self, worker: int, batch: int) -> None:
        rows = torch.randn(96, 8, generator=torch.Generator().manual_seed(7 + worker))
        self.batches = rows.split(batch)

    def __iter__(self) -> Any:
        return iter(self.batches)


def build(config: Config) -> Task:
    options = config.options_as(Options)
    model = nn.Linear(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=options.scale, growth_interval=3) if options.scale else None
    taken = 0

    def loss(model: nn.Module, batch: torch.Tensor) -> Any:
        nonlocal taken
        taken += 1
        error = model(batch).square().mean()
        if taken == options.overflow_at:
            error = error * 1e30
        match options.logged:
            case "numbers":
                return error, {"largest": batch.max(), "number": taken, "scale": scaler.get_scale() if scaler else 1.0}
            case "text":
                return error, {"largest": "x"}
            case "list":
                return error, [1.0]
        return error

    def evaluate(model: nn.Module, worker: int, workers: int) -> Any:
        rows = torch.ones(6, 8)[worker::workers]
        total = float(model(rows).square().mean(1).sum())
        match options.evaluated:
            case "metrics":
                return {"loss": (total, len(rows)), "accuracy": (total / 2, torch.tensor(len(rows)))}
            case "no loss":
                return {"accuracy": (total, len(rows))}
        return total, len(rows)

    def listen(moment: Moment) -> None:
        heard.append((moment.kind, moment.step, dict(moment.figures)))
        if moment.kind == "step" and moment.step % 2 == 0:
            moment.log(norm=float(moment.model.weight.detach().norm()), step=moment.step)

    return Task(
        model=model,
        optimizer=optimizer,
        batches=lambda worker, workers: Counted(worker, options.batch),
        loss=loss,
        evaluate=evaluate,
        higher_is_better=["accuracy"],
        scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 4, gamma=0.5),
        clip_gradients=options.clip,
        accumulate=options.accumulate,
        scaler=scaler,
        callbacks=[listen],
    )

"""What a rank does in a test of the synchronizer: train a small model under a strategy and write down what it sees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import cadenza
from cadenza import RoundReport, Strategy, Synchronizer
from cadenza.testing.references import flat
from cadenza.testing.trajectories import LR, momentum_sgd
from cadenza.transports.c10d_group import group_of
from support.models import CASES


def plain_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LR)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)


@dataclass
class Trace:
    """What a rank saw: its parameters after every step and after `finish()`, and the reports of its rounds."""

    history: list[torch.Tensor] = field(default_factory=list)
    reports: list[RoundReport] = field(default_factory=list)

    @property
    def finished(self) -> torch.Tensor:
        return self.history[-1]

    @property
    def rounds(self) -> list[tuple[int, int, int]]:
        """The step, level and fragment of every round."""
        return [(report.step, report.level, report.fragment) for report in self.reports]


def values(model: nn.Module) -> torch.Tensor:
    """The trained parameters of a model, side by side."""
    return flat([p for p in model.parameters() if p.requires_grad])


def train(
    strategy: Strategy,
    steps: int,
    *,
    case: str = "mlp",
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = momentum_sgd,
    samples: Callable[[int], float] | None = None,
    **options: Any,
) -> Trace:
    """Train one of the small models on this rank's own data."""
    trace = Trace()
    rank = group_of(None).rank  # of this process, or of this thread
    model = CASES[case].model(rank)
    inner = optimizer(model)
    sync = cadenza.attach(model, inner, strategy, observers=[trace.reports.append], **options)
    for n in range(1, steps + 1):
        inner.zero_grad()
        CASES[case].backward(model, rank, n)
        sync.average_gradients()
        inner.step()
        sync.step(samples=samples(rank) if samples else 0.0)
        trace.history.append(values(model))
    sync.finish()
    trace.history.append(values(model))
    return trace


class OneNumber(nn.Module):
    """A model of one parameter; the gradient of its loss is whatever the rank feeds it."""

    def __init__(self, start: float = 1.0) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.tensor([start]))

    def forward(self, gradient: float) -> torch.Tensor:
        return (self.x * gradient).sum()


def one_number(strategy: Strategy, **options: Any) -> tuple[OneNumber, Synchronizer, Callable[[float], float]]:
    """A model of one number at 1, its synchronizer, and a call that takes a step of lr 0.1 and returns the number."""
    model = OneNumber()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = cadenza.attach(model, inner, strategy, **options)

    def step(gradient: float) -> float:
        inner.zero_grad()
        model(gradient).backward()
        inner.step()
        sync.step()
        return model.x.item()

    return model, sync, step


def everyone(mine: Any) -> list[Any]:
    """What every rank holds, in rank order."""
    all_of_them: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(all_of_them, mine)
    return all_of_them

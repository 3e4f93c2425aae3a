"""Small models that between them have every property that averaging must survive, and the data to train them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from cadenza.testing.trajectories import small_model

_SEEDED = threading.Lock()  # torch's global random numbers are shared by workers that are threads


@dataclass(frozen=True)
class Case:
    """A model, its data and its optimizer; the same on every call except for what `rank` changes."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Any]
    loss: Callable[[nn.Module, Any], torch.Tensor]
    groups: Callable[[nn.Module], Any] = lambda model: model.parameters()
    exact: bool = True  # all parameters are fp32, whose mean over two ranks is the same bits in any order

    def model(self, rank: int) -> nn.Module:
        """The model of a rank; ranks start from different values, so that an averaging is never a no-op."""
        with _SEEDED:
            torch.manual_seed(11)
            model = self.build()
        generator = torch.Generator().manual_seed(100 + rank)
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.rand(parameter.shape, generator=generator).sub(0.5)
                parameter.add_(noise.mul(0.1).to(parameter.dtype))
        return model

    def data(self, rank: int, step: int) -> Any:
        return self.batch(torch.Generator().manual_seed(1000 * step + rank))

    def backward(self, model: nn.Module, rank: int, step: int) -> None:
        self.loss(model, self.data(rank, step)).backward()


def _vectors(generator: torch.Generator) -> torch.Tensor:
    return torch.randn(5, 6, generator=generator)


def _images(generator: torch.Generator) -> torch.Tensor:
    return torch.randn(4, 3, 8, 8, generator=generator).to(memory_format=torch.channels_last)


def _tokens(generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 17, (3, 7), generator=generator)


def _mean_square(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).float().square().mean()


def _conv() -> nn.Module:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 4, 3),
        nn.BatchNorm2d(4),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(16, 3),
    )
    return model.to(memory_format=torch.channels_last)


class TiedTransformer(nn.Module):
    """A language model of one layer whose output layer is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(17, 12)
        self.layer = nn.TransformerEncoderLayer(12, 2, 24, dropout=0.0, batch_first=True)
        self.head = nn.Linear(12, 17, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(self.embedding(tokens)))


def _next_token(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), tokens[:, 1:].reshape(-1))


class MixedPrecision(nn.Module):
    """A bf16 trunk between fp32 layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.trunk = nn.Linear(16, 16).to(torch.bfloat16)
        self.last = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.trunk(torch.tanh(self.first(x)).bfloat16())
        return self.last(torch.tanh(hidden.float()))


def _frozen() -> nn.Module:
    model = small_model()
    model.get_submodule("0").requires_grad_(False)
    model.get_submodule("4").bias.requires_grad_(False)
    return model


class UnusedBranch(nn.Module):
    """A layer that trains and one that no loss ever reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(6, 5)
        self.unused = nn.Linear(6, 5)
        self.out = nn.Linear(5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.used(x)))


def _decay_groups(model: nn.Module) -> list[dict[str, Any]]:
    weights = [p for p in model.parameters() if p.ndim > 1]
    biases = [p for p in model.parameters() if p.ndim <= 1]
    return [{"params": weights, "lr": 0.05, "weight_decay": 0.01}, {"params": biases, "lr": 0.1}]


CASES = {
    case.name: case
    for case in (
        Case("mlp", small_model, _vectors, _mean_square),
        Case("conv_channels_last", _conv, _images, _mean_square),
        Case("tied_transformer", TiedTransformer, _tokens, _next_token),
        Case("mixed_bf16", MixedPrecision, _vectors, _mean_square, exact=False),
        Case("frozen", _frozen, _vectors, _mean_square),
        Case("param_groups", small_model, _vectors, _mean_square, groups=_decay_groups),
        Case("unused_branch", UnusedBranch, _vectors, _mean_square),
    )
}

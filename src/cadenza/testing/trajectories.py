"""Every preset beside the plain algorithm whose way it must walk, step by step; and the small model that they train."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import nn

import cadenza
from cadenza import Strategy, codecs
from cadenza.testing import references
from cadenza.testing.references import History, Workers

__all__ = ["FRAGMENTS", "LR", "PRESETS", "STEPS", "Reference", "SmallCase", "momentum_sgd", "small_model"]

LR = 0.1
STEPS = 10
Reference: TypeAlias = Callable[[Workers], History]


def small_model() -> nn.Module:
    """Return a model of three layers."""
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 3))


def momentum_sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Return the inner optimizer of the references."""
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LR, momentum=0.9)


class SmallCase:
    """The small model on a device, with other values and other data on every rank."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def model(self, rank: int) -> nn.Module:
        model = small_model()
        values = torch.Generator().manual_seed(100 + rank)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.rand(parameter.shape, generator=values).sub(0.5))
        return model.to(self._device)

    def backward(self, model: nn.Module, rank: int, step: int) -> None:
        batch = torch.randn(5, 6, generator=torch.Generator().manual_seed(1000 * step + rank))
        model(batch.to(self._device)).square().mean().backward()


FRAGMENTS = [[0, 1, 4, 5], [2, 3]]  # of the MLP's layers "0", "2" and "4", strided by 2

PRESETS: dict[str, tuple[Strategy, Reference, bool]] = {
    "local_sgd": (
        cadenza.local_sgd(4),
        lambda w: references.local_sgd(w, STEPS, period=4),
        True,
    ),
    "post_local_sgd": (
        cadenza.post_local_sgd(3, warmup_steps=4),
        lambda w: references.post_local_sgd(w, STEPS, period=3, warmup_steps=4),
        True,
    ),
    "slowmo": (
        cadenza.slowmo(4, alpha=0.9, beta=0.5),
        lambda w: references.slowmo(w, STEPS, period=4, alpha=0.9, beta=0.5, lr=LR),
        False,
    ),
    "diloco": (
        cadenza.diloco(4, defaults="paper"),
        lambda w: references.diloco(w, STEPS, period=4),
        True,
    ),
    "diloco in fragments": (
        cadenza.diloco(4, defaults="paper", fragments=cadenza.by_layers(2)),
        lambda w: references.streaming_diloco(w, STEPS, period=4, lr=0.7, fragments=FRAGMENTS),
        True,
    ),
    "late diloco": (
        cadenza.diloco(4, defaults="paper", delay=2),
        lambda w: references.streaming_diloco(w, STEPS, period=4, lr=0.7, fragments=[list(range(6))], delay=2),
        True,
    ),
    "streaming_diloco": (
        cadenza.streaming_diloco(6, defaults="paper", layers=2, delay=2, alpha=0.3, codec=codecs.fp32()),
        lambda w: references.streaming_diloco(w, STEPS, period=6, lr=0.4, fragments=FRAGMENTS, delay=2, alpha=0.3),
        False,
    ),
    "streaming_diloco with three in flight": (
        cadenza.streaming_diloco(6, defaults="paper", layers=1, delay=5, alpha=0.5, codec=codecs.fp32()),
        lambda w: references.streaming_diloco(
            w, STEPS, period=6, lr=0.4, fragments=[[0, 1], [2, 3], [4, 5]], delay=5, alpha=0.5
        ),
        False,
    ),
    "streaming_diloco that keeps progress": (
        cadenza.streaming_diloco(6, outer_lr=0.4, outer_momentum=0.9, layers=1, delay=5, codec=codecs.fp32()),
        lambda w: references.streaming_diloco(
            w, STEPS, period=6, lr=0.4, fragments=[[0, 1], [2, 3], [4, 5]], delay=5, keep_progress=True
        ),
        False,
    ),
    "late diloco that keeps progress": (
        cadenza.diloco(4, defaults="paper", delay=2, keep_progress=True),
        lambda w: references.streaming_diloco(
            w, STEPS, period=4, lr=0.7, fragments=[list(range(6))], delay=2, keep_progress=True
        ),
        False,
    ),
    "late local_sgd": (
        cadenza.local_sgd(4, delay=3),
        lambda w: references.late_local_sgd(w, STEPS, period=4, delay=3),
        False,
    ),
    "sparse_loco": (
        cadenza.sparse_loco(4, density=0.1),
        lambda w: references.sparse_loco(w, STEPS, period=4, codec=codecs.topk(density=0.1)),
        False,
    ),
    "sparse_loco of all": (
        cadenza.sparse_loco(4, density=0.1, mean_of="all"),
        lambda w: references.sparse_loco(w, STEPS, period=4, codec=codecs.topk(density=0.1), of_senders=False),
        False,
    ),
    "int8 diloco": (
        cadenza.diloco(4, defaults="paper", codec=codecs.int8(block=16)),
        lambda w: references.compressed_diloco(w, STEPS, period=4, codec=codecs.int8(block=16)),
        False,
    ),
    "e3m0 diloco back in int8": (
        cadenza.diloco(4, defaults="paper", codec=codecs.e3m0(block=16, back=codecs.int8(block=16))),
        lambda w: references.compressed_diloco(
            w, STEPS, period=4, codec=codecs.e3m0(block=16, back=codecs.int8(block=16))
        ),
        False,
    ),
    "e3m0 diloco with error feedback": (
        cadenza.diloco(4, defaults="paper", codec=codecs.error_feedback(codecs.e3m0(block=16), decay=0.9)),
        lambda w: references.compressed_diloco(
            w, STEPS, period=4, codec=codecs.error_feedback(codecs.e3m0(block=16), decay=0.9)
        ),
        False,
    ),
}

"""The GPT and the data of `cadenza train`'s default task, as the lab's benchmarks take them.

The model is that of `cadenza.training.gpt`, some 0.8 M parameters with the defaults; the data are the sources of
Python's standard library. A worker's batches come from a seed of its own, so every method sees the same tokens in the
same order.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from cadenza.training import standard_library_gpt
from cadenza.training.gpt import GPT, Shape
from cadenza.training.standard_library_gpt import Corpus, Windows, rate_at

__all__ = ["GPT", "Corpus", "Shape", "batches", "held_out_loss", "rate_at"]


def batches(text: torch.Tensor, *, batch: int, context: int, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield random windows and what follows them, for ever; the same ones for the same seed."""
    return iter(Windows(text, batch=batch, context=context, seed=seed))


def held_out_loss(model: nn.Module, text: torch.Tensor, *, windows: int, context: int, part: int, parts: int) -> float:
    """Return the sum of the losses over this part of `windows` windows spread evenly over the text."""
    return standard_library_gpt.held_out_loss(model, text, windows=windows, context=context, part=part, parts=parts)[0]

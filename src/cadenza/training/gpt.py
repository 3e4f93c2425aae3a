"""A small GPT that predicts the next byte: nanoGPT's shape in a page, with learned positions and tied embeddings.

>>> model = GPT(Shape(layers=1, width=16, heads=2, context=8))
>>> text = torch.zeros(1, 8, dtype=torch.long)
>>> model(text, text).shape
torch.Size([])
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

__all__ = ["GPT", "VOCABULARY", "Block", "Shape"]

VOCABULARY = 256


@dataclass(frozen=True)
class Shape:
    """How large the model is."""

    layers: int = 4
    width: int = 128
    heads: int = 4
    context: int = 128


class Block(nn.Module):
    """Attention, then a hidden layer, each on a normalised input and added to it."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.norm_1 = nn.LayerNorm(shape.width)
        self.attention = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.projection = nn.Linear(shape.width, shape.width, bias=False)
        self.norm_2 = nn.LayerNorm(shape.width)
        self.widen = nn.Linear(shape.width, 4 * shape.width, bias=False)
        self.narrow = nn.Linear(4 * shape.width, shape.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        heads = self.attention(self.norm_1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind()
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).reshape(batch, length, width))
        hidden: torch.Tensor = self.narrow(F.gelu(self.widen(self.norm_2(x)), approximate="tanh"))
        return x + hidden


class GPT(nn.Module):
    """Predicts the next byte: `forward(bytes, next_bytes)` gives the mean cross-entropy in nats."""

    def __init__(self, shape: Shape | None = None) -> None:
        super().__init__()
        shape = shape or Shape()
        self.embedding = nn.Embedding(VOCABULARY, shape.width)
        self.positions = nn.Parameter(torch.zeros(shape.context, shape.width))
        blocks = [Block(shape) for _ in range(shape.layers)]
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(shape.width)
        self.apply(self._initialise)
        for block in blocks:
            for last in (block.projection, block.narrow):
                nn.init.normal_(last.weight, std=0.02 / math.sqrt(2 * shape.layers))

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, given: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        x = self.embedding(given) + self.positions[: given.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1), wanted.flatten())

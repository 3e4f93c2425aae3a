"""A small byte-level GPT and its data, the sources of Python's standard library: on every machine, no download.

The model is nanoGPT's in a page: learned positions, pre-norm blocks, tied embeddings. Some 0.8 M parameters with the
defaults. Every tenth file is held out; a worker's batches come from a seed of its own, so every method sees the same
tokens in the same order.
"""

from __future__ import annotations

import math
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

VOCABULARY = 256


@dataclass(frozen=True)
class Shape:
    """How large the model is."""

    layers: int = 4
    width: int = 128
    heads: int = 4
    context: int = 128


class Block(nn.Module):
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
        mixed = F.scaled_dot_product_attention(*heads.unbind(), is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.narrow(F.gelu(self.widen(self.norm_2(x)), approximate="tanh"))


class GPT(nn.Module):
    """Predicts the next byte: `forward(bytes, next_bytes)` gives the mean cross-entropy in nats."""

    def __init__(self, shape: Shape | None = None) -> None:
        super().__init__()
        shape = shape or Shape()
        self.embedding = nn.Embedding(VOCABULARY, shape.width)
        self.positions = nn.Parameter(torch.zeros(shape.context, shape.width))
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.apply(self._initialise)
        for block in self.blocks:
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


@dataclass(frozen=True)
class Corpus:
    """Bytes to train on and bytes to be judged by, from different files."""

    training: torch.Tensor
    held_out: torch.Tensor

    @classmethod
    def standard_library(cls) -> Corpus:
        """Read the interpreter's own library, without its tests."""
        root = Path(sysconfig.get_path("stdlib"))
        skipped = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
        files = [path for path in sorted(root.rglob("*.py")) if not skipped & set(path.relative_to(root).parts)]
        texts = [path.read_bytes() for path in files]
        return cls(
            training=_tensor(b"\n".join(text for i, text in enumerate(texts) if i % 10)),
            held_out=_tensor(b"\n".join(text for i, text in enumerate(texts) if i % 10 == 0)),
        )


def _tensor(text: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def batches(text: torch.Tensor, *, batch: int, context: int, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield random windows and what follows them, for ever; the same ones for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    reach = torch.arange(context + 1)
    while True:
        starts = torch.randint(len(text) - context, (batch, 1), generator=generator)
        windows = text[starts + reach].long()
        yield windows[:, :-1], windows[:, 1:]


@torch.no_grad()
def held_out_loss(model: nn.Module, text: torch.Tensor, *, windows: int, context: int, part: int, parts: int) -> float:
    """Return the sum of the losses over this part of `windows` windows spread evenly over the text."""
    starts = torch.linspace(0, len(text) - context - 1, windows).long()[part::parts, None]
    rows = text[starts + torch.arange(context + 1)].long()
    return sum(float(model(chunk[:, :-1], chunk[:, 1:])) * len(chunk) for chunk in rows.split(32))


def rate_at(step: int, steps: int, *, peak: float, warmup: int, floor: float = 0.1) -> float:
    """Return the learning rate: a linear warm-up, then half a cosine down to `floor` of the peak."""
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return peak * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done)))

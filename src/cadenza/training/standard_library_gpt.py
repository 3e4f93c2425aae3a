"""The default task: a small byte-level GPT on the sources of Python's standard library; on every machine, no download.

Every tenth file is held out. A worker's batches depend on the seed and its number alone, so every strategy sees the
same tokens in the same order.

>>> from cadenza.training import Config
>>> task = build(Config(options={"layers": 1, "width": 16, "heads": 2, "context": 32, "batch": 2}))
>>> given, wanted = next(iter(task.batches(0, 4)))
>>> given.shape, task.samples((given, wanted)), task.unit
(torch.Size([2, 32]), 64, 'tokens')
"""

from __future__ import annotations

import math
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Self

import torch
from pydantic import Field, model_validator
from torch import nn

from cadenza.training.config import Config, Settings
from cadenza.training.gpt import GPT, Shape
from cadenza.training.randomness import seed_of
from cadenza.training.task import Task

__all__ = ["Corpus", "Options", "Windows", "build", "held_out_loss", "library_files", "rate_at"]


class Options(Settings):
    """The task's [options], and their defaults.

    >>> Options(width=128).layers
    3
    """

    layers: int = Field(default=3, ge=1, description="Transformer blocks.")
    width: int = Field(default=64, ge=1, description="Size of a token's vector.")
    heads: int = Field(default=4, ge=1, description="Attention heads; they divide the width.")
    context: int = Field(default=128, ge=1, le=65536, description="Bytes that the model sees at once.")
    batch: int = Field(default=8, ge=1, description="Windows of that many bytes in a worker's step.")
    lr: float = Field(default=8e-3, gt=0, description="AdamW's largest learning rate.")
    lr_warmup: int = Field(default=64, ge=0, description="Steps in which the learning rate rises to it.")
    lr_floor: float = Field(default=0.1, ge=0, le=1, description="The share of it that the cosine falls to.")
    weight_decay: float = Field(default=0.1, ge=0, description="AdamW's weight decay.")
    clip_gradients: float = Field(default=1.0, gt=0, description="The largest norm of the gradients.")
    held_out_windows: int = Field(default=256, ge=1, description="Windows of held-out text in an evaluation.")

    @model_validator(mode="after")
    def _heads_fit(self) -> Self:
        if self.width % self.heads:
            raise ValueError(f"the {self.heads} heads do not divide the width {self.width}")
        return self


def build(config: Config) -> Task:
    """Return the task that a configuration's [options] describe."""
    options = config.options_as(Options)
    corpus = Corpus.standard_library()
    shape = Shape(options.layers, options.width, options.heads, options.context)
    model = GPT(shape)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=options.weight_decay, fused=True
    )
    factor = partial(
        rate_at, steps=config.steps, peak=1.0, warmup=min(options.lr_warmup, config.steps), floor=options.lr_floor
    )
    windows, context = options.held_out_windows, options.context
    return Task(
        model=model,
        optimizer=optimizer,
        batches=lambda worker, workers: Windows(
            corpus.training, batch=options.batch, context=context, seed=seed_of(config.seed, "batches", worker)
        ),
        loss=lambda model, batch: model(*batch),
        evaluate=lambda model, worker, workers: held_out_loss(
            model, corpus.held_out, windows=windows, context=context, part=worker, parts=workers
        ),
        scheduler=torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: factor(step)),
        samples=lambda batch: int(batch[0].numel()),
        unit="tokens",
        clip_gradients=options.clip_gradients,
    )


def library_files() -> list[Path]:
    """Return the sources of the interpreter's own library, without its tests; every tenth is held out."""
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    return [path for path in sorted(root.rglob("*.py")) if not skipped & set(path.relative_to(root).parts)]


@dataclass(frozen=True)
class Corpus:
    """Bytes to train on and bytes to be judged by, from different files."""

    training: torch.Tensor
    held_out: torch.Tensor

    @classmethod
    @cache
    def standard_library(cls) -> Corpus:
        """Read the interpreter's own library, without its tests."""
        texts = [path.read_bytes() for path in library_files()]
        return cls(
            training=_tensor(b"\n".join(text for i, text in enumerate(texts) if i % 10)),
            held_out=_tensor(b"\n".join(text for i, text in enumerate(texts) if i % 10 == 0)),
        )


class Windows:
    """Random windows of a text and what follows them, for ever; the same ones for the same seed.

    >>> text = torch.arange(100, dtype=torch.uint8)
    >>> windows = Windows(text, batch=1, context=3, seed=1)
    >>> given, wanted = next(iter(windows))
    >>> bool((given + 1 == wanted).all())
    True
    """

    def __init__(self, text: torch.Tensor, *, batch: int, context: int, seed: int) -> None:
        self._text, self._batch = text, batch
        self._reach = torch.arange(context + 1)
        self._generator = torch.Generator().manual_seed(seed)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        last = len(self._text) - len(self._reach) + 1
        while True:
            starts = torch.randint(last, (self._batch, 1), generator=self._generator)
            windows = self._text[starts + self._reach].long()
            yield windows[:, :-1], windows[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._generator.set_state(state["generator"])


@torch.no_grad()
def held_out_loss(
    model: nn.Module, text: torch.Tensor, *, windows: int, context: int, part: int, parts: int
) -> tuple[float, int]:
    """Return the sum of the losses over this part of `windows` windows spread evenly over the text, and their number.

    >>> text = torch.zeros(1000, dtype=torch.uint8)
    >>> held_out_loss(GPT(Shape(1, 16, 2, 8)), text, windows=10, context=8, part=0, parts=4)[1]
    3
    """
    device = next(model.parameters()).device
    starts = torch.linspace(0, len(text) - context - 1, windows).long()[part::parts, None]
    rows = text[starts + torch.arange(context + 1)].long().to(device)
    chunks = rows.split(32) if len(rows) else ()
    return sum(float(model(chunk[:, :-1], chunk[:, 1:])) * len(chunk) for chunk in chunks), len(rows)


def rate_at(step: int, steps: int, *, peak: float, warmup: int, floor: float = 0.1) -> float:
    """Return the learning rate: a linear warm-up, then half a cosine down to `floor` of the peak.

    >>> [round(rate_at(step, 100, peak=1.0, warmup=10), 2) for step in (0, 9, 10, 55, 100)]
    [0.1, 1.0, 1.0, 0.55, 0.1]
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, steps - warmup))
    return peak * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done)))


def _tensor(text: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)

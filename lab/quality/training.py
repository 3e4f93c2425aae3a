"""One run: the workers' inner steps as one computation, their rounds by the library itself.

Every worker is a thread with a module, an optimizer and a synchronizer of its own (`cadenza.testing.workers`, whose
transport gives the bits of real ranks). The first of them computes the inner step of all; then each calls `step()`.
"""

from __future__ import annotations

import json
import math
import platform
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache, partial
from typing import Any

import torch
from lab.quality import outers
from lab.quality.inner import StackedAdamW, StackedMuon
from lab.quality.model import SHAPES, Stack, new_model
from lab.quality.text import CONTEXT, Batches, Text, spread_windows

import cadenza
from cadenza.errors import NotFiniteError
from cadenza.testing import Worker, workers
from cadenza.training.gpt import Shape
from cadenza.training.standard_library_gpt import rate_at
from cadenza.training.strategies import build_strategy

__all__ = ["Setting", "compiled_losses", "train"]

_AVERAGED_EVERY, _SHARE = 30, 0.1  # the moving average: steps from one sample to the next, and the weight of each
Losses = Callable[[dict[str, torch.Tensor], torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Setting:
    """Everything that decides what a run gives.

    Args:
        strategy: As in a configuration's [strategy]: "name", "codec" and the preset's own keys. DDP is one worker with
            the batch of all, which is the same computation.
        batch: Windows of a worker in a step.
        tokens: Of all workers together in the whole run; the steps follow.
        betas: Of AdamW, which Muon leaves the embedding and the vectors to.
        warmup: The share of the steps in which the learning rate rises.
        decay: The weight decay of the whole run, in units of 1 / steps: 1 is that of arXiv 2503.09799.
        weight_decay: AdamW's own, whatever the length of the run, instead of `decay`.
        moments_kept: What is left of Adam's first and second moments after each round; of neither: AdamW begins anew.
    """

    strategy: Mapping[str, Any]
    workers: int
    batch: int
    lr: float
    seed: int
    size: str = "170k"
    tokens: int = 9216 * 512
    inner: str = "adamw"
    adamw_share: float = 0.5
    betas: tuple[float, float] = (0.9, 0.99)
    warmup: float = 0.1
    floor: float = 0.05
    decay: float = 1.0
    weight_decay: float | None = None
    qk_norm: bool = True
    context: int = CONTEXT
    moments_kept: tuple[float, float] = (1.0, 1.0)

    @property
    def steps(self) -> int:
        return self.tokens // (self.workers * self.batch * self.context)

    @property
    def shape(self) -> Shape:
        return replace(SHAPES[self.size], context=self.context)

    @property
    def key(self) -> str:
        """The same text for the same run; defaults are left out, so that new fields can be added."""
        usual = {f.name: f.default for f in fields(self)}
        return json.dumps({k: v for k, v in asdict(self).items() if v != usual[k]}, sort_keys=True)

    @classmethod
    def from_key(cls, key: str) -> Setting:
        """Return the setting that a key was made of.

        >>> setting = Setting({"name": "ddp"}, workers=1, batch=8, lr=1e-3, seed=1, betas=(0.9, 0.999))
        >>> Setting.from_key(setting.key) == setting
        True
        """
        given = json.loads(key)
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in given.items()})

    def build(self) -> cadenza.Strategy:
        """Return the strategy; DDP has none of its own here, so its one worker never meets anybody."""
        given = dict(self.strategy)
        if given["name"] == "ddp":
            return cadenza.local_sgd(2**62, measure_drift=False)
        if given.get("optimizer_state") == "reset":
            raise ValueError("The library resets a worker's optimizer, and the moments are those of the stacked one.")
        strategy = build_strategy(**{key: value for key, value in given.items() if key not in outers.KEYS})
        if not set(given) & set(outers.KEYS):
            return strategy
        decay = given["period"] / (self.steps * self.lr)  # of a round, at `decay` 1
        outer = outers.outer_step(given, decay_of_a_round=decay)
        return replace(strategy, levels=tuple(replace(level, outer=outer) for level in strategy.levels))


@dataclass
class Trainer:
    """What the threads of a run share."""

    setting: Setting
    text: Text = field(default_factory=Text.standard_library)
    compiled: bool = False

    def __post_init__(self) -> None:
        setting = self.setting
        model = new_model(setting.shape, seed=setting.seed, qk_norm=setting.qk_norm)
        self.stack = Stack(model, setting.shape, setting.workers)
        weight_decay = setting.weight_decay
        if weight_decay is None:
            weight_decay = setting.decay / (setting.steps * setting.lr)
        if setting.inner == "muon":
            self.inner: StackedAdamW | StackedMuon = StackedMuon(
                self.stack,
                betas=setting.betas,
                weight_decay=weight_decay,
                adamw_share=setting.adamw_share,
                momentum=0.95,
            )
        else:
            self.inner = StackedAdamW(self.stack, betas=setting.betas, weight_decay=weight_decay)
        self.losses = compiled_losses(setting.shape, setting.qk_norm) if self.compiled else self.stack.losses
        self.batches = Batches(self.text.training, seed=1000 + setting.seed, context=setting.context)
        self.barrier = threading.Barrier(setting.workers)
        self.average = self.stack.values.detach().mean(0, keepdim=True)  # of the workers' mean, over the last steps
        self.curve: list[tuple[int, float]] = []
        self.training_loss = 0.0
        self.bytes_sent = 0

    def compute_gradients(self, number: int) -> None:
        """Compute the gradients of all workers at step `number` (from 1)."""
        setting, stack = self.setting, self.stack
        losses = self.losses(stack.leaves, *self.batches.take(setting.workers, setting.batch))
        stack.backward(losses)
        self.training_loss += (float(losses.detach().mean()) - self.training_loss) * max(0.01, 1 / number)

    def update(self, number: int) -> None:
        """Take the inner step of all workers."""
        setting, gradients = self.setting, self.stack.gradients
        if setting.moments_kept != (1.0, 1.0) and number > 1 and (number - 1) % setting.strategy["period"] == 0:
            assert isinstance(self.inner, StackedAdamW)
            self.inner.forget(*setting.moments_kept)  # a round has just landed
        norms = gradients.norm(dim=1, keepdim=True)
        gradients.mul_((1 / (norms + 1e-6)).clamp(max=1.0))
        warmup = int(setting.warmup * setting.steps)
        self.inner.step(rate_at(number - 1, setting.steps, peak=setting.lr, warmup=warmup, floor=setting.floor))
        if number % max(1, setting.steps // 8) == 0 and number < setting.steps:
            self.curve.append((number, self.loss(self.mean(), self.text.validation, windows=256)))
        if number % _AVERAGED_EVERY == 1:  # just after a round of a period that divides it
            self.average.lerp_(self.mean(), _SHARE)

    def mean(self) -> torch.Tensor:
        """Return the mean of the workers' parameters, as one row."""
        return self.stack.values.detach().mean(0, keepdim=True)

    @torch.no_grad()
    def loss(self, values: torch.Tensor, text: torch.Tensor, *, windows: int) -> float:
        """Return the loss of one row of values on windows spread over a text."""
        given, wanted = spread_windows(text, windows, context=self.setting.context)
        model, pairs = self.stack.parts(values), zip(given.split(128), wanted.split(128), strict=True)
        return sum(float(self.stack.losses(model, g[None], w[None])) * len(g) for g, w in pairs) / windows

    def work(self, worker: Worker) -> None:
        """Train as one of the workers."""
        rank = worker.rank
        reports: list[cadenza.RoundReport] = []
        sync = cadenza.attach(
            self.stack.modules[rank], self.inner.of(rank), self.setting.build(), observers=[reports.append]
        )
        for number in range(1, self.setting.steps + 1):
            self._first(rank, self.compute_gradients, number)
            if number <= sync.strategy.warmup_steps:
                sync.average_gradients()
                self.barrier.wait()
            self._first(rank, self.update, number)
            sync.step()
            self.barrier.wait()
        sync.finish()
        if rank == 0:
            ring = 2 * (self.setting.workers - 1) * self.stack.values[0].nbytes // self.setting.workers
            together = min(sync.strategy.warmup_steps, self.setting.steps)
            self.bytes_sent = sum(report.bytes_sent for report in reports) + together * ring

    def _first(self, rank: int, work: Callable[[int], None], number: int) -> None:
        """Let the first worker do something for all while the others wait."""
        if rank == 0:
            try:
                work(number)
            except BaseException:
                self.barrier.abort()
                raise
        self.barrier.wait()


def train(setting: Setting, *, compiled: bool = True, text: Text | None = None) -> dict[str, Any]:
    """Return what a run ends with: its losses on the three texts, and what a worker has sent."""
    started, used = time.time(), time.process_time()
    trainer = Trainer(setting, text=text or Text.standard_library(), compiled=compiled)
    try:
        with workers(setting.workers, timeout_s=3600) as pool:
            pool.run(trainer.work)
    except NotFiniteError:
        trainer.stack.values.detach().fill_(math.nan)  # a result as well: not this setting
    validation, test = partial(trainer.loss, windows=1024), partial(trainer.loss, windows=2048)
    return {
        "validation": validation(trainer.mean(), trainer.text.validation),
        "test": test(trainer.mean(), trainer.text.test),
        "average_validation": validation(trainer.average, trainer.text.validation),
        "average_test": test(trainer.average, trainer.text.test),
        "training": trainer.training_loss,
        "curve": trainer.curve,
        "steps": setting.steps,
        "bytes_sent": trainer.bytes_sent,
        "environment": f"Python {platform.python_version()}, torch {torch.__version__}",
        "seconds": round(time.time() - started, 1),
        "cpu_seconds": round(time.process_time() - used, 1),
    }


@cache
def compiled_losses(shape: Shape, qk_norm: bool) -> Losses:
    """Return the stack's losses, compiled once for each shape of batch in this process."""
    return torch.compile(Stack(new_model(shape, seed=0, qk_norm=qk_norm), shape, 1).losses, dynamic=False)

"""SGD on the anchor, with or without Nesterov momentum: the outer updates of DiLoCo and SparseLoCo."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import ClassVar

from cadenza.common.checks import as_count, as_fraction, as_positive
from cadenza.common.later import torch
from cadenza.common.norms import in_cache
from cadenza.outer.base import State
from cadenza.outer.factors import PROBED_ROUNDS, Factor, checked_clip, checked_factor, factor_after

__all__ = ["Sgd", "nesterov", "sgd"]

_STEADY = 1.0  # a rate that rises with the members does not rise beyond this one: training was seen to go astray there


@dataclass(frozen=True)
class Sgd:
    """SGD on the anchor with delta as its gradient; made by `nesterov` and `sgd`.

    >>> nesterov() == Sgd(lr=0.7, momentum=0.9, nesterov=True)
    True
    """

    lr: float
    momentum: float = 0.0
    nesterov: bool = False
    clip: float | None = None
    schedule: Factor | None = field(default=None, metadata=PROBED_ROUNDS)
    rises_beyond: int | None = field(default=None, metadata={"added": "states were saved before it was there"})
    plain: ClassVar[bool] = False
    needs_inner_lr: ClassVar[bool] = False
    needs_own: ClassVar[bool] = False
    needs_anchor_mean: ClassVar[bool] = False
    diverges: ClassVar[bool] = False

    def init(self, anchor: torch.Tensor) -> State:
        return {"momentum": torch.zeros_like(anchor)} if self.momentum else {}

    # torch.optim.SGD in its order, but each product is rounded before it is added: see `cadenza.outer`.
    def update(
        self,
        anchor: torch.Tensor,
        delta: torch.Tensor,
        state: State,
        *,
        rounds: int,
        inner_lr: float | None = None,
        own: torch.Tensor | None = None,
        now: torch.Tensor | None = None,
        members: int = 1,
        anchor_mean: torch.Tensor | None = None,
    ) -> None:
        factor = -self._lr_for(members) * factor_after(self.schedule, rounds)
        momenta = in_cache(state["momentum"]) if self.momentum else []
        for part, step, momentum in zip_longest(in_cache(anchor), in_cache(delta), momenta):
            if momentum is not None:
                momentum.mul_(self.momentum).add_(step)
                step = step.add_(momentum * self.momentum) if self.nesterov else step.copy_(momentum)
            part.add_(step.mul_(factor))

    def _lr_for(self, members: int) -> float:
        if self.rises_beyond is None or members <= self.rises_beyond:
            return self.lr
        return max(self.lr, min(_STEADY, self.lr * math.sqrt(members / self.rises_beyond)))


def nesterov(
    lr: float = 0.7,
    *,
    momentum: float = 0.9,
    clip: float | None = None,
    schedule: Factor | Mapping[int, float] | None = None,
    rises_beyond: int | None = None,
) -> Sgd:
    """Return DiLoCo's outer update (arXiv 2311.08105): m ← μ·m + delta; anchor ← anchor − lr·(delta + μ·m).

    `clip` bounds the norm of the whole delta. `schedule` gives a factor on `lr`: a function of the number of rounds
    that came before, or milestones {first round: factor}, with 1 before the first. With more members than
    `rises_beyond` the rate is larger by the square root of how many times as many they are, up to 1.

    >>> nesterov(schedule={0: 0.1, 10: 1.0}).schedule(9)
    0.1
    """
    if rises_beyond is not None:
        rises_beyond = as_count("rises_beyond", rises_beyond)
    return Sgd(
        as_positive("lr", lr),
        as_fraction("momentum", momentum),
        True,
        checked_clip(clip),
        checked_factor(schedule),
        rises_beyond,
    )


def sgd(
    lr: float = 1.0,
    *,
    momentum: float = 0.0,
    clip: float | None = None,
    schedule: Factor | Mapping[int, float] | None = None,
) -> Sgd:
    """Return SGD as the outer update: m ← μ·m + delta; anchor ← anchor − lr·m. SparseLoCo's has no momentum.

    `clip` and `schedule` are those of `nesterov`.

    >>> anchor = torch.tensor([1.0])
    >>> sgd(lr=0.5).update(anchor, torch.tensor([0.5]), {}, rounds=0)
    >>> anchor
    tensor([0.7500])
    """
    return Sgd(
        as_positive("lr", lr), as_fraction("momentum", momentum), False, checked_clip(clip), checked_factor(schedule)
    )

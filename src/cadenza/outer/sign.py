"""A step of one size by the sign of the mean difference: the outer update of DeMo."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from cadenza.common.checks import as_number, as_positive
from cadenza.common.later import torch
from cadenza.outer.base import State

__all__ = ["Sign", "sign"]


@dataclass(frozen=True)
class Sign:
    """A step of one size by the sign of the mean difference; made by `sign`.

    >>> sign().needs_inner_lr
    True
    """

    lr: float
    weight_decay: float = 0.0
    plain: ClassVar[bool] = False
    needs_inner_lr: ClassVar[bool] = True
    needs_own: ClassVar[bool] = False
    needs_anchor_mean: ClassVar[bool] = False
    diverges: ClassVar[bool] = False
    clip: ClassVar[float | None] = None

    def init(self, anchor: torch.Tensor) -> State:
        return {}

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
        if inner_lr is None or not 0 <= inner_lr < math.inf:
            raise ValueError(
                "The step by signs is a multiple of the inner optimizer's learning rate, a number of at least 0; got "
                f"{inner_lr!r}. Pass the optimizer to attach(), so that its lr can be read at every round."
            )
        step = self.lr * inner_lr
        if self.weight_decay:
            anchor.mul_(1 - step * self.weight_decay)
        anchor.sub_(delta.sign_().mul_(step))


def sign(lr: float = 1.0, *, weight_decay: float = 0.0) -> Sign:
    """Return DeMo's outer update (arXiv 2411.19870): a step η = lr · inner lr by the sign of the mean difference.

    anchor ← (1 − η · weight_decay) · anchor − η · sign(delta). The inner learning rate is a factor, so that a scheduler
    of the inner optimizer is one of this step, too.

    >>> anchor = torch.tensor([1.0, 1.0, 1.0])
    >>> sign(lr=0.5).update(anchor, torch.tensor([0.1, -7.0, 0.0]), {}, rounds=0, inner_lr=0.5)
    >>> anchor
    tensor([0.7500, 1.2500, 1.0000])
    """
    if not 0 <= as_number("weight_decay", weight_decay) < math.inf:
        raise ValueError(f"weight_decay must be a number of at least 0; got {weight_decay!r}.")
    return Sign(as_positive("lr", lr), float(weight_decay))

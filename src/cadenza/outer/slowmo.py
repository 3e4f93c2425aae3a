"""SlowMo: momentum over rounds, in units of the inner learning rate."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from cadenza.common.checks import as_fraction, as_positive
from cadenza.common.later import torch
from cadenza.common.norms import in_cache
from cadenza.outer.base import State

__all__ = ["SlowMo", "slowmo"]


@dataclass(frozen=True)
class SlowMo:
    """Momentum over rounds in units of the inner learning rate; made by `slowmo`.

    >>> slowmo().needs_inner_lr
    True
    """

    alpha: float
    beta: float
    plain: ClassVar[bool] = False
    needs_inner_lr: ClassVar[bool] = True
    needs_own: ClassVar[bool] = False
    needs_anchor_mean: ClassVar[bool] = False
    diverges: ClassVar[bool] = False
    clip: ClassVar[float | None] = None

    def init(self, anchor: torch.Tensor) -> State:
        return {"momentum": torch.zeros_like(anchor)}

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
                f"SlowMo divides by the inner optimizer's learning rate, a number of at least 0; got {inner_lr!r}. "
                "Pass the optimizer to attach(), so that its lr can be read at every round."
            )
        if inner_lr == 0:  # nothing moved by this learning rate, so there is nothing to scale by it
            anchor.sub_(delta)
            return
        parts = zip(in_cache(anchor), in_cache(delta), in_cache(state["momentum"]), strict=True)
        for part, step, momentum in parts:
            momentum.mul_(self.beta).add_(step.div_(inner_lr))
            part.sub_(torch.mul(momentum, self.alpha * inner_lr, out=step))


def slowmo(*, alpha: float = 1.0, beta: float = 0.7) -> SlowMo:
    """Return SlowMo (arXiv 1910.00643): m ← β·m + delta / lr; anchor ← anchor − α·lr·m, with the inner lr.

    Its authors use α = 1 and β from 0.4 to 0.8. Where the inner lr is 0, the mean is taken and m stays.

    >>> anchor = torch.tensor([1.0])
    >>> outer = slowmo(beta=0.5)
    >>> state = outer.init(anchor)
    >>> for rounds in range(2):
    ...     outer.update(anchor, torch.tensor([0.25]), state, rounds=rounds, inner_lr=0.5)
    >>> anchor, state["momentum"]  # m: 0.5, then 0.5 · 0.5 + 0.5; the anchor: 0.75, then 0.75 − 0.5 · 0.75
    (tensor([0.3750]), tensor([0.7500]))
    """
    return SlowMo(as_positive("alpha", alpha), as_fraction("beta", beta))

"""NoLoCo: momentum on anchors of each worker's own, which are pulled towards those of the workers it meets."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import ClassVar

from cadenza.common.checks import as_fraction, as_positive
from cadenza.common.later import torch
from cadenza.common.norms import in_cache
from cadenza.outer.base import State

__all__ = ["NoLoCo", "noloco"]


@dataclass(frozen=True)
class NoLoCo:
    """Momentum with a pull towards the mean of the members' anchors; made by `noloco`.

    >>> noloco().needs_anchor_mean, noloco().diverges
    (True, True)
    """

    lr: float
    momentum: float
    pull: float
    plain: ClassVar[bool] = False
    needs_inner_lr: ClassVar[bool] = False
    needs_own: ClassVar[bool] = False
    needs_anchor_mean: ClassVar[bool] = True
    diverges: ClassVar[bool] = True
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
        if anchor_mean is None:
            raise ValueError("NoLoCo pulls anchors towards their mean, so update() needs anchor_mean; got None.")
        parts = zip(*(in_cache(flat) for flat in (anchor, delta, state["momentum"], anchor_mean)), strict=True)
        for part, step, momentum, mean in parts:
            momentum.mul_(self.momentum).add_(step.mul_(self.lr)).add_((part - mean).mul_(self.pull))
            part.sub_(momentum)


def noloco(lr: float = 0.7, *, momentum: float = 0.5, pull: float | None = None) -> NoLoCo:
    """Return NoLoCo's outer update (arXiv 2506.10911): anchors of each worker's own, pulled together where they meet.

    m ← α·m + β·delta + γ·(anchor − mean anchor); anchor ← anchor − m. β is `lr`, α is `momentum`, γ is `pull`, and the
    means are over the members of the round. Every worker has an anchor and a momentum of its own. The paper calls it a
    Nesterov step, but its authors' code has no look-ahead, and neither has this. γ is β where it is not given, as in
    that code.

    From γ = 2·(1 − α²) on, many workers that meet in pairs drift apart unless training pulls them together, so there is
    a warning.

    >>> anchor = torch.tensor([1.0])
    >>> outer = noloco(lr=0.5, momentum=0.5, pull=0.25)
    >>> state = outer.init(anchor)
    >>> outer.update(anchor, torch.tensor([0.5]), state, rounds=0, anchor_mean=torch.tensor([0.0]))
    >>> anchor  # 1 − (0.5 · 0.5 + 0.25 · (1 − 0))
    tensor([0.5000])
    """
    lr, momentum = as_positive("lr", lr), as_fraction("momentum", momentum)
    pull = lr if pull is None else as_positive("pull", pull)
    limit = 2 * (1 - momentum**2)
    if pull >= limit:
        warnings.warn(
            f"pull={pull:g} with momentum={momentum:g} lets workers that meet in pairs drift apart: it should be below "
            f"2·(1 − momentum²) = {limit:.3g}. Choose a smaller pull (by default it is the lr) or a smaller momentum.",
            stacklevel=2,
        )
    return NoLoCo(lr, momentum, pull)

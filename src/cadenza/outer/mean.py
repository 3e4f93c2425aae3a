"""Take the mean as it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from cadenza.common.later import torch
from cadenza.outer.base import State

__all__ = ["Mean", "mean"]


@dataclass(frozen=True)
class Mean:
    """Take the mean as it is; made by `mean`.

    >>> mean().plain
    True
    """

    plain: ClassVar[bool] = True
    needs_inner_lr: ClassVar[bool] = False
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
        anchor.sub_(delta)


def mean() -> Mean:
    """Return the plain outer update: all go on from the mean (local SGD).

    >>> anchor = torch.tensor([1.0])
    >>> mean().update(anchor, torch.tensor([0.25]), {}, rounds=0)
    >>> anchor
    tensor([0.7500])
    """
    return Mean()

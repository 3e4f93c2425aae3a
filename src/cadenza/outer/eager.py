"""Eager updates: a worker's newest difference counts at once, the others' one round late."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from cadenza.common.checks import as_fraction, as_positive
from cadenza.common.later import torch
from cadenza.common.norms import in_cache
from cadenza.outer.base import State
from cadenza.outer.sgd import Sgd

__all__ = ["Eager", "eager"]


@dataclass(frozen=True)
class Eager:
    """Nesterov's step on the mean difference with this worker's own part of it brought up to date; made by `eager`.

    >>> eager().diverges, eager().needs_own
    (True, True)
    """

    lr: float
    momentum: float = 0.9
    plain: ClassVar[bool] = False
    needs_inner_lr: ClassVar[bool] = False
    needs_own: ClassVar[bool] = True
    needs_anchor_mean: ClassVar[bool] = False
    diverges: ClassVar[bool] = True
    clip: ClassVar[float | None] = None

    def init(self, anchor: torch.Tensor) -> State:
        return self._step.init(anchor)

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
        if own is None or now is None:
            raise ValueError(
                "An eager update needs this worker's own differences: pass own= (at the launch), now= (at the landing) "
                "and members=, as the engine does where an outer update says needs_own."
            )
        for part, fresh, sent in zip(in_cache(delta), in_cache(now), in_cache(own), strict=True):
            part.add_((fresh - sent).mul_(1 / members))
        self._step.update(anchor, delta, state, rounds=rounds)

    @property
    def _step(self) -> Sgd:
        return Sgd(self.lr, self.momentum, nesterov=True)


def eager(lr: float = 0.7, *, momentum: float = 0.9) -> Eager:
    """Return the outer update of eager updates (arXiv 2502.12996), for rounds that land when the next is launched.

    With M workers, D the difference that a worker has sent, D̄ its mean over all, and D' the worker's difference now:
    E = D̄ + (D' − D) / M; m ← μ·m + E; anchor ← anchor − lr·(E + μ·m). So each difference counts once in every worker's
    anchor: the worker's own at once, the others' a period later. Anchor and momentum are each worker's own, and never
    quite the same on two of them. Where a level's delay is shorter than its period, D' is D, and this is `nesterov`.

    The paper leaves open how the first round begins: nothing was sent before it, so its E is D' / M.

    >>> anchor, sent, now = torch.tensor([1.0]), torch.tensor([0.5]), torch.tensor([0.25])
    >>> outer = eager(lr=1.0, momentum=0.0)
    >>> outer.update(anchor, torch.tensor([0.75]), {}, rounds=0, own=sent, now=now, members=2)
    >>> anchor  # 1 − (0.75 + (0.25 − 0.5) / 2)
    tensor([0.3750])
    """
    return Eager(as_positive("lr", lr), as_fraction("momentum", momentum))

"""Outer steps that no preset has: candidates, each one change to DiLoCo's.

>>> step = outer_step({"outer_lr": 0.7, "outer_momentum": 0.8, "look_ahead": False}, decay_of_a_round=0.1)
>>> step == sgd(0.7, momentum=0.8)
True
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from cadenza.outer import Outer, Sgd, State, nesterov, sgd

__all__ = ["KEYS", "DecayedAnchor", "Restarted", "outer_step"]

KEYS = ("outer_factors", "look_ahead", "restart_every", "anchor_decay")  # of a strategy in the lab


@dataclass(frozen=True)
class Restarted:
    """An outer step whose momentum begins at zero again, every so many rounds."""

    step: Sgd
    every: int
    plain: ClassVar[bool] = False
    needs_inner_lr: ClassVar[bool] = False
    needs_own: ClassVar[bool] = False
    needs_anchor_mean: ClassVar[bool] = False
    diverges: ClassVar[bool] = False
    clip: ClassVar[float | None] = None

    def init(self, anchor: torch.Tensor) -> State:
        return self.step.init(anchor)

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
        if rounds % self.every == 0:
            state["momentum"].zero_()
        self.step.update(anchor, delta, state, rounds=rounds, members=members)


@dataclass(frozen=True)
class DecayedAnchor:
    """An outer step before which the anchor shrinks by `rate` times the inner learning rate."""

    step: Sgd
    rate: float
    plain: ClassVar[bool] = False
    needs_inner_lr: ClassVar[bool] = True
    needs_own: ClassVar[bool] = False
    needs_anchor_mean: ClassVar[bool] = False
    diverges: ClassVar[bool] = False
    clip: ClassVar[float | None] = None

    def init(self, anchor: torch.Tensor) -> State:
        return self.step.init(anchor)

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
        assert inner_lr is not None
        anchor.mul_(1 - self.rate * inner_lr)
        self.step.update(anchor, delta, state, rounds=rounds, members=members)


def outer_step(given: Mapping[str, Any], *, decay_of_a_round: float) -> Outer:
    """Return the outer step that the keys of a strategy ask for.

    `outer_factors` are factors on the outer learning rate, by the round from which they hold; `anchor_decay` is in
    units of what the inner steps of a round would have taken away, `decay_of_a_round` times the inner learning rate.
    """
    factors = {int(round_): factor for round_, factor in given.get("outer_factors", {}).items()} or None
    make = nesterov if given.get("look_ahead", True) else sgd
    step = make(given["outer_lr"], momentum=given["outer_momentum"], schedule=factors)
    if "restart_every" in given:
        return Restarted(step, given["restart_every"])
    if "anchor_decay" in given:
        return DecayedAnchor(step, given["anchor_decay"] * decay_of_a_round)
    return step

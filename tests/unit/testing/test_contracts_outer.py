"""The contract of outer updates: for each promise a piece that breaks it, and the words that say so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from cadenza import outer
from cadenza.testing import (
    check_outer,
)

Update = Callable[[torch.Tensor, torch.Tensor, dict[str, torch.Tensor], Any], None]


@dataclass(frozen=True)
class Scripted:
    """An outer update that does what a function says, and is plain SGD otherwise."""

    script: Update
    state: tuple[str, ...] = ("momentum",)
    plain: bool = False
    needs_inner_lr: bool = False
    needs_own: bool = False
    needs_anchor_mean: bool = False
    diverges: bool = False
    clip: float | None = None

    def init(self, anchor: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: torch.zeros_like(anchor) for name in self.state}

    def update(self, anchor: torch.Tensor, delta: torch.Tensor, state: Any, **told: Any) -> None:
        self.script(anchor, delta, state, told)


def step(anchor: torch.Tensor, delta: torch.Tensor, state: Any, told: Any) -> None:
    anchor.sub_(delta, alpha=0.5)


def wrong_way(anchor: torch.Tensor, delta: torch.Tensor, state: Any, told: Any) -> None:
    anchor.add_(delta)


def by_the_norm(anchor: torch.Tensor, delta: torch.Tensor, state: Any, told: Any) -> None:
    anchor.sub_(delta / delta.norm())


def replaces_state(anchor: torch.Tensor, delta: torch.Tensor, state: Any, told: Any) -> None:
    state["momentum"] = state["momentum"] + delta
    anchor.sub_(delta)


SECRET = {"rounds": 0}


def keeps_secrets(anchor: torch.Tensor, delta: torch.Tensor, state: Any, told: Any) -> None:
    SECRET["rounds"] += 1
    anchor.sub_(delta, alpha=1 / SECRET["rounds"])


def uses_own(anchor: torch.Tensor, delta: torch.Tensor, state: Any, told: Any) -> None:
    if told.get("own") is None:
        raise ValueError("own is missing")
    anchor.sub_(delta).sub_(told["own"], alpha=0.1)


def uses_own_if_there(anchor: torch.Tensor, delta: torch.Tensor, state: Any, told: Any) -> None:
    anchor.sub_(delta)
    if told.get("own") is not None:
        anchor.sub_(told["own"], alpha=0.1)


def spoils_own(anchor: torch.Tensor, delta: torch.Tensor, state: Any, told: Any) -> None:
    anchor.sub_(delta)
    if told.get("own") is not None:
        told["own"].zero_()


def explodes(anchor: torch.Tensor, delta: torch.Tensor, state: Any, told: Any) -> None:
    anchor.sub_(delta).div_(0.0)


class GrowsState(Scripted):
    def init(self, anchor: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"momentum": torch.zeros(2 * anchor.numel())}


OUTERS = {
    "direction": (Scripted(wrong_way), "towards the mean"),
    "slices": (Scripted(by_the_norm), "slices make the update of the whole"),
    "state in place": (Scripted(replaces_state), "changes the state in place"),
    "no state of its own": (Scripted(keeps_secrets), "restored from its state|slices"),
    "state of the anchor's size": (GrowsState(step), "of the anchor's size"),
    "finite": (Scripted(explodes), "finite anchor"),
    "plain is exact": (Scripted(step, state=(), plain=True), "plain means exactly"),
    "plain has no state": (
        Scripted(lambda anchor, delta, state, told: anchor.sub_(delta), plain=True),
        "no state and no clipping",
    ),
    "needs what it says": (Scripted(step, needs_inner_lr=True), "with needs_inner_lr"),
    "own is needed": (Scripted(step, needs_own=True), "with needs_own"),
    "anchor_mean is needed": (Scripted(step, needs_anchor_mean=True), "with needs_anchor_mean"),
    "own in secret": (Scripted(uses_own_if_there), "without needs_own"),
    "diverges in secret": (Scripted(uses_own, needs_own=True), "without diverges"),
    "own is left alone": (Scripted(spoils_own), "leaves own"),
    "clip": (replace(outer.nesterov(), clip=-1.0), "clip is None or a norm above 0"),
    "members": (object(), "all members; plain, needs_inner_lr"),
}


@pytest.mark.parametrize(("broken", "words"), OUTERS.values(), ids=OUTERS)
def test_broken_outer_updates_are_found(broken: Any, words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        check_outer(broken)


def test_an_outer_update_that_says_what_it_does_is_accepted() -> None:
    check_outer(Scripted(uses_own, needs_own=True, diverges=True))  # type: ignore[arg-type]

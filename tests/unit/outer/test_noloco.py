"""NoLoCo's outer update, worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from cadenza.outer import NoLoCo, noloco
from cadenza.testing import check_outer


@pytest.mark.parametrize("outer", [noloco(), noloco(lr=0.5, momentum=0.9, pull=0.2)])
def test_keeps_its_contract(outer: NoLoCo) -> None:
    check_outer(outer)


def test_momentum_gathers_differences_and_the_distance_to_the_mean_anchor() -> None:
    anchor = torch.tensor([4.0])
    outer = noloco(lr=0.5, momentum=0.25, pull=1.0)
    state = outer.init(anchor)
    outer.update(anchor, torch.tensor([2.0]), state, rounds=0, anchor_mean=torch.tensor([3.0]))
    assert (state["momentum"].item(), anchor.item()) == (2.0, 2.0)  # 0.5 · 2 + 1 · (4 − 3)
    outer.update(anchor, torch.tensor([1.0]), state, rounds=1, anchor_mean=torch.tensor([2.5]))
    assert (state["momentum"].item(), anchor.item()) == (0.5, 1.5)  # 0.25 · 2 + 0.5 · 1 + 1 · (2 − 2.5)


def test_without_momentum_and_with_full_steps_a_pair_goes_on_from_its_mean() -> None:
    values, anchors = torch.tensor([1.0, 5.0]), torch.tensor([2.0, 8.0])
    delta, centre = (anchors - values).mean(), anchors.mean()
    for anchor in anchors.split(1):
        moved = anchor.clone()
        outer = noloco(lr=1.0, momentum=0.0)
        outer.update(moved, delta.reshape(1).clone(), outer.init(moved), rounds=0, anchor_mean=centre.reshape(1))
        assert moved.item() == 3.0


def test_the_pull_is_the_lr_where_it_is_not_given() -> None:
    assert noloco(lr=0.3) == noloco(lr=0.3, pull=0.3)


def test_the_mean_anchor_is_not_changed() -> None:
    anchor, centre = torch.randn(100_000), torch.randn(100_000)
    kept = centre.clone()
    noloco().update(anchor, torch.randn(100_000), noloco().init(anchor), rounds=0, anchor_mean=centre)
    assert torch.equal(centre, kept)


def test_a_pull_that_lets_workers_drift_apart_is_warned_of() -> None:
    with pytest.warns(UserWarning, match=r"pull=0.7 with momentum=0.9 .* below 2·\(1 − momentum²\) = 0.38"):
        noloco(momentum=0.9)


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"lr": 0}, ValueError, "lr must be a number above 0; got 0"),
        ({"lr": "0.7"}, TypeError, "lr must be a number"),
        ({"momentum": 1.0}, ValueError, "momentum must be at least 0 and below 1"),
        ({"pull": 0}, ValueError, "pull must be a number above 0; got 0"),
        ({"pull": math.nan}, ValueError, "pull must be a number above 0; got nan"),
        ({"pull": True}, TypeError, "pull must be a number; got True"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        noloco(**options)

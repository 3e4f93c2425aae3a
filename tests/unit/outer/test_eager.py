"""The eager outer update on numbers worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import cadenza
from cadenza import LevelPlan, Strategy
from cadenza.outer import eager, nesterov


def tensor(value: float) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.float64)


def test_it_brings_its_own_part_of_the_mean_up_to_date_by_hand() -> None:
    # Round 1: E = 0.6 + (0.9 − 0.3) / 2 = 0.9;  m = 0.9;         anchor 1 − 0.5 · (0.9 + 0.5 · 0.9) = 0.325.
    # Round 2: E = 0.2 + (0.1 − 0.9) / 2 = −0.2; m = 0.45 − 0.2 = 0.25; anchor 0.325 − 0.5 · (−0.2 + 0.125) = 0.3625.
    outer = eager(lr=0.5, momentum=0.5)
    anchor = tensor(1.0)
    state = outer.init(anchor)
    own, now = tensor(0.3), tensor(0.9)
    outer.update(anchor, tensor(0.6), state, rounds=0, own=own, now=now, members=2)
    assert anchor.item() == pytest.approx(0.325)
    outer.update(anchor, tensor(0.2), state, rounds=1, own=now, now=tensor(0.1), members=2)
    assert anchor.item() == pytest.approx(0.3625)
    assert (own.item(), now.item()) == (0.3, 0.9)


def test_it_is_nesterov_to_the_bit_where_nothing_was_learned_since_the_launch() -> None:
    generator = torch.Generator().manual_seed(0)
    one, other = (torch.ones(1003) for _ in range(2))
    states = eager().init(one), nesterov().init(other)
    for n in range(5):
        delta, own = torch.randn(1003, generator=generator), torch.randn(1003, generator=generator)
        eager().update(one, delta.clone(), states[0], rounds=n, own=own, now=own, members=3)
        nesterov().update(other, delta, states[1], rounds=n)
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"lr": 0.0}, ValueError, "lr must be a number above 0; got 0.0"),
        ({"lr": math.nan}, ValueError, "lr must be a number above 0"),
        ({"lr": "0.7"}, TypeError, "lr must be a number; got '0.7', a str"),
        ({"momentum": 1.0}, ValueError, "momentum must be at least 0 and below 1"),
        ({"momentum": None}, TypeError, "momentum must be a number"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        eager(**options)


@pytest.mark.parametrize("faults", [cadenza.shrink(), cadenza.skip_round()], ids=lambda faults: faults.name)
def test_anchors_of_its_own_do_not_go_with_workers_that_come_and_go(faults: Any) -> None:
    with pytest.raises(ValueError, match=r"anchors that differ: .* use faults=raise_error"):
        cadenza.eager_diloco(4, faults=faults)


def test_anchors_of_its_own_do_not_go_with_a_period_that_follows_the_drift() -> None:
    schedule = cadenza.adaptive(4, target_drift=0.1, minimum=2, maximum=8)
    with pytest.raises(ValueError, match="one anchor for all"):
        Strategy(levels=(LevelPlan(schedule, outer=eager()),))

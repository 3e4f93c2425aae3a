"""The step by signs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from cadenza.outer import sign


def test_every_value_moves_by_as_much() -> None:
    anchor = torch.tensor([1.0, -2.0, 3.0])
    sign(lr=0.5).update(anchor, torch.tensor([1e-20, -1e20, 0.0]), {}, rounds=3, inner_lr=0.25)
    assert anchor.tolist() == [0.875, -1.875, 3.0]


def test_weights_decay_by_themselves_before_the_step() -> None:
    anchor = torch.tensor([1.0, -2.0])
    sign(lr=0.5, weight_decay=0.5).update(anchor, torch.tensor([1.0, 0.0]), {}, rounds=0, inner_lr=0.5)
    assert anchor.tolist() == [0.875 - 0.25, -1.75]


def test_an_inner_learning_rate_of_zero_moves_nothing() -> None:
    anchor = torch.tensor([1.0])
    sign(weight_decay=0.5).update(anchor, torch.tensor([1.0]), {}, rounds=0, inner_lr=0.0)
    assert anchor.item() == 1.0


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: sign(0), ValueError, "lr must be a number above 0; got 0."),
        (lambda: sign("1"), TypeError, "lr must be a number; got '1'"),
        (lambda: sign(weight_decay=-0.1), ValueError, "weight_decay must be a number of at least 0; got -0.1."),
        (lambda: sign(weight_decay=math.nan), ValueError, "weight_decay must be a number of at least 0; got nan."),
        (lambda: sign(weight_decay=None), TypeError, "weight_decay must be a number; got None"),
    ],
)
def test_bad_options_say_what_is_allowed(make: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()

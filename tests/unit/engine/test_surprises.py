"""What works, but not as one may think, is said once when a strategy is attached."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

import cadenza
from cadenza import Strategy
from support import surprises
from support.surprises import warnings_of


@pytest.mark.parametrize(
    "strategy",
    [cadenza.streaming_diloco(4, delay=2), cadenza.local_sgd(4, fragments=cadenza.by_bytes(1 << 20))],
    ids=["layers", "bytes"],
)
def test_one_fragment_where_several_were_asked_for_is_told_once(strategy: Strategy) -> None:
    [warning] = warnings_of(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), strategy)
    assert "makes one fragment of this model" in str(warning.message)
    assert "by_layers(1)" in str(warning.message)
    assert warning.filename == surprises.__file__


@pytest.mark.parametrize("fragments", [cadenza.whole(), cadenza.by_layers(1)], ids=["whole", "several"])
def test_nothing_is_told_of_fragments_that_are_what_was_asked_for(fragments: Any) -> None:
    assert not warnings_of(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), cadenza.local_sgd(4, fragments=fragments))

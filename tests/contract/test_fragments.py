"""What every fragmentation promises. A new one is added below, and is held to all of it."""

from __future__ import annotations

import pytest

from cadenza.fragments import Fragmentation, by_bytes, by_layers, whole
from cadenza.testing import check_fragmentation

FRAGMENTATIONS: list[Fragmentation] = [
    whole(),
    by_layers(1),
    by_layers(3),
    by_layers(5, strided=False),
    by_bytes(1),
    by_bytes(100),
    by_bytes(1 << 50),
]


@pytest.mark.parametrize("fragmentation", FRAGMENTATIONS)
def test_keeps_its_contract(fragmentation: Fragmentation) -> None:
    check_fragmentation(fragmentation)

"""What every topology that changes from round to round promises. A new one is added below."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from cadenza.testing import check_round_topology
from cadenza.topology import RoundTopology, random_pairs


@dataclass(frozen=True)
class Shuffled:
    """Groups of a size from ranks that are shuffled anew for every round; the last may be smaller."""

    size: int

    def groups(self, round: int, ranks: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        order = list(ranks)
        random.Random(round).shuffle(order)
        return tuple(tuple(sorted(order[i : i + self.size])) for i in range(0, len(order), self.size))


@pytest.mark.parametrize("topology", [Shuffled(2), Shuffled(3), random_pairs(), random_pairs(seed=7)])
def test_keeps_its_contract(topology: RoundTopology) -> None:
    check_round_topology(topology)

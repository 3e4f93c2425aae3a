"""Random pairs: a perfect matching in every round, the same on all ranks, every pair as often as any other."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from cadenza.topology import random_pairs


@pytest.mark.parametrize("ranks", [range(1), range(2), range(6), range(7), [4, 9, 2, 30]])
def test_a_round_has_every_rank_once_in_pairs_but_for_an_odd_one(ranks: Any) -> None:
    for round in range(50):
        groups = random_pairs().groups(round, ranks)
        assert sorted(rank for group in groups for rank in group) == sorted(ranks)
        assert sorted(map(len, groups)) == sorted([1] * (len(ranks) % 2) + [2] * (len(ranks) // 2))


def test_the_order_in_which_ranks_are_told_does_not_matter() -> None:
    for round in range(20):
        one, other = (random_pairs(3).groups(round, ranks) for ranks in ([0, 1, 2, 3, 4], [4, 2, 0, 3, 1]))
        assert one == other


def test_every_pair_meets_as_often_as_any_other_and_everyone_is_alone_at_times() -> None:
    met = Counter(group for round in range(5000) for group in random_pairs().groups(round, range(5)))
    pairs = [count for group, count in met.items() if len(group) == 2]
    alone = [count for group, count in met.items() if len(group) == 1]
    assert len(pairs) == 10
    assert len(alone) == 5
    assert all(900 < count < 1100 for count in [*pairs, *alone])  # 1000 of each are expected


def test_another_seed_has_other_pairs() -> None:
    one, other = ([random_pairs(seed).groups(round, range(8)) for round in range(5)] for seed in (0, 1))
    assert one != other


@pytest.mark.parametrize(("seed", "kind"), [(-1, ValueError), (2**63, ValueError), (1.5, TypeError), (None, TypeError)])
def test_a_seed_that_is_none_is_refused(seed: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind, match=r"seed is .*; give a whole number from 0"):
        random_pairs(seed)

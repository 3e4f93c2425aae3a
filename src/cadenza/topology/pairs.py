"""Pairs that change from round to round, as in NoLoCo (arXiv 2506.10911)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from cadenza.common.checks import check_whole_number

__all__ = ["RandomPairs", "random_pairs"]


@dataclass(frozen=True)
class RandomPairs:
    """Every round all ranks meet in new pairs; made by `random_pairs`.

    >>> RandomPairs(seed=0).groups(5, [7])
    ((7,),)
    """

    seed: int = 0

    def groups(self, round: int, ranks: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Return the pairs of a round; of an odd number of ranks, one stays alone."""

        # A digest, not a random number generator: it is the same in all versions of all libraries.
        def place(rank: int) -> bytes:
            return blake2b(f"{self.seed}/{round}/{rank}".encode(), digest_size=16).digest()

        order = sorted(ranks, key=place)
        return tuple(tuple(sorted(order[i : i + 2])) for i in range(0, len(order), 2))


def random_pairs(seed: int = 0) -> RandomPairs:
    """Let ranks meet in pairs, drawn anew for every round, the same on all ranks; of an odd number one stays alone.

    >>> pairs = random_pairs(seed=1)
    >>> [pairs.groups(round, range(4)) for round in range(3)]
    [((0, 3), (1, 2)), ((2, 3), (0, 1)), ((0, 2), (1, 3))]
    """
    check_whole_number("seed", seed, least=0, most=2**63 - 1)
    return RandomPairs(seed)

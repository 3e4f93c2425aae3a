"""Where tensors begin in a flat run of values, so that no block of a codec holds values of two of them.

A block has one scale, or one choice of what is sent; a tensor that moves a thousandth as far as its neighbour in the
block would be rounded to nothing. So tensors begin at multiples of a block, and what is free between them is zeros.
That costs bytes. To bound it, small neighbours share their blocks where the run would become much longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

__all__ = ["aligned_starts"]

_SHORT = 1 << 16  # values: a run that is no longer takes its time to begin, not to travel
_MOST = 2.0  # how many times as long a run may become
# Longer blocks are those of sparse codecs, which send a share of each block: of small tensors in blocks of their own
# they would send all. And the common multiple of several codecs' blocks may be very long.
_SHORT_BLOCK = 1024
_MOST_OF_LONG = 1.25


@lru_cache(maxsize=256)
def aligned_starts(sizes: tuple[int, ...], block: int) -> tuple[int, ...]:
    """Return where tensors of these sizes begin.

    Each begins at a multiple of `block`, unless the run becomes more than twice as long by that (a quarter longer, if
    blocks are of more than 1,024 values) and is not short in any case. Then only those do that are at least one block
    long, or two, four and so on, whichever is enough, and the smaller ones between them share.

    >>> aligned_starts((1000, 10, 300), 256)
    (0, 1024, 1280)
    >>> aligned_starts((16,) * 3 + (5000,) + (16,) * 997, 256)[:5]
    (0, 16, 32, 256, 5376)
    """
    most = max(_SHORT, _MOST * sum(sizes)) if block <= _SHORT_BLOCK else _MOST_OF_LONG * sum(sizes)
    least, starts = 1, _starts(sizes, block, 1)
    while starts[-1] + sizes[-1] > most:
        least = max(block, 2 * least)
        starts = _starts(sizes, block, least)
    return starts


def _starts(sizes: Sequence[int], block: int, least: int) -> tuple[int, ...]:
    """Return where tensors begin if those of at least `least` values have blocks of their own."""
    if block == 1:
        return (0, *accumulate(sizes))[:-1]
    starts, end, shared = [], 0, True
    for size in sizes:
        shares = size < least
        if not (shares and shared):
            end = -(-end // block) * block
        starts.append(end)
        end, shared = end + size, shares
    return tuple(starts)

"""How many bytes a round's values become, and how they are cut into messages: whole numbers, without torch.

The engine cuts by these functions and the planner counts by them, so what is planned is what is sent.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Protocol

__all__ = [
    "HEADER_BYTES",
    "LANES",
    "LANE_BYTES",
    "Sizes",
    "cut_plain_rows",
    "cut_rows",
    "cut_sparse",
    "longest_message",
    "row_bytes_between",
    "unit_of",
]

HEADER_BYTES = 96  # of what every member sends to every other before any values
LANE_BYTES = 8 << 20  # of a lane between machines
LANES = 3

_MOST = 1 << 20  # values in a message: what is decoded beside them stays at some MiB
_LEAST = 1 << 16  # values in a message: shorter ones take longer to begin than to travel
_MESSAGES = 8  # of a round, if it is long enough: while one is on the wire, its neighbours are encoded and decoded


class Sizes(Protocol):
    """What a codec tells about sizes."""

    @property
    def name(self) -> str: ...

    @property
    def block(self) -> int: ...

    @property
    def back(self) -> Sizes: ...

    def encoded_bytes(self, numel: int) -> int: ...


def row_bytes_between(members: int) -> int:
    """Return how long a row of a message may be between so many machines.

    >>> row_bytes_between(4)
    1048576
    """
    return LANE_BYTES // 2 // members // 64 * 64


def unit_of(codec: Sizes) -> int:
    """Return how many values are whole blocks both on their way to the owners of shares and on the way back."""
    return math.lcm(codec.block, codec.back.block)


def longest_message(row_bytes: int, codec: Sizes) -> int:
    """Return the most values, in whole blocks, whose encoding fits a row, there and back, and the scratch for it."""
    unit = unit_of(codec)

    def size(blocks: int) -> int:
        return max(codec.encoded_bytes(blocks * unit), codec.back.encoded_bytes(blocks * unit))

    blocks = max(1, min(_MOST // unit, row_bytes // size(1)))
    while size(blocks) > row_bytes:
        blocks -= 1
        if not blocks:
            raise ValueError(
                f"One block of {codec.name} takes {size(1)} bytes, more than the {row_bytes} that a message between so "
                "many members holds; choose a smaller block."
            )
    return blocks * unit


def cut_rows(numel: int, members: int, row_bytes: int, codec: Sizes) -> Iterator[tuple[int, int]]:
    """Cut values into rounds of one row for each member: yield where each starts, and how long its rows are."""
    unit = unit_of(codec)
    even = -(-max(_LEAST, numel // (members * _MESSAGES)) // unit) * unit
    return _cut(numel, members, min(longest_message(row_bytes, codec), even), unit)


def cut_plain_rows(numel: int, members: int, row_bytes: int, itemsize: int, codec: Sizes) -> Iterator[tuple[int, int]]:
    """Cut values that travel as they are, and each row in this codec later, into rounds of one row for each member."""
    longest, unit = row_bytes // itemsize, math.lcm(16, unit_of(codec))
    if unit > longest:  # rows cannot be as long as a block: then blocks lie as they come
        unit = 16
    return _cut(numel, members, longest // unit * unit, unit)


def cut_sparse(numel: int, row_bytes: int, codec: Sizes) -> list[int]:
    """Cut values that are gathered whole into messages: how many values each has."""
    longest = longest_message(row_bytes, codec)
    return [min(longest, numel - start) for start in range(0, numel, longest)]


def _cut(numel: int, members: int, longest: int, block: int) -> Iterator[tuple[int, int]]:
    start = 0
    while start < numel:
        each = -(-(numel - start) // members)
        row = min(longest, -(-each // block) * block)
        yield start, row
        start += members * row

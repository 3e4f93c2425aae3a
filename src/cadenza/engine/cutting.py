"""How flat values are cut into messages, and how messages take turns on a transport's lanes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import cast

import torch

from cadenza.codecs import Codec, ShapedCodec
from cadenza.transports import Lane, Transport

__all__ = [
    "in_turn",
    "longest_message",
    "padded",
    "pipeline",
    "plain_rows",
    "put",
    "rows_of",
    "sparse_messages",
    "unit_of",
]

_MOST = 1 << 20  # values in a message: what is decoded beside them stays at some MiB
_LEAST = 1 << 16  # values in a message: shorter ones take longer to begin than to travel
_MESSAGES = 8  # of a round, if it is long enough: while one is on the wire, its neighbours are encoded and decoded


def pipeline(lanes: Sequence[Lane], *stages: Callable[[int, Lane], None]) -> None:
    """Take one item for each lane through the stages: while one is on the wire, its neighbours are worked on."""
    count = len(lanes)
    for tick in range(count + len(stages) - 1):
        for delay, stage in enumerate(stages):
            if 0 <= (item := tick - delay) < count:
                stage(item, lanes[item])


def in_turn(count: int, transport: Transport, device: torch.device) -> list[Lane]:
    """Return a lane for each of so many items: the transport's own, round and round."""
    lanes = transport.lanes(device)
    return [lanes[item % len(lanes)] for item in range(count)]


def plain_rows(values: torch.Tensor, transport: Transport, codec: Codec) -> Iterator[tuple[int, int]]:
    """Cut values that travel as they are, and each row in this codec later, into rounds of one row for each member."""
    longest, unit = transport.row_bytes(values.device) // values.element_size(), math.lcm(16, unit_of(codec))
    if unit > longest:  # rows cannot be as long as a block: then blocks lie as they come
        unit = 16
    return _cut(values.numel(), len(transport.members), longest // unit * unit, unit)


def rows_of(values: torch.Tensor, transport: Transport, codec: Codec) -> Iterator[tuple[int, int]]:
    """Cut the values into rounds of one row for each member: yield where each starts, and how long its rows are."""
    members, unit = len(transport.members), unit_of(codec)
    longest = longest_message(transport.row_bytes(values.device), codec)
    even = -(-max(_LEAST, values.numel() // (members * _MESSAGES)) // unit) * unit
    return _cut(values.numel(), members, min(longest, even), unit)


def unit_of(codec: Codec) -> int:
    """Return how many values are whole blocks both on their way to the owners of shares and on the way back."""
    return math.lcm(codec.block, codec.back.block)


def _cut(numel: int, members: int, longest: int, block: int) -> Iterator[tuple[int, int]]:
    start = 0
    while start < numel:
        each = -(-(numel - start) // members)
        row = min(longest, -(-each // block) * block)
        yield start, row
        start += members * row


def longest_message(row_bytes: int, codec: Codec) -> int:
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


def sparse_messages(numel: int, codec: Codec, row_bytes: int) -> list[tuple[int, Codec]]:
    """Cut values that are gathered whole into messages: how many values each has, and the codec that writes it."""
    if codec.shaped:
        return list(cast(ShapedCodec, codec).split(row_bytes))
    longest = longest_message(row_bytes, codec)
    return [(min(longest, numel - start), codec) for start in range(0, numel, longest)]


def padded(values: torch.Tensor, start: int, size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return `size` values in fp32 (or another dtype) from `start` on, zeros where there are none."""
    part = values[start : start + size].to(dtype)
    return part if part.numel() == size else torch.nn.functional.pad(part, (0, size - part.numel()))


def put(values: torch.Tensor, start: int, part: torch.Tensor) -> None:
    """Write a padded part back."""
    room = max(0, min(part.numel(), values.numel() - start))
    values[start : start + room].copy_(part[:room])

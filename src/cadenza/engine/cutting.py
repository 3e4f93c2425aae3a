"""How flat values are cut into messages, and how messages take turns on a transport's lanes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import cast

import torch

from cadenza.codecs import Codec, ShapedCodec
from cadenza.transports import Lane, Transport

__all__ = ["in_turn", "longest_message", "padded", "pipeline", "plain_rows", "put", "rows_of", "sparse_messages"]

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


def plain_rows(values: torch.Tensor, transport: Transport) -> Iterator[tuple[int, int]]:
    """Cut values that travel as they are into rounds of one row for each member."""
    longest = transport.row_bytes(values.device) // values.element_size()
    return _cut(values.numel(), len(transport.members), longest, 16)


def rows_of(values: torch.Tensor, transport: Transport, codec: Codec) -> Iterator[tuple[int, int]]:
    """Cut the values into rounds of one row for each member: yield where each starts, and how long its rows are."""
    members = len(transport.members)
    longest = longest_message(transport.row_bytes(values.device), codec)
    even = -(-max(_LEAST, values.numel() // (members * _MESSAGES)) // codec.block) * codec.block
    return _cut(values.numel(), members, min(longest, even), codec.block)


def _cut(numel: int, members: int, longest: int, block: int) -> Iterator[tuple[int, int]]:
    start = 0
    while start < numel:
        each = -(-(numel - start) // members)
        row = min(longest, -(-each // block) * block)
        yield start, row
        start += members * row


def longest_message(row_bytes: int, codec: Codec) -> int:
    """Return the most values, a multiple of the codec's block, whose encoding fits a row and the scratch for it."""
    blocks = max(1, min(_MOST // codec.block, row_bytes // codec.encoded_bytes(codec.block)))
    while codec.encoded_bytes(blocks * codec.block) > row_bytes:
        blocks -= 1
        if not blocks:
            raise ValueError(
                f"One block of {codec.name} takes {codec.encoded_bytes(codec.block)} bytes, more than the {row_bytes} "
                "that a message between so many members holds; choose a smaller block."
            )
    return blocks * codec.block


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

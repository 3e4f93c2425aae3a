"""How flat values are cut into messages, and how messages take turns on a transport's lanes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import cast

import torch

from cadenza.codecs import Codec, ShapedCodec
from cadenza.common.messages import cut_plain_rows, cut_rows, cut_sparse
from cadenza.transports import Lane, Transport

__all__ = ["in_turn", "padded", "pipeline", "plain_rows", "put", "rows_of", "sparse_messages"]


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
    row_bytes = transport.row_bytes(values.device)
    return cut_plain_rows(values.numel(), len(transport.members), row_bytes, values.element_size(), codec)


def rows_of(values: torch.Tensor, transport: Transport, codec: Codec) -> Iterator[tuple[int, int]]:
    """Cut the values into rounds of one row for each member: yield where each starts, and how long its rows are."""
    return cut_rows(values.numel(), len(transport.members), transport.row_bytes(values.device), codec)


def sparse_messages(numel: int, codec: Codec, row_bytes: int) -> list[tuple[int, Codec]]:
    """Cut values that are gathered whole into messages: how many values each has, and the codec that writes it."""
    if codec.shaped:
        return list(cast(ShapedCodec, codec).split(row_bytes))
    return [(size, codec) for size in cut_sparse(numel, row_bytes, codec)]


def padded(values: torch.Tensor, start: int, size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return `size` values in fp32 (or another dtype) from `start` on, zeros where there are none."""
    part = values[start : start + size].to(dtype)
    return part if part.numel() == size else torch.nn.functional.pad(part, (0, size - part.numel()))


def put(values: torch.Tensor, start: int, part: torch.Tensor) -> None:
    """Write a padded part back."""
    room = max(0, min(part.numel(), values.numel() - start))
    values[start : start + room].copy_(part[:room])

"""Cutting the work into pieces that stay in the cache, and bytes that may lie at any address."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from cadenza.codecs.base import Codec

__all__ = ["Piece", "check_decode", "check_encode", "is_whole_piece", "pieces", "read", "write"]

# Values. On a CPU the piece and its scratch fit the second-level cache; on a GPU every kernel has enough to do.
_CPU_PIECE = 1 << 17
_GPU_PIECE = 1 << 22


class Piece(NamedTuple):
    """A run of whole blocks, to be seen as a matrix with one block a row; the last block may be shorter, and is alone.

    >>> list(pieces(10, 4, torch.device("cpu")))
    [Piece(start=0, stop=8, width=4, row=0), Piece(start=8, stop=10, width=2, row=2)]
    """

    start: int
    stop: int
    width: int
    row: int

    def rows_of(self, values: torch.Tensor) -> torch.Tensor:
        """Return this piece of the values (or of codes, one byte a value) as a matrix that shares their memory."""
        return values[self.start : self.stop].view(-1, self.width)

    def scales_in(self, data: torch.Tensor) -> torch.Tensor:
        """Return the bytes of this piece's scales in a run of fp32 scales, one a block."""
        rows = (self.stop - self.start) // self.width
        return data[4 * self.row : 4 * (self.row + rows)]


def pieces(numel: int, block: int, device: torch.device) -> Iterator[Piece]:
    """Cut `numel` values into pieces of whole blocks, and the shorter last block if there is one."""
    whole = numel - numel % block
    step = max(1, _size(device) // block) * block
    for start in range(0, whole, step):
        yield Piece(start, min(start + step, whole), block, start // block)
    if whole < numel:
        yield Piece(whole, numel, numel - whole, whole // block)


def is_whole_piece(rows: torch.Tensor) -> bool:
    """Tell whether these rows are as many as one piece holds, so that many more of the same shape will come."""
    return rows.numel() + rows.shape[-1] > _size(rows.device)


def read(data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the values of `dtype` whose bytes these are, copied only if they lie where such values cannot.

    >>> data = torch.arange(1.0, 3.0).view(torch.uint8)
    >>> read(torch.cat([data[:1], data])[1:], torch.float32)
    tensor([1., 2.])
    """
    return (data if _can_hold(data, dtype) else data.clone()).view(dtype)


def write(values: torch.Tensor, dtype: torch.dtype, out: torch.Tensor) -> None:
    """Write the values' bytes, as `dtype`, to `out`, wherever that lies.

    >>> out = torch.zeros(9, dtype=torch.uint8)
    >>> write(torch.arange(1.0, 3.0), torch.float32, out[1:]); read(out[1:], torch.float32)
    tensor([1., 2.])
    """
    if _can_hold(out, dtype):
        out.view(dtype).copy_(values)
    else:
        out.copy_(values.to(dtype).view(torch.uint8))


def check_encode(codec: Codec, values: torch.Tensor, out: torch.Tensor) -> None:
    """Refuse to encode what does not fit."""
    _check(codec, values, "values", out, "out")


def check_decode(codec: Codec, data: torch.Tensor, out: torch.Tensor) -> None:
    """Refuse to decode what does not fit."""
    _check(codec, out, "out", data, "data")


def _size(device: torch.device) -> int:
    return _CPU_PIECE if device.type == "cpu" else _GPU_PIECE


def _can_hold(data: torch.Tensor, dtype: torch.dtype) -> bool:
    return data.is_contiguous() and data.storage_offset() % dtype.itemsize == 0


def _check(codec: Codec, values: torch.Tensor, values_name: str, data: torch.Tensor, data_name: str) -> None:
    if values.dtype != torch.float32 or values.ndim != 1 or not values.is_contiguous():
        raise TypeError(
            f"{codec.name}: `{values_name}` is {_facts(values)}; give a contiguous 1-D float32 tensor "
            "(.float().contiguous().view(-1))."
        )
    if data.dtype != torch.uint8 or data.ndim != 1:
        raise TypeError(f"{codec.name}: `{data_name}` is {_facts(data)}; give a 1-D uint8 tensor.")
    needed = codec.encoded_bytes(values.numel())
    if data.numel() != needed:
        raise ValueError(
            f"{codec.name}: `{data_name}` has {data.numel()} bytes, but {values.numel()} values take exactly {needed}; "
            f"cut it to encoded_bytes({values.numel()})."
        )


def _facts(tensor: torch.Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype} of shape {tuple(tensor.shape)} and strides {tuple(tensor.stride())}"

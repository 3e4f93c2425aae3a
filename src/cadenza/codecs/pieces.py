"""Cutting the work into pieces that stay in the cache, and numbers whose bytes may lie at any address."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from cadenza.common.later import torch

__all__ = ["in_pieces", "like", "piece_values", "read", "writing"]

# Values. On a CPU the piece and its scratch fit the second-level cache; on a GPU every kernel has enough to do.
_CPU_PIECE = 1 << 17
_GPU_PIECE = 1 << 22


def in_pieces(
    numel: int, block: int, *parts: tuple[torch.Tensor, int], times: int = 1
) -> Iterator[tuple[torch.Tensor, ...]]:
    """Cut tensors that belong together into matrices with one block a row, as many rows as stay in the cache.

    The last block may be shorter than the others; it comes by itself, as a matrix of one row.

    Args:
        numel: How many values there are in all.
        block: How many of them make a block.
        parts: 1-D tensors, each with the number of its elements that belong to one block.
        times: How much larger than usual the pieces may be, where little scratch is needed for a value.

    >>> values, codes = torch.arange(5.0), torch.tensor([10, 11, 12])
    >>> for rows, row_codes in in_pieces(5, 2, (values, 2), (codes, 1)):
    ...     print(rows.tolist(), row_codes.tolist())
    [[0.0, 1.0], [2.0, 3.0]] [[10], [11]]
    [[4.0]] [[12]]
    """
    blocks = numel // block
    if blocks:
        rows = max(1, times * piece_values(parts[0][0].device) // block)
        heads = [part[: blocks * size].view(blocks, size).split(rows) for part, size in parts]
        yield from zip(*heads, strict=True)
    if numel % block:
        yield tuple(part[blocks * size :].view(1, -1) for part, size in parts)


def piece_values(device: torch.device) -> int:
    """Return how many values make a piece."""
    return _CPU_PIECE if device.type == "cpu" else _GPU_PIECE


def like(scratch: torch.Tensor | None, rows: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return scratch of the rows' shape (float32), out of what served the rows before, which were at least as many.

    >>> scratch = like(None, torch.empty(4, 2))
    >>> like(scratch, torch.empty(1, 3)).data_ptr() == scratch.data_ptr()
    True
    """
    if scratch is None:
        return torch.empty_like(rows, dtype=dtype or torch.float32)
    return scratch if scratch.shape == rows.shape else scratch.view(-1)[: rows.numel()].view(rows.shape)


def read(data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the numbers whose bytes these are, copied only if they lie where such numbers cannot.

    >>> data = torch.arange(1.0, 3.0).view(torch.uint8)
    >>> read(torch.cat([data[:1], data])[1:], torch.float32)
    tensor([1., 2.])
    """
    return (data if _can_hold(data, dtype) else data.clone(memory_format=torch.contiguous_format)).view(dtype)


@contextmanager
def writing(data: torch.Tensor, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Lend memory for numbers whose bytes belong into `data`, and put them there if they could not be lent in place.

    >>> data = torch.zeros(9, dtype=torch.uint8)
    >>> with writing(data[1:], torch.float32) as numbers:
    ...     _ = numbers.copy_(torch.arange(1.0, 3.0))
    >>> read(data[1:], torch.float32)
    tensor([1., 2.])
    """
    if _can_hold(data, dtype):
        yield data.view(dtype)
    else:
        numbers = torch.empty_like(data, memory_format=torch.contiguous_format).view(dtype)
        yield numbers
        data.copy_(numbers.view(torch.uint8))


def _can_hold(data: torch.Tensor, dtype: torch.dtype) -> bool:
    size = dtype.itemsize
    return data.is_contiguous() and not any(start % size for start in (data.storage_offset(), *data.stride()[:-1]))

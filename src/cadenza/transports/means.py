"""The mean of one share of the values, the same bits whoever computes it: summed in rank order, in fp32 or better."""

from __future__ import annotations

import torch

__all__ = ["mean_into", "share"]

_BLOCK = 1 << 16  # values; the fp32 scratch of a 16-bit sum stays in the cache


def share(numel: int, position: int, members: int) -> slice:
    """Return the run of values that one of the members is responsible for.

    >>> [share(10, i, 3) for i in range(3)]
    [slice(0, 3, None), slice(3, 6, None), slice(6, 10, None)]
    """
    return slice(position * numel // members, (position + 1) * numel // members)


def mean_into(out: torch.Tensor, rows: torch.Tensor) -> None:
    """Write the mean of the rows (one a member) into `out`, which shares no memory with them.

    >>> out = torch.empty(2)
    >>> mean_into(out, torch.tensor([[1.0, 2.0], [3.0, 6.0]])); out
    tensor([2., 4.])
    """
    if out.dtype not in (torch.bfloat16, torch.float16):
        _sum_into(out, rows)
        out.div_(len(rows))
        return
    for start in range(0, out.numel(), _BLOCK):
        block = rows[:, start : start + _BLOCK].to(torch.float32)
        total = torch.empty_like(block[0])
        _sum_into(total, block)
        out[start : start + _BLOCK].copy_(total.div_(len(rows)))


def _sum_into(out: torch.Tensor, rows: torch.Tensor) -> None:
    torch.add(rows[0], rows[1], out=out)
    for row in rows[2:]:
        out.add_(row)

"""The mean of one share of the values, the same bits whoever computes it: summed in rank order, in fp32 or better."""

from __future__ import annotations

import torch

__all__ = ["mean_into", "scales_first", "share"]

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
    if out.dtype.itemsize > 2:
        _mean(out, rows)
        return
    scratch = torch.empty(min(_BLOCK, out.numel()), dtype=torch.float32, device=out.device)
    for start in range(0, out.numel(), _BLOCK):
        block = rows[:, start : start + _BLOCK]
        mean = scratch[: block.shape[1]]
        _mean(mean, block)
        out[start : start + _BLOCK].copy_(mean)


def scales_first(members: int) -> bool:
    """Tell whether values are divided before they are summed.

    A power of two divides without rounding, so that large values cannot overflow in the sum. Any other number divides
    the sum, so that the mean of equal values is that value.
    """
    return members & (members - 1) == 0


def _mean(out: torch.Tensor, rows: torch.Tensor) -> None:
    members = len(rows)
    factor = 1 / members if scales_first(members) else 1
    out.copy_(rows[0])
    if factor != 1:
        out.mul_(factor)
    for row in rows[1:]:
        out.add_(row, alpha=factor)
    if factor == 1:
        out.div_(members)

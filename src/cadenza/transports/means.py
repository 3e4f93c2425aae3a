"""The mean of one share of the values, the same bits whoever computes it: summed in rank order, in fp32 or better."""

from __future__ import annotations

import torch

__all__ = ["divide", "mean_into", "share"]

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


def divide(values: torch.Tensor, members: int) -> None:
    """Divide in place by the number of members; done before the sum, so that large values do not overflow in it."""
    if _is_power_of_two(members):
        values.mul_(1 / members)  # the same bits, and quicker
    else:
        values.div_(members)


def _mean(out: torch.Tensor, rows: torch.Tensor) -> None:
    members = len(rows)
    out.copy_(rows[0])
    divide(out, members)
    for row in rows[1:]:
        if _is_power_of_two(members):
            out.add_(row, alpha=1 / members)
        else:
            out.add_(row.to(out.dtype) / members)


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0

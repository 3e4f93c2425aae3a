"""The mean of one share of the values, the same bits whoever computes it: summed in rank order, in fp32 or better."""

from __future__ import annotations

import torch

__all__ = ["finish_mean", "mean_into", "scale_down", "share"]

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
    size = min(_BLOCK, out.numel()) if out.device.type == "cpu" else out.numel()  # a device wants much to do at once
    scratch = torch.empty(size, dtype=torch.float32, device=out.device)
    for start in range(0, out.numel(), max(1, size)):
        block = rows[:, start : start + size]
        mean = scratch[: block.shape[1]]
        _mean(mean, block)
        out[start : start + size].copy_(mean)


def scale_down(values: torch.Tensor, members: int) -> None:
    """Shrink values, in place and without rounding, so far that the sum over the members cannot overflow."""
    values.mul_(_factor(members))


def finish_mean(total: torch.Tensor, members: int) -> None:
    """Turn the sum of values that were scaled down into their mean, in place."""
    if (rest := members * _factor(members)) != 1:
        total.div_(rest)


def _mean(out: torch.Tensor, rows: torch.Tensor) -> None:
    members = len(rows)
    out.copy_(rows[0])
    scale_down(out, members)
    for row in rows[1:]:
        out.add_(row, alpha=_factor(members))
    finish_mean(out, members)


def _factor(members: int) -> float:
    """Return the largest power of two that is at most 1 / members."""
    return 0.5 ** (members - 1).bit_length()

"""Differences from the anchor, and what a round must know of them and of it, in one pass over memory.

On a CPU the kernel in codecs/native.c does it; torch's operations do the same, part by part, where there is no kernel
or the values are not fp32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from cadenza.codecs.native import kernels_for
from cadenza.common.checksums import ROWS, checksum, checksum_of_rows
from cadenza.common.norms import in_cache, norm_squared
from cadenza.common.sketches import Sketch

__all__ = ["take_differences"]


def take_differences(
    minuends: Sequence[torch.Tensor],
    flats: Sequence[torch.Tensor],
    outs: Sequence[torch.Tensor],
    *,
    sketch: Sketch | None = None,
    marked: bool = True,
) -> tuple[float, int]:
    """Write differences of flat tensors to `outs`, which may be one side of them, and into a sketch if there is one.

    Returns:
        The squared norm of all differences, and the checksum of the minuends, if they are to be `marked` by it, or 0.

    >>> values = [torch.tensor([1.0, 1.0])]
    >>> take_differences([torch.tensor([4.0, 5.0])], values, values)[0], values
    (25.0, [tensor([3., 4.])])
    """
    norm2, mark = 0.0, 0
    for minuend, flat, out in zip(minuends, flats, outs, strict=True):
        rows, square = torch.zeros(ROWS, dtype=torch.int64), torch.zeros(1, dtype=torch.float64)
        if _in_one_pass(minuend, flat, out, sketch, rows if marked else None, square):
            mark = checksum_of_rows(rows, minuend, after=mark) if marked else 0
            norm2 += float(square)
            continue
        mark = checksum(minuend, after=mark) if marked else 0
        for one, other, place in zip(in_cache(minuend), in_cache(flat), in_cache(out), strict=True):
            torch.sub(one, other, out=place)
        norm2 += norm_squared(out)
        if sketch is not None:
            sketch.add(out)
    if not math.isfinite(norm2):  # a square may overflow fp32 where the norm does not
        norm2 = norm_squared(*outs)
    return norm2, mark


def _in_one_pass(
    minuend: torch.Tensor,
    flat: torch.Tensor,
    out: torch.Tensor,
    sketch: Sketch | None,
    rows: torch.Tensor | None,
    square: torch.Tensor,
) -> bool:
    """Do it in the kernel, if there is one for these tensors."""
    given = (minuend, flat, out)
    kernels = kernels_for(*given)
    if kernels is None or any(tensor.dtype != torch.float32 or not tensor.is_contiguous() for tensor in given):
        return False
    of_sketch = sketch.begin_part(out) if sketch is not None else (None, None, None)
    signs, starts, sums, row_sums = (None if tensor is None else tensor.data_ptr() for tensor in (*of_sketch, rows))
    places = [tensor.data_ptr() for tensor in given]
    kernels.difference(*places, out.numel(), signs, starts, sums, row_sums, square.data_ptr())
    return True

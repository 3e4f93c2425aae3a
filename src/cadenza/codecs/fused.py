"""Kernels that `torch.compile` may fuse: only if asked to, only for large inputs, never at import.

``CADENZA_COMPILE=1`` asks for it. It is off by default because the eager kernels, worked in pieces that stay in the
cache, are about as fast on a CPU, and starting the compiler takes seconds on every rank
(docs/decisions/0004-codecs.md). Both ways give the same bytes.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable
from typing import cast

import torch

from cadenza.codecs.pieces import is_whole_piece

__all__ = ["fused"]

Kernel = Callable[..., None]


def fused(kernel: Kernel) -> Kernel:
    """Let a kernel that writes into its arguments run compiled where that is wanted and works.

    The first argument is a matrix of fp32, and the keyword arguments are scratch, which compiled code does without: it
    is called as if they were not given. Only whole pieces are compiled for: their shape is always the same, so that a
    kernel is compiled once. If that fails, a warning says why, and the kernel runs eagerly from then on.

    >>> @fused
    ... def double(rows, out):
    ...     torch.mul(rows, 2, out=out)
    >>> out = torch.empty(1, 2)
    >>> double(torch.ones(1, 2), out); out
    tensor([[2., 2.]])
    """
    compiled: Kernel | None = None
    failed = False

    @functools.wraps(kernel)
    def run(rows: torch.Tensor, *rest: object, **scratch: torch.Tensor) -> None:
        nonlocal compiled, failed
        if failed or os.environ.get("CADENZA_COMPILE") != "1" or not is_whole_piece(rows):
            kernel(rows, *rest, **scratch)
            return
        if compiled is None:
            compiled = cast(Kernel, torch.compile(kernel, dynamic=False))
        try:
            compiled(rows, *rest)
        except Exception as error:  # a missing compiler shows in many ways; a fault of ours shows again below
            failed = True
            warnings.warn(
                f"torch.compile failed on a codec, which goes on eagerly: {error}. Unset CADENZA_COMPILE to not try.",
                RuntimeWarning,
                stacklevel=2,
            )
            kernel(rows, *rest, **scratch)

    return run

"""The codecs' kernels on GPUs, by Triton, which torch's builds for CUDA, ROCm and XPU bring along.

Without Triton, or with ``CADENZA_TRITON=0``, or if the first kernel cannot be compiled, the codecs work in torch's
operations there: the same bytes, several times the traffic to memory. Nothing here waits for the device.
"""

from __future__ import annotations

import logging
import os
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from cadenza.common.later import torch

__all__ = ["EXACT", "TritonKernels", "kernels", "triton_version"]

_GROUP = 16  # values of E3M0 that share a fine scale
_TILE = 2048  # values that a program of int8 works on
_GROUPS_TILE = 256  # groups that a program of E3M0 works on
# Rounding must be the same on every machine: no multiply-add, where torch's operations have none.
EXACT = {"enable_fp_fusion": False}
_logger = logging.getLogger("cadenza")


def triton_version() -> str | None:
    """Return which Triton there is, if the codecs may use it."""
    if os.environ.get("CADENZA_TRITON") == "0" or find_spec("triton") is None:
        return None
    import triton

    return str(triton.__version__)


@cache
def kernels(device: torch.device) -> TritonKernels | None:
    """Return the kernels if a device can run them.

    >>> kernels(torch.device("cpu")) is None or os.environ["TRITON_INTERPRET"] == "1"
    True
    """
    if triton_version() is None or (device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1"):
        return None
    try:
        from cadenza.codecs import triton_kernels

        found = TritonKernels(triton_kernels)
        probe = torch.zeros(21, device=device)
        found.int8_encode(probe[:16], 16, probe[16:].view(torch.uint8))  # compiles, or tells why it cannot
    except Exception as error:
        _logger.info("The codecs run without Triton on %s: %s", device, error)
        return None
    return found


class TritonKernels:
    """Launches Triton's kernels on the current stream: see `cadenza.codecs.kernels.Kernels`."""

    def __init__(self, module: ModuleType) -> None:
        self._kernels = module

    def int8_encode(self, values: torch.Tensor, block: int, out: torch.Tensor) -> None:
        self._int8(self._kernels.int8_encode, values, block, out)

    def int8_decode(self, data: torch.Tensor, block: int, out: torch.Tensor, weight: float | None) -> None:
        self._int8(self._kernels.int8_decode, out, block, data, weight or 0.0, ADD=weight is not None)

    def e3m0_encode(self, values: torch.Tensor, block: int, out: torch.Tensor) -> int:
        return self._e3m0(self._kernels.e3m0_encode, values, block, out)

    def e3m0_decode(self, data: torch.Tensor, block: int, out: torch.Tensor, weight: float | None) -> int:
        return self._e3m0(self._kernels.e3m0_decode, out, block, data, weight or 0.0, ADD=weight is not None)

    def topk_encode(
        self, values: torch.Tensor, chunk: int, kept: tuple[int, int], bits: int, out: torch.Tensor
    ) -> None:
        for part, data, width, count in _chunks(values, out, chunk, kept, bits):
            chunks = part.numel() // width
            chosen = torch.empty(chunks * count, dtype=torch.float32, device=values.device)
            places = torch.empty(chunks * count, dtype=torch.int16, device=values.device)
            with _on(values):
                self._kernels.topk_choose[(chunks,)](part, chosen, places, width, count, WIDTH=_power(width))
                self._kernels.topk_write[(chunks,)](
                    chosen, places, data, count, BITS=bits, KEPT=max(_power(count), 8), **EXACT
                )

    def topk_decode(
        self,
        data: torch.Tensor,
        chunk: int,
        kept: tuple[int, int],
        bits: int,
        out: torch.Tensor,
        weight: float | None,
    ) -> None:
        add = weight is not None
        if not add:
            out.zero_()
        for part, row_data, width, count in _chunks(out, data, chunk, kept, bits):
            with _on(out):
                self._kernels.topk_decode[(part.numel() // width,)](
                    row_data, part, weight or 0.0, width, count, BITS=bits, KEPT=_power(count), ADD=add, **EXACT
                )

    def _int8(
        self, kernel: Any, values: torch.Tensor, block: int, data: torch.Tensor, *weight: float, **options: bool
    ) -> None:
        count = values.numel()
        blocks = -(-count // block)
        width = _power(block)
        rows = max(1, _TILE // width)
        if blocks:
            with _on(values):
                kernel[(-(-blocks // rows),)](
                    values, data, *weight, count, block, blocks, ROWS=rows, WIDTH=width, **options, **EXACT
                )

    def _e3m0(
        self, kernel: Any, values: torch.Tensor, block: int, data: torch.Tensor, *weight: float, **options: bool
    ) -> int:
        """Do all whole blocks, and return how many values those are."""
        from cadenza.codecs.exponents import inverses, powers

        blocks, rest = divmod(values.numel(), block)
        if blocks:
            groups = block // _GROUP
            last = min(groups, rest + rest % 2)  # groups of the last, shorter block, which is left to torch
            fine = data[4 * (blocks + (rest > 0)) :]
            codes = fine[groups * blocks + last :]
            table = inverses(values.device) if weight else powers(values.device)
            width = _power(groups)
            rows = max(1, _GROUPS_TILE // width)
            sizes = {"ROWS": rows, "WIDTH": width}
            with _on(values):
                kernel[(-(-blocks // rows),)](
                    values, data, fine, codes, table, *weight, groups, blocks, **sizes, **options, **EXACT
                )
        return blocks * block


def _chunks(
    values: torch.Tensor, data: torch.Tensor, chunk: int, kept: tuple[int, int], bits: int
) -> list[tuple[torch.Tensor, torch.Tensor, int, int]]:
    """Cut values and their bytes into the whole chunks and the last; with each one's width and what is kept of it."""
    chunks, rest = divmod(values.numel(), chunk)
    size = 3 * ((kept[0] + 1) // 2) + -(-kept[0] * bits // 8) + 4
    whole = (values[: chunks * chunk], data[: chunks * size], chunk, kept[0])
    last = (values[chunks * chunk :], data[chunks * size :], rest, kept[1])
    return [part for part in (whole, last) if part[0].numel()]


def _power(number: int) -> int:
    """Return the power of two that is next: Triton's tensors have such sizes."""
    return 1 << (number - 1).bit_length()


def _on(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Make the tensor's device the current one: Triton launches on that."""
    device = tensor.device
    if device.type == "cpu":
        return nullcontext()
    current: AbstractContextManager[object] = torch.get_device_module(device).device(device)
    return current

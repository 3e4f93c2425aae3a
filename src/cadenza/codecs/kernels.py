"""Which implementation a codec works with: machine code on CPUs, Triton on GPUs, torch's operations everywhere else.

All three give the same bytes for the same values, and the same values for the same bytes, bit for bit, so that workers
on unlike machines can train together.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, Protocol

from cadenza.codecs import native
from cadenza.common.later import torch

__all__ = ["Implementation", "Kernels", "implementations", "kernels_for", "using"]

Implementation = Literal["native", "triton", "torch"]
_USUAL: dict[str, Implementation] = {"cpu": "native", "cuda": "triton", "xpu": "triton"}  # ROCm calls itself cuda
_wanted: Implementation | None = None


class Kernels(Protocol):
    """What an implementation besides torch's operations has; sizes and dtypes have been checked.

    Weights are added by `…_decode` where one is given; without one, `out` is overwritten.
    """

    def int8_encode(self, values: torch.Tensor, block: int, out: torch.Tensor) -> None: ...

    def int8_decode(self, data: torch.Tensor, block: int, out: torch.Tensor, weight: float | None) -> None: ...

    def e3m0_encode(self, values: torch.Tensor, block: int, out: torch.Tensor) -> int:
        """Encode, and return how many values are done: the last block, if it is shorter, may be left to torch."""
        ...

    def e3m0_decode(self, data: torch.Tensor, block: int, out: torch.Tensor, weight: float | None) -> int: ...

    def topk_encode(
        self, values: torch.Tensor, chunk: int, kept: tuple[int, int], bits: int, out: torch.Tensor
    ) -> None:
        """Encode; `kept` values of each whole chunk, and of the last one."""
        ...

    def topk_decode(
        self,
        data: torch.Tensor,
        chunk: int,
        kept: tuple[int, int],
        bits: int,
        out: torch.Tensor,
        weight: float | None,
    ) -> None: ...


def kernels_for(*tensors: torch.Tensor) -> Kernels | None:
    """Return the kernels that can work where these tensors are; None means torch's operations.

    >>> with using("torch"):
    ...     kernels_for(torch.ones(1))
    """
    device = tensors[0].device
    if any(tensor.device != device for tensor in tensors):
        return None
    return _load(_wanted or _USUAL.get(device.type, "torch"), device)


def implementations(device: torch.device) -> list[Implementation]:
    """Return the implementations that there are for tensors of a device, the one that is used first.

    >>> implementations(torch.device("meta"))
    ['torch']
    """
    usual = _USUAL.get(device.type, "torch")
    there = usual != "torch" and _load(usual, device) is not None
    return [usual, "torch"] if there else ["torch"]


@contextmanager
def using(implementation: Implementation) -> Iterator[None]:
    """Let all codecs of this process work with one implementation meanwhile: to compare them, not to train.

    Triton's kernels run on CPU tensors only in its interpreter, if ``TRITON_INTERPRET=1`` was set at the start.

    >>> with using("torch"):
    ...     kernels_for(torch.ones(1)) is None
    True
    """
    global _wanted
    before, _wanted = _wanted, implementation
    try:
        yield
    finally:
        _wanted = before


def _load(name: Implementation, device: torch.device) -> Kernels | None:
    if name == "native":
        return native.kernels() if device.type == "cpu" else None
    if name == "triton":
        from cadenza.codecs import triton_launch

        return triton_launch.kernels(device)
    return None

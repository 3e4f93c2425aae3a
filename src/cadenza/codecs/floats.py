"""Values as floating-point numbers: as they are, or rounded to 16 bits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from cadenza.codecs.base import Codec
from cadenza.codecs.checks import check_decode, check_encode
from cadenza.codecs.pieces import piece_values, read, writing
from cadenza.common.later import torch

__all__ = ["bf16", "fp16", "fp32"]


def fp32() -> Codec:
    """Send values as they are.

    >>> fp32().encoded_bytes(10), fp32().exact
    (40, True)
    """
    return Floats("fp32")


def bf16() -> Codec:
    """Send values rounded to bfloat16: the range of fp32, and 8 significant bits.

    >>> bf16().encoded_bytes(10), bf16().exact
    (20, False)
    """
    return Floats("bf16")


def fp16() -> Codec:
    """Send values rounded to half precision: 11 significant bits from 6e-5 to 65504, where larger ones end.

    >>> codec, out = fp16(), torch.empty(2)
    >>> data = torch.empty(codec.encoded_bytes(2), dtype=torch.uint8)
    >>> codec.encode(torch.tensor([8192.3, -1e6]), data); codec.decode(data, out); out
    tensor([  8192., -65504.])
    """
    return Floats("fp16")


@dataclass(frozen=True)
class Floats:
    """Every value as a number of one dtype, side by side; finite values stay finite."""

    name: str
    sparse: ClassVar[bool] = False
    block: ClassVar[int] = 1
    feedback: ClassVar[float | None] = None
    aligned: ClassVar[bool] = False
    shaped: ClassVar[bool] = False

    @property
    def exact(self) -> bool:
        return self.name == "fp32"

    @property
    def dtype(self) -> torch.dtype:
        return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[self.name]

    @property
    def back(self) -> Codec:
        return self

    def encoded_bytes(self, numel: int) -> int:
        return numel * self.dtype.itemsize

    def encode(self, values: torch.Tensor, out: torch.Tensor) -> None:
        check_encode(self, values, out)
        largest = torch.finfo(self.dtype).max
        for part, data in self._pieces(values, out):
            with writing(data, self.dtype) as numbers:
                numbers.copy_(part if self.exact else part.clamp(-largest, largest))

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        check_decode(self, data, out)
        for part, part_data in self._pieces(out, data):
            part.copy_(read(part_data, self.dtype))

    def decode_add(self, data: torch.Tensor, out: torch.Tensor, weight: float) -> None:
        check_decode(self, data, out)
        for part, part_data in self._pieces(out, data):
            part.add_(read(part_data, self.dtype).to(torch.float32) * weight)

    def _pieces(self, values: torch.Tensor, data: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        size = piece_values(values.device)
        return zip(values.split(size), data.split(size * self.dtype.itemsize), strict=True)

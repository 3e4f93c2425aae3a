"""Values as 4-bit powers of two, with one scale a block: the E3M0 of Streaming DiLoCo."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.nn.functional import pad

from cadenza.codecs.base import Codec
from cadenza.codecs.checks import check_decode, check_encode, check_whole_number
from cadenza.codecs.pieces import in_pieces, like, read, writing

__all__ = ["e3m0"]

_NOTHING = 2.0**-100  # blocks whose largest magnitude is below this lose their values: 1 / it must stay finite
_SHIFT = 2.0**-8  # brings the largest level to exponent 7 of half precision, and what is below the smallest to 0


def e3m0(*, block: int = 256) -> Codec:
    """Send values as a sign and three exponent bits, as in Streaming DiLoCo (arXiv 2501.18512), two to a byte.

    The paper leaves the details open; here they are.

    - *Scale*: one fp32 a block of 256 values: the block's largest magnitude. The last block may be shorter.
    - *Levels*: exponent e from 1 to 7 means scale · 2^(e − 7), so the largest magnitude is exact and the smallest level
      is 1/64 of it. *Zero* is exponent 0 with either sign, as in an IEEE number without a mantissa.
    - *Rounding*: to the nearest level, halves away from zero; decided on value / scale as a half-precision number, so
      that within 2^-10 of a half either neighbour may be taken. Below 1/128 of the scale: zero.
    - *Bytes*: a value is the four bits `s e e e`. In a block of n values (a zero is added if n is odd), byte j holds
      value j in its low half and value j + n/2 in its high half. First come all scales, then all values. 0.129 of
      fp32's bytes.

    >>> codec, out = e3m0(), torch.empty(4)
    >>> data = torch.empty(codec.encoded_bytes(4), dtype=torch.uint8)
    >>> codec.encode(torch.tensor([4.0, -1.4, 0.1, 0.0]), data); codec.decode(data, out); out
    tensor([ 4.0000, -1.0000,  0.1250,  0.0000])
    """
    check_whole_number("block", block, least=16, most=65536, multiple=2)
    return Exponents(block)


@dataclass(frozen=True)
class Exponents:
    """Block quantisation to powers of two: all the scales, then all the values."""

    block: int
    name: ClassVar[str] = "e3m0"
    exact: ClassVar[bool] = False
    sparse: ClassVar[bool] = False
    feedback: ClassVar[float | None] = None

    def encoded_bytes(self, numel: int) -> int:
        return 4 * -(-numel // self.block) + (numel + 1) // 2

    def encode(self, values: torch.Tensor, out: torch.Tensor) -> None:
        check_encode(self, values, out)
        floats = halves = signs = None
        for rows, codes, scale_bytes in self._pieces(values, out):
            even = pad(rows, (0, 1)) if rows.shape[1] % 2 else rows
            floats = like(floats, even)
            halves = like(halves, even, torch.float16)
            signs = like(signs, even, torch.int16)
            with writing(scale_bytes, torch.float32) as scales:
                _encode(even, codes, scales, floats, halves, signs)

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        check_decode(self, data, out)
        for rows, codes, scale_bytes in self._pieces(out, data):
            _decode(rows, codes, read(scale_bytes, torch.float32) / _SHIFT)

    def decode_add(self, data: torch.Tensor, out: torch.Tensor, weight: float) -> None:
        check_decode(self, data, out)
        for rows, codes, scale_bytes in self._pieces(out, data):
            _decode_add(rows, codes, read(scale_bytes, torch.float32) * (weight / _SHIFT))

    def _pieces(self, values: torch.Tensor, data: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
        """Cut values, the bytes that they become, and those of their scales."""
        scales = len(data) - (values.numel() + 1) // 2
        parts = (values, self.block), (data[scales:], self.block // 2), (data[:scales], 4)
        return in_pieces(values.numel(), self.block, *parts)


def _encode(
    rows: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    floats: torch.Tensor,
    halves: torch.Tensor,
    signs: torch.Tensor,
) -> None:
    """Write the rows' codes and scales; the last three are scratch of the rows' shape."""
    largest = torch.abs(rows, out=floats).amax(dim=1, keepdim=True)
    scales.copy_(largest)
    torch.mul(rows, largest.clamp_(min=_NOTHING).reciprocal_().mul_(_SHIFT), out=floats)
    # As half-precision numbers the levels have the exponents 1 to 7, and what is smaller is subnormal. So half a unit
    # of the exponent, added to the bits, carries into it just where a value is nearer to the next level.
    bits = halves.copy_(floats).view(torch.int16).add_(1 << 9)
    torch.bitwise_right_shift(bits, 13, out=signs)  # 0, or −4 for a negative value
    bits.bitwise_right_shift_(10).add_(signs, alpha=2)  # e, or e − 32 − 8: the low four bits are `s e e e`
    low, high = bits.chunk(2, dim=1)
    codes.copy_(low.bitwise_and_(15).add_(high, alpha=16))


def _decode(out: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    out.copy_(_levels(codes)[:, : out.shape[1]])
    out.mul_(scales)


def _decode_add(out: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    out.addcmul_(_levels(codes)[:, : out.shape[1]].to(torch.float32), scales)


def _levels(codes: torch.Tensor) -> torch.Tensor:
    """Return the levels, times `_SHIFT`, as half-precision numbers."""
    rows, half = codes.shape
    bits = torch.empty(rows, 2 * half, dtype=torch.int16, device=codes.device)
    low, high = bits.chunk(2, dim=1)
    torch.bitwise_right_shift(low.copy_(codes), 4, out=high)
    low.bitwise_and_(15)
    return bits.add_(bits & 8, alpha=3).bitwise_left_shift_(10).view(torch.float16)  # the sign goes to bit 15

"""Values as 4-bit powers of two, with one scale a block: the E3M0 of Streaming DiLoCo."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.nn.functional import pad

from cadenza.codecs.base import Codec
from cadenza.codecs.fused import fused
from cadenza.codecs.options import check_whole_number
from cadenza.codecs.pieces import Piece, check_decode, check_encode, pieces, read, write

__all__ = ["e3m0"]

_NOTHING = 2.0**-100  # a block whose largest magnitude is below this is written as zeros: 1 / it stays finite
_SHIFT = 2.0**-8  # brings the largest level to exponent 7 of half precision, and what is below the smallest to 0


def e3m0(*, block: int = 256) -> Codec:
    """Send values as a sign and three exponent bits, as in Streaming DiLoCo (arXiv 2501.18512), two to a byte.

    The paper leaves the details open; here they are.

    - *Scale*: one fp32 a block of 256 values: the block's largest magnitude. The last block may be shorter.
    - *Levels*: exponent e from 1 to 7 means scale · 2^(e − 7), so the largest magnitude is exact and the smallest level
      is 1/64 of it. *Zero* is exponent 0 with either sign, as in an IEEE number without a mantissa.
    - *Rounding*: to the nearest level, halves away from zero; decided on value / scale as a half-precision number, so
      that within 2^-11 of a half either neighbour may be taken. Below 1/128 of the scale: zero.
    - *Bytes*: a value is the four bits `s e e e`. In a block of n values (a zero is added if n is odd), byte j holds
      value j in its low half and value j + n/2 in its high half. First all values, then all scales. 0.129 of fp32's
      bytes.

    >>> codec, out = e3m0(), torch.empty(4)
    >>> data = torch.empty(codec.encoded_bytes(4), dtype=torch.uint8)
    >>> codec.encode(torch.tensor([4.0, -1.4, 0.1, 0.0]), data); codec.decode(data, out); out
    tensor([ 4.0000, -1.0000,  0.1250,  0.0000])
    """
    check_whole_number("block", block, least=16, most=65536, multiple=2)
    return Exponents(block)


@dataclass(frozen=True)
class Exponents:
    """Block quantisation to powers of two: all the values, then all the scales."""

    block: int
    name: ClassVar[str] = "e3m0"
    exact: ClassVar[bool] = False
    sparse: ClassVar[bool] = False
    feedback: ClassVar[float | None] = None

    def encoded_bytes(self, numel: int) -> int:
        return (numel + 1) // 2 + 4 * -(-numel // self.block)

    def encode(self, values: torch.Tensor, out: torch.Tensor) -> None:
        check_encode(self, values, out)
        scale_bytes = out[(values.numel() + 1) // 2 :]
        for piece in pieces(values.numel(), self.block, values.device):
            rows = pad(piece.rows_of(values), (0, 1)) if piece.width % 2 else piece.rows_of(values)
            scales = rows.new_empty(len(rows), 1)
            _encode(rows, _codes(piece, out), scales)
            write(scales.view(-1), torch.float32, piece.scales_in(scale_bytes))

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        check_decode(self, data, out)
        scale_bytes = data[(out.numel() + 1) // 2 :]
        for piece in pieces(out.numel(), self.block, out.device):
            scales = read(piece.scales_in(scale_bytes), torch.float32).view(-1, 1)
            _decode(piece.rows_of(out), _codes(piece, data), scales)

    def decode_add(self, data: torch.Tensor, out: torch.Tensor, weight: float) -> None:
        check_decode(self, data, out)
        scale_bytes = data[(out.numel() + 1) // 2 :]
        for piece in pieces(out.numel(), self.block, out.device):
            scales = read(piece.scales_in(scale_bytes), torch.float32).view(-1, 1)
            _decode_add(piece.rows_of(out), _codes(piece, data), scales * weight)


def _codes(piece: Piece, data: torch.Tensor) -> torch.Tensor:
    """Return the bytes of this piece's values, one block a row; only the last block can be odd, so starts are even."""
    return data[piece.start // 2 : (piece.stop + 1) // 2].view(-1, (piece.width + 1) // 2)


@fused
def _encode(rows: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    largest = rows.abs().amax(dim=1, keepdim=True)
    scales.copy_(largest)
    # As half-precision numbers the levels have the exponents 1 to 7, and what is smaller is subnormal. So half a unit
    # of the exponent, added to the bits, carries into it just where a value is nearer to the next level.
    ratios = rows * torch.where(largest > _NOTHING, _SHIFT / largest, 0.0)
    bits = ratios.to(torch.float16).view(torch.int16).add(1 << 9)
    signs = bits >> 13  # 0, or −4 for a negative value
    nibbles = (bits >> 10).add_(signs, alpha=2)  # e, or e − 32 − 8: the low four bits are `s e e e`
    low, high = nibbles.chunk(2, dim=1)
    codes.copy_((low & 15).add_(high, alpha=16))


@fused
def _decode(out: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    out.copy_(_levels(codes)[:, : out.shape[1]])
    out.mul_(scales / _SHIFT)


@fused
def _decode_add(out: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    out.addcmul_(_levels(codes)[:, : out.shape[1]].to(torch.float32), scales / _SHIFT)


def _levels(codes: torch.Tensor) -> torch.Tensor:
    """Return the levels, times `_SHIFT`, as half-precision numbers."""
    pairs = codes.to(torch.int16)
    nibbles = torch.cat([pairs & 15, pairs >> 4], dim=1)
    signs = nibbles & 8
    return nibbles.add_(signs, alpha=3).bitwise_left_shift_(10).view(torch.float16)  # the sign goes to bit 15

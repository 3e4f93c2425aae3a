"""Values as 4-bit powers of two, with a scale for every sixteen of them: the E3M0 of Streaming DiLoCo."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from cadenza.codecs.base import Codec
from cadenza.codecs.checks import check_decode, check_encode
from cadenza.codecs.native import kernels_for
from cadenza.codecs.pieces import in_pieces, like, read, writing
from cadenza.common.checks import check_whole_number
from cadenza.common.later import torch
from cadenza.common.streams import made_once

__all__ = ["e3m0"]

_GROUP = 16  # values that share a fine scale
_FINE = 2.0**0.25  # from one fine scale to the next
_NOTHING = 2.0**-100  # blocks whose largest magnitude is below this lose their values: 1 / it must stay finite
_LEAST = 2.0**-64  # the smallest fine scale; the logarithm of zero would take ten times as long
_MOST = float.fromhex("0x1.fffffep127")  # that float32 has
_AWAY = 2.0**-24  # keeps a number whose inverse is taken from fp32's end, where the inverse would lose its digits
_SHIFT = 2.0**-8  # brings the largest level to exponent 7 of half precision, and what is below the smallest to 0
_POWER = -0x800000  # the bits of an fp32 number that are its sign and its exponent


def e3m0(*, block: int = 512, back: Codec | None = None) -> Codec:
    """Send values as a sign and three exponent bits, as in Streaming DiLoCo (arXiv 2501.18512), two to a byte.

    The paper leaves the details open; here they are.

    - *Levels*: exponent e from 1 to 7 means scale · 2^(e − 7), so the smallest level is 1/64 of the largest. *Zero* is
      exponent 0 with either sign, as in an IEEE number without a mantissa.
    - *Scale*: a block of 512 values has one fp32 number t, 2^¼ times its largest magnitude, and each group of 16 in it
      one byte c: their scale is t · 2^(−c/4). Value i of a block belongs to group i mod 32. The last block may be
      shorter, and has fewer groups if it has fewer than 32 values; zeros fill its groups up to an equal size.
    - *Choice of the scale*: of the two that lie between 2^-¼ and 2^¼ times the group's largest magnitude, the one that
      loses less in the sum of squares.
    - *Rounding*: to the nearest level, halves away from zero; in torch, decided on a half-precision number, so
      that within 2^-10 of a half either neighbour may be taken. Below 1/128 of the scale: zero. So a value loses at
      most a third of itself, or 1/107 of the largest magnitude in its group.
    - *Bytes*: a value is the four bits `s e e e`. In a block of n values, byte j holds value j in its low half and
      value j + n/2 in its high half. First come all t, then all c, then all values. 0.143 of fp32's bytes.

    Args:
        block: How many values share an fp32 scale.
        back: How the mean is written on its way back, such as `int8()`: then what is lost is lost once. Without it the
            mean is written in 4 bits too.

    >>> codec, out = e3m0(), torch.empty(4)
    >>> data = torch.empty(codec.encoded_bytes(4), dtype=torch.uint8)
    >>> codec.encode(torch.tensor([4.0, -1.0, 0.125, 0.0]), data); codec.decode(data, out); out
    tensor([ 4.0000, -1.0000,  0.1250,  0.0000])
    """
    check_whole_number("block", block, least=_GROUP, most=65536, multiple=_GROUP)
    _check_back(back)
    return Exponents(block, back)


@dataclass(frozen=True)
class Exponents:
    """Block quantisation to powers of two: all the scales of blocks, those of groups, then all the values."""

    block: int
    way_back: Codec | None = None
    exact: ClassVar[bool] = False
    sparse: ClassVar[bool] = False
    feedback: ClassVar[float | None] = None
    aligned: ClassVar[bool] = True
    shaped: ClassVar[bool] = False

    @property
    def name(self) -> str:
        return "e3m0" if self.way_back is None else f"e3m0(back={self.way_back.name})"

    @property
    def back(self) -> Codec:
        return self.way_back or self

    def encoded_bytes(self, numel: int) -> int:
        return sum(sum(sizes) for sizes in self._sizes(numel))

    def encode(self, values: torch.Tensor, out: torch.Tensor) -> None:
        check_encode(self, values, out)
        if kernels := kernels_for(values, out):
            scratch = torch.empty(3 * self.block)
            kernels.e3m0_encode(values.data_ptr(), values.numel(), self.block, out.data_ptr(), scratch.data_ptr())
            return
        one = two = wide = halves = signs = None
        for rows, codes, fine, scale_bytes in self._pieces(values, out):
            missing = 2 * codes.shape[1] - rows.shape[1]
            whole = torch.nn.functional.pad(rows, (0, missing)) if missing else rows
            one, two = like(one, whole), like(two, whole)
            wide = like(wide, whole, torch.int32)
            halves = like(halves, whole, torch.float16)
            signs = like(signs, whole, torch.int16)
            with writing(scale_bytes, torch.float32) as scales:
                _encode(whole, codes, fine, scales, one, two, wide, halves, signs)

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        check_decode(self, data, out)
        if kernels := kernels_for(data, out):
            scratch = torch.empty(3 * self.block)
            kernels.e3m0_decode(data.data_ptr(), out.numel(), self.block, out.data_ptr(), scratch.data_ptr())
            return
        for rows, codes, fine, scale_bytes in self._pieces(out, data):
            levels = _levels(codes).to(torch.float32)
            _grouped(levels, fine).mul_(_scales(fine, read(scale_bytes, torch.float32)))
            torch.mul(levels[:, : rows.shape[1]], 1 / _SHIFT, out=rows)

    def decode_add(self, data: torch.Tensor, out: torch.Tensor, weight: float) -> None:
        check_decode(self, data, out)
        if kernels := kernels_for(data, out):
            scratch = torch.empty(3 * self.block)
            kernels.e3m0_decode_add(
                data.data_ptr(), out.numel(), self.block, weight, out.data_ptr(), scratch.data_ptr()
            )
            return
        for rows, codes, fine, scale_bytes in self._pieces(out, data):
            levels = _levels(codes).to(torch.float32)
            _grouped(levels, fine).mul_(_scales(fine, read(scale_bytes, torch.float32) * weight))
            rows.add_(levels[:, : rows.shape[1]].mul_(1 / _SHIFT))  # a power of two: exact

    def _pieces(self, values: torch.Tensor, data: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
        """Cut values, the bytes that they become, and those of their groups' and blocks' scales."""
        scales, fine, codes = data.split([sum(sizes) for sizes in zip(*self._sizes(values.numel()), strict=True)])
        parts = (values, self.block), (codes, self.block // 2), (fine, self.block // _GROUP), (scales, 4)
        return in_pieces(values.numel(), self.block, *parts)

    def _sizes(self, numel: int) -> list[tuple[int, int, int]]:
        """Return the bytes of scales, of groups' scales and of values: of all whole blocks, and of the last one."""
        blocks, rest = divmod(numel, self.block)
        groups = self.block // _GROUP
        whole = (4 * blocks, groups * blocks, self.block // 2 * blocks)
        if not rest:
            return [whole, (0, 0, 0)]
        groups = min(groups, rest + rest % 2)
        rows = -(-rest // groups)
        rows += rows * groups % 2
        return [whole, (4, groups, rows * groups // 2)]


def _check_back(back: object) -> None:
    if back is None:
        return
    if not isinstance(back, Codec):
        raise TypeError(f"back is {back!r}; give the codec that writes the mean, such as int8().")
    if back.sparse or back.shaped or back.feedback is not None:
        raise ValueError(
            f"back is {back.name}; give a codec that writes every value, such as int8(). Error feedback goes around "
            "both ways: error_feedback(e3m0(back=int8()))."
        )


def _grouped(rows: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """Return a view in which the values of a group stand one below the other: operations run along the groups."""
    return rows.view(len(rows), -1, groups.shape[1])


def _encode(
    rows: torch.Tensor,
    codes: torch.Tensor,
    fine: torch.Tensor,
    scales: torch.Tensor,
    one: torch.Tensor,
    two: torch.Tensor,
    wide: torch.Tensor,
    halves: torch.Tensor,
    signs: torch.Tensor,
) -> None:
    """Write the rows' codes and scales; the last five are scratch of the rows' shape."""
    in_group = _grouped(torch.abs(rows, out=one), fine).amax(dim=1)
    largest = in_group.amax(dim=1, keepdim=True)
    torch.mul(largest, _FINE, out=scales).clamp_(max=_MOST)
    largest.clamp_(min=_NOTHING)
    # The first scale that is at most 2^¼ times the group's largest magnitude.
    in_group.div_(largest).clamp_(min=_LEAST)
    first = torch.log2(in_group).mul_(-4).ceil_().clamp_(0, 254)
    torch.mul(rows, largest.mul_(_FINE).clamp_(max=_MOST).mul_(_AWAY).reciprocal_(), out=one)
    chosen = _choose(one, first, two, wide)
    fine.copy_(chosen)
    torch.mul(_grouped(one, fine), _power(chosen).mul_(_SHIFT), out=_grouped(two, fine))
    # As half-precision numbers the levels have the exponents 1 to 7, and what is smaller is subnormal. So half a unit
    # of the exponent, added to the bits, carries into it just where a value is nearer to the next level.
    bits = halves.copy_(two.clamp_(-_SHIFT, _SHIFT)).view(torch.int16).add_(1 << 9)
    torch.bitwise_right_shift(bits, 13, out=signs)  # 0, or −4 for a negative value
    bits.bitwise_right_shift_(10).add_(signs, alpha=2)  # e, or e − 32 − 8: the low four bits are `s e e e`
    low, high = bits.chunk(2, dim=1)
    codes.copy_(low.bitwise_and_(15).add_(high, alpha=16))


def _choose(rows: torch.Tensor, first: torch.Tensor, scaled: torch.Tensor, wide: torch.Tensor) -> torch.Tensor:
    """Return the first scale of each group, or the next one if that loses less; rows are in the block's units / _AWAY.

    A third and a fourth would lose 3 % less in all, and take half as long again.
    """
    torch.mul(_grouped(rows, first), _power(first), out=_grouped(scaled, first))
    by_first = _lost(scaled, first, wide)
    by_next = _lost(scaled.mul_(_FINE), first, wide).mul_(_FINE**-2)
    return first.add_(by_next < by_first)


def _lost(scaled: torch.Tensor, groups: torch.Tensor, wide: torch.Tensor) -> torch.Tensor:
    """Return the sum of squares that each group loses, in units of its scale; the last is scratch."""
    # Half a unit of the exponent, added to the bits of a number, makes its power of two the nearest one.
    nearest = torch.add(scaled.view(torch.int32), 1 << 22, out=wide).bitwise_and_(_POWER).view(torch.float32)
    return _grouped(nearest.sub_(scaled).square_(), groups).sum(dim=1)


def _power(fine: torch.Tensor) -> torch.Tensor:
    """Return what brings rows to the units of their group."""
    return torch.exp2(fine * 0.25).mul_(_AWAY).unsqueeze(1)


def _scales(fine: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the groups' scales: one rounded product, of numbers that are the same on every machine."""
    return (_table(fine.device)[fine.to(torch.int64)] * scales).unsqueeze(1)


@made_once
def _table(device: torch.device) -> torch.Tensor:
    return torch.tensor([2.0 ** (-c / 4) for c in range(256)], dtype=torch.float32, device=device)


def _levels(codes: torch.Tensor) -> torch.Tensor:
    """Return the levels, times `_SHIFT`, as half-precision numbers."""
    rows, half = codes.shape
    bits = torch.empty(rows, 2 * half, dtype=torch.int16, device=codes.device)
    low, high = bits.chunk(2, dim=1)
    torch.bitwise_right_shift(low.copy_(codes), 4, out=high)
    low.bitwise_and_(15)
    return bits.add_(bits & 8, alpha=3).bitwise_left_shift_(10).view(torch.float16)  # the sign goes to bit 15

"""Values as 4-bit powers of two, with a scale for every sixteen of them: the E3M0 of Streaming DiLoCo."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from cadenza.codecs.base import Codec
from cadenza.codecs.checks import check_decode, check_encode
from cadenza.codecs.kernels import kernels_for
from cadenza.codecs.pieces import in_pieces, like, read, writing
from cadenza.common.checks import check_whole_number
from cadenza.common.later import torch
from cadenza.common.streams import made_once

__all__ = ["e3m0", "inverses", "powers"]

_GROUP = 16  # values that share a fine scale
_FINE = 2.0**0.25  # from one fine scale to the next
_NOTHING = 2.0**-100  # blocks whose largest magnitude is below this lose their values: 1 / it must stay finite
_LEAST = 2.0**-64  # the smallest fine scale; the logarithm of zero would take ten times as long
_MOST = float.fromhex("0x1.fffffep127")  # that float32 has
_AWAY = 2.0**-24  # keeps a number whose inverse is taken from fp32's end, where the inverse would lose its digits
_SHIFT = 2.0**8  # what brings exponents 1 to 7 of half precision to the levels
_POWER = -0x800000  # the bits of an fp32 number that are its sign and its exponent
_MAGNITUDE = 0x7FFFFFFF  # those that are not its sign
_MANTISSA = 0x7FFFFF
_HALF = 1 << 22  # half a unit of the exponent: added to a number's bits, it makes its power of two the nearest one
_QUARTERS = (0x1837F1, 0x3504F4, 0x5744FD)  # the mantissas of 2^¼, 2^½ and 2^¾
_SMALLEST = 0x3C000000  # the bits of 2^-7, below which a value in units of its scale is zero
_NEXT = float.fromhex("0x1.6a09e8p-1")  # 1 / 2^½ as fp32 rounds 1 / (2^¼ · 2^¼)


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
    - *Rounding*: to the nearest level, halves away from zero. Below 1/128 of the scale: zero. So a value loses at
      most a third of itself, or 1/107 of the largest magnitude in its group.
    - *Not finite*: a block with such a value comes back as NaN.
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
        kernels = kernels_for(values, out)
        done = kernels.e3m0_encode(values, self.block, out) if kernels else 0
        one = two = wide = other = None
        for rows, codes, fine, scale_bytes in self._pieces(values, out, done):
            missing = 2 * codes.shape[1] - rows.shape[1]
            whole = torch.nn.functional.pad(rows, (0, missing)) if missing else rows
            one, two = like(one, whole), like(two, whole)
            wide, other = like(wide, whole, torch.int32), like(other, whole, torch.int32)
            with writing(scale_bytes, torch.float32) as scales:
                _encode(whole, codes, fine, scales, one, two, wide, other)

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        check_decode(self, data, out)
        kernels = kernels_for(data, out)
        done = kernels.e3m0_decode(data, self.block, out, None) if kernels else 0
        for rows, codes, fine, scale_bytes in self._pieces(out, data, done):
            rows.copy_(_decoded(codes, fine, read(scale_bytes, torch.float32))[:, : rows.shape[1]])

    def decode_add(self, data: torch.Tensor, out: torch.Tensor, weight: float) -> None:
        check_decode(self, data, out)
        kernels = kernels_for(data, out)
        done = kernels.e3m0_decode(data, self.block, out, weight) if kernels else 0
        for rows, codes, fine, scale_bytes in self._pieces(out, data, done):
            rows.add_(_decoded(codes, fine, read(scale_bytes, torch.float32) * weight)[:, : rows.shape[1]])

    def _pieces(self, values: torch.Tensor, data: torch.Tensor, done: int) -> Iterator[tuple[torch.Tensor, ...]]:
        """Cut values, the bytes that they become, and those of their groups' and blocks' scales; without `done`."""
        scales, fine, codes = data.split([sum(sizes) for sizes in zip(*self._sizes(values.numel()), strict=True)])
        parts = (values, self.block), (codes, self.block // 2), (fine, self.block // _GROUP), (scales, 4)
        left = [(part[done // self.block * size :], size) for part, size in parts]
        return in_pieces(values.numel() - done, self.block, *left)

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
    other: torch.Tensor,
) -> None:
    """Write the rows' codes and scales; the last four are scratch of the rows' shape."""
    in_group = _grouped(torch.abs(rows, out=one), fine).amax(dim=1)
    largest = in_group.amax(dim=1, keepdim=True)
    finite = largest.isfinite()
    torch.mul(largest, _FINE, out=scales).clamp_(max=_MOST).masked_fill_(~finite, math.nan)
    largest.clamp_(min=_NOTHING)
    first = _first_scale(in_group.div_(largest))
    torch.mul(rows, largest.mul_(_FINE).clamp_(max=_MOST).mul_(_AWAY).reciprocal_(), out=one)
    chosen = _choose(one, first, two, wide)
    fine.copy_(chosen).mul_(finite)
    torch.mul(_grouped(one, fine), _powers(chosen), out=_grouped(two, fine))
    low, high = _exponents(two.view(torch.int32), wide, other).chunk(2, dim=1)
    codes.copy_(low.add_(high, alpha=16)).mul_(finite)


def _first_scale(ratio: torch.Tensor) -> torch.Tensor:
    """Return the first scale that is at most 2^¼ times a group's largest magnitude, which is given by the block's."""
    bits = ratio.clamp_(min=_LEAST).view(torch.int32)
    mantissa = bits & _MANTISSA
    quarters = (bits >> 23).sub_(127).mul_(4)
    for border in _QUARTERS:
        quarters.add_(mantissa >= border)
    return quarters.neg_().clamp_(0, 254)


def _choose(rows: torch.Tensor, first: torch.Tensor, scaled: torch.Tensor, wide: torch.Tensor) -> torch.Tensor:
    """Return the first scale of each group, or the next one if that loses less; rows are in the block's units / _AWAY.

    A third and a fourth would lose 3 % less in all, and take half as long again.
    """
    torch.mul(_grouped(rows, first), _powers(first), out=_grouped(scaled, first))
    by_first = _lost(scaled, first, wide)
    by_next = _lost(scaled.mul_(_FINE), first, wide).mul_(_NEXT)
    return first.add_(by_next < by_first)


def _lost(scaled: torch.Tensor, groups: torch.Tensor, wide: torch.Tensor) -> torch.Tensor:
    """Return the sum of squares that each group loses, in units of its scale; the last is scratch."""
    nearest = torch.add(scaled.view(torch.int32), _HALF, out=wide).bitwise_and_(_POWER).view(torch.float32)
    first, *others = _grouped(nearest.sub_(scaled).square_(), groups).unbind(1)
    total = first.clone()
    for row in others:  # one after the other: `sum` adds in an order that depends on the machine
        total.add_(row)
    return total


def _exponents(bits: torch.Tensor, wide: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return `s e e e` of fp32 numbers that are given by their bits, in units of their scale; with scratch."""
    torch.bitwise_and(bits, _MAGNITUDE, out=wide)
    torch.sub(wide, _SMALLEST, out=other).bitwise_right_shift_(31).bitwise_not_()  # no bits where zero is nearest
    wide.add_(_HALF).bitwise_right_shift_(23).sub_(120).clamp_(1, 7).bitwise_and_(other)
    return wide.bitwise_or_(torch.bitwise_right_shift(bits, 28, out=other).bitwise_and_(8))


def _decoded(codes: torch.Tensor, fine: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return values: levels times the groups' scales, numbers that are the same on every machine."""
    levels = _levels(codes).to(torch.float32).mul_(_SHIFT)
    _grouped(levels, fine).mul_((inverses(fine.device)[fine.to(torch.int64)] * scales).unsqueeze(1))
    return levels


def _powers(chosen: torch.Tensor) -> torch.Tensor:
    """Return what brings rows to the units of their group."""
    return powers(chosen.device)[chosen.to(torch.int64)].unsqueeze(1)


@made_once
def powers(device: torch.device) -> torch.Tensor:
    """Return 2^(c/4) / 2^24 by the byte c of a group's scale.

    >>> powers(torch.device("cpu"))[[0, 4]] * 2**24
    tensor([1., 2.])
    """
    return torch.tensor([2.0 ** (c / 4) * _AWAY for c in range(256)], dtype=torch.float32, device=device)


@made_once
def inverses(device: torch.device) -> torch.Tensor:
    """Return 2^(−c/4) by the byte c of a group's scale.

    >>> inverses(torch.device("cpu"))[[0, 4]]
    tensor([1.0000, 0.5000])
    """
    return torch.tensor([2.0 ** (-c / 4) for c in range(256)], dtype=torch.float32, device=device)


def _levels(codes: torch.Tensor) -> torch.Tensor:
    """Return the levels, over `_SHIFT`, as half-precision numbers."""
    rows, half = codes.shape
    bits = torch.empty(rows, 2 * half, dtype=torch.int16, device=codes.device)
    low, high = bits.chunk(2, dim=1)
    torch.bitwise_right_shift(low.copy_(codes), 4, out=high)
    low.bitwise_and_(15)
    return bits.add_(bits & 8, alpha=3).bitwise_left_shift_(10).view(torch.float16)  # the sign goes to bit 15

"""Only the largest values of each chunk, with few bits each: the top-k of SparseLoCo."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from cadenza.codecs.base import Codec
from cadenza.codecs.checks import check_decode, check_encode
from cadenza.codecs.kernels import kernels_for
from cadenza.codecs.pieces import in_pieces, piece_values, read
from cadenza.common.checks import check_share, check_whole_number
from cadenza.common.later import torch

__all__ = ["topk"]

_NOTHING = 2.0**-100  # chunks whose largest magnitude is below this lose digits
_WHOLE_BITS = 23  # the largest magnitude of a chunk is a whole number of one bit more
# Nearly the most that float32 has: rounded to bf16, low and step still have a finite sum.
_MOST = float.fromhex("0x1.fbfffep127")
_MAGNITUDE = 0x7FFFFFFF  # the bits of an fp32 number that are not its sign


def topk(
    density: float = 0.02, *, chunk: int = 4096, bits: int = 2, mean_of: Literal["all", "senders"] = "all"
) -> Codec:
    """Send only the largest magnitudes of each chunk, as in SparseLoCo (arXiv 2508.15706); the rest are zero.

    Meant for `error_feedback(topk(), decay=0.95)`: alone it never sends what is small.

    - *Choice*: of each chunk the k = max(1, round(density · chunk)) largest magnitudes, of equal ones the first; of the
      last, shorter chunk likewise by its own length. So the number of bytes depends on the number of values alone.
    - *Places*: 12 bits each, two in three bytes. A place in a chunk of 4096 needs no more, and uint16 would make the
      whole 28 % larger; codes of variable length would make the number of bytes depend on the values.
    - *Values*: a sign and `bits` − 1 bits of level; the magnitude is low + level · step. At 2 bits the two levels are
      the means of the small and of the large magnitudes (two rounds of 2-means from their mean), so that outliers do
      not stretch the scale; at 4 or 8 bits they run evenly from the smallest to the largest. If a zero was chosen, as
      in a chunk with fewer than k others, low is 0. All of it is computed on whole numbers, of which the largest
      magnitude has 24 bits: their sums are the same in any order.
    - *Not finite*: what is sent of a chunk with such a value comes back as NaN.
    - *Bytes*: chunk after chunk: places in their order, values, low and step in bf16. 0.009 of fp32's bytes.
    - *Mean*: over all members, of which those that have not sent a value count as 0, as the paper's formula has it; or,
      with ``mean_of="senders"``, over those that have sent one, as the authors' code has it: a value that one of four
      has sent moves four times as far then. A value of exactly 0 counts as not sent.

    >>> codec, out = topk(0.5), torch.empty(4)
    >>> data = torch.empty(codec.encoded_bytes(4), dtype=torch.uint8)
    >>> codec.encode(torch.tensor([0.1, -8.0, 2.0, 0.2]), data); codec.decode(data, out); out
    tensor([ 0., -8.,  2.,  0.])
    """
    check_share("density", density, of="values to send")
    check_whole_number("chunk", chunk, least=16, most=4096)
    if bits not in (2, 4, 8):
        raise ValueError(f"bits is {bits!r}; give 2, 4 or 8 bits for each value that is sent.")
    if mean_of not in ("all", "senders"):
        raise ValueError(f'mean_of is {mean_of!r}; give "all" members or the "senders" of each value.')
    kind = TopK if mean_of == "all" else TopKOfSenders
    return kind(float(density), chunk, bits)


@dataclass(frozen=True)
class TopK:
    """Chunk after chunk: the places of the values that are sent, their codes, and the two numbers that scale them."""

    density: float
    block: int
    bits: int
    exact: ClassVar[bool] = False
    sparse: ClassVar[bool] = True
    feedback: ClassVar[float | None] = None
    aligned: ClassVar[bool] = True
    shaped: ClassVar[bool] = False

    @property
    def name(self) -> str:
        return f"topk({self.density:g})"

    @property
    def back(self) -> Codec:
        return self

    def encoded_bytes(self, numel: int) -> int:
        chunks, rest = divmod(numel, self.block)
        return chunks * sum(self._sizes(self.block)) + (sum(self._sizes(rest)) if rest else 0)

    def encode(self, values: torch.Tensor, out: torch.Tensor) -> None:
        check_encode(self, values, out)
        if kernels := kernels_for(values, out):
            kernels.topk_encode(values, self.block, self._both_kept(values), self.bits, out)
            return
        for rows, data in self._pieces(values, out):
            places = _largest(rows, self._kept(rows.shape[1]))
            chosen = rows.gather(1, places)
            scales, codes = _quantise(chosen.abs(), self._levels)
            codes.add_(chosen < 0, alpha=self._levels).mul_(scales[:, :1].isfinite())
            place_bytes, code_bytes, scale_bytes = data.split(self._sizes(rows.shape[1]), dim=1)
            place_bytes.copy_(_pack_places(places))
            code_bytes.copy_(_pack_codes(codes, self.bits))
            scale_bytes.copy_(scales.view(torch.uint8))

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        check_decode(self, data, out)
        if kernels := kernels_for(data, out):
            kernels.topk_decode(data, self.block, self._both_kept(out), self.bits, out, None)
            return
        for rows, row_data in self._pieces(out, data):
            places, values = self._read(rows.shape[1], row_data)
            rows.zero_().scatter_(1, places, values)

    def decode_add(self, data: torch.Tensor, out: torch.Tensor, weight: float) -> None:
        check_decode(self, data, out)
        if kernels := kernels_for(data, out):
            kernels.topk_decode(data, self.block, self._both_kept(out), self.bits, out, weight)
            return
        for rows, row_data in self._pieces(out, data):
            places, values = self._read(rows.shape[1], row_data)
            rows.scatter_add_(1, places, values.mul_(weight))

    @property
    def _levels(self) -> int:
        return 1 << (self.bits - 1)

    def _kept(self, width: int) -> int:
        return max(1, round(self.density * width))

    def _both_kept(self, values: torch.Tensor) -> tuple[int, int]:
        """Return how many values of a whole chunk are sent, and of the last one."""
        return self._kept(self.block), self._kept(values.numel() % self.block)

    def _sizes(self, width: int) -> list[int]:
        """Return the bytes of one chunk's places, codes and scales."""
        kept = self._kept(width)
        return [3 * ((kept + 1) // 2), -(-kept * self.bits // 8), 4]

    def _pieces(self, values: torch.Tensor, data: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
        """Cut values and the bytes that they become."""
        parts = (values, self.block), (data, sum(self._sizes(self.block)))
        times = max(1, min(8, round(0.16 / self.density)))  # scratch is needed only for the few that are sent
        return in_pieces(values.numel(), self.block, *parts, times=times)

    def _read(self, width: int, data: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the places of the values that were sent, and those values, one chunk a row."""
        place_bytes, code_bytes, scale_bytes = data.split(self._sizes(width), dim=1)
        kept, levels = self._kept(width), self._levels
        codes = _unpack_codes(code_bytes, self.bits)[:, :kept]
        low, step = read(scale_bytes, torch.bfloat16).to(torch.float32).split(1, dim=1)
        # Two roundings, never one: a fused multiply-add would give other bits on other machines.
        values = (codes & (levels - 1)).to(torch.float32).mul_(step).add_(low)
        return _unpack_places(place_bytes)[:, :kept], torch.where(codes >= levels, -values, values)


@dataclass(frozen=True)
class TopKOfSenders(TopK):
    """The same bytes, of which each value's mean is over the members that have sent it."""

    def combine(self, contributions: Sequence[torch.Tensor], out: torch.Tensor, weights: Sequence[float]) -> None:
        for data in contributions:
            check_decode(self, data, out)
        parts = [(data, sum(self._sizes(self.block))) for data in contributions]
        for rows, *datas in in_pieces(out.numel(), self.block, (out, self.block), *parts):
            total, sent = rows.new_zeros(2, *rows.shape, dtype=torch.float64)
            for data, weight in zip(datas, weights, strict=True):
                places, values = self._read(rows.shape[1], data)
                total.scatter_add_(1, places, values.to(torch.float64) * weight)
                sent.scatter_add_(1, places, values.ne(0).to(torch.float64) * weight)
            rows.copy_(torch.where(sent > 0, total / sent * sum(weights), 0.0))


def _largest(rows: torch.Tensor, kept: int) -> torch.Tensor:
    """Return the places of the largest magnitudes of each row, in their order; of equal ones the first."""
    few = max(1, piece_values(rows.device) // rows.shape[1])
    last = torch.arange(rows.shape[1] - 1, -1, -1, device=rows.device)
    found = []
    for part in rows.split(few):
        # A magnitude's bits, then how far its place is from the end: no two are equal.
        keys = (part.view(torch.int32) & _MAGNITUDE).to(torch.int64).bitwise_left_shift_(12).add_(last)
        found.append(torch.topk(keys, kept, dim=1, sorted=False).indices.sort(dim=1).values)
    return torch.cat(found)


def _quantise(magnitudes: torch.Tensor, levels: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the two scales (low and step, in bf16) of each row, and each magnitude's level."""
    largest = magnitudes.amax(dim=1, keepdim=True)
    finite = largest.isfinite()
    exponents = largest.clamp(_NOTHING, _MOST).view(torch.int32).bitwise_right_shift(23)
    unit = (254 + _WHOLE_BITS - exponents).bitwise_left_shift_(23).view(torch.float32)
    back = (exponents - _WHOLE_BITS).bitwise_left_shift_(23).view(torch.float32)
    numbers = magnitudes.clamp(max=_MOST).mul_(unit).masked_fill_(~finite, 0.0).to(torch.int64)
    least = numbers.amin(dim=1, keepdim=True)
    low, high = least.to(torch.float32), numbers.amax(dim=1, keepdim=True).to(torch.float32)
    if levels == 2:
        low, high = _two_means(numbers)
    low = torch.where(least > 0, low, 0.0)
    step = ((high - low) / (levels - 1)).clamp_(min=0.0)
    scales = torch.cat([low, step], dim=1).mul_(back).to(torch.bfloat16)
    low, step = scales.to(torch.float32).mul_(unit).split(1, dim=1)
    inverse = torch.where(step > 0, 1 / step, 0.0)
    codes = ((numbers.to(torch.float32) - low) * inverse).clamp_(0, levels - 1).round_().to(torch.uint8)
    return scales.masked_fill_(~finite, math.nan), codes


def _two_means(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two numbers that stand well for a row: the means of its small and of its large whole numbers."""
    low = high = border = _mean(numbers.sum(dim=1, keepdim=True), numbers.shape[1])
    for _ in range(2):  # with heavy tails, a second round takes a third off the error; a third one little more
        above = numbers.to(torch.float32) > border
        low, high = _mean_where(numbers, ~above), _mean_where(numbers, above)
        border = (low + high) * 0.5
    return low, high


def _mean_where(numbers: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Return each row's mean over the chosen ones, or 0 if there are none."""
    return _mean((numbers * chosen).sum(dim=1, keepdim=True), chosen.sum(dim=1, keepdim=True).clamp_(min=1))


def _mean(sums: torch.Tensor, counts: torch.Tensor | int) -> torch.Tensor:
    """Divide whole numbers in fp32: three roundings, that are the same on every machine."""
    return sums.to(torch.float32) / (counts if isinstance(counts, int) else counts.to(torch.float32))


def _pack_places(places: torch.Tensor) -> torch.Tensor:
    """Write numbers below 4096 as 12 bits each, two in three bytes."""
    first, second = torch.nn.functional.pad(places, (0, places.shape[1] % 2)).unflatten(1, (-1, 2)).unbind(2)
    return torch.stack([first & 255, (first >> 8) | ((second & 15) << 4), second >> 4], dim=2).flatten(1)


def _unpack_places(data: torch.Tensor) -> torch.Tensor:
    one, two, three = data.to(torch.int64).unflatten(1, (-1, 3)).unbind(2)
    return torch.stack([one | ((two & 15) << 8), (two >> 4) | (three << 4)], dim=2).flatten(1)


def _pack_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Write numbers of `bits` bits side by side, the first in the lowest bits of a byte."""
    parts = torch.nn.functional.pad(codes, (0, -codes.shape[1] % (8 // bits))).unflatten(1, (-1, 8 // bits)).unbind(2)
    packed: torch.Tensor = parts[0]
    for position, part in enumerate(parts[1:], start=1):
        packed = packed | (part << (bits * position))
    return packed


def _unpack_codes(data: torch.Tensor, bits: int) -> torch.Tensor:
    parts = [(data >> (bits * position)) & ((1 << bits) - 1) for position in range(8 // bits)]
    return torch.stack(parts, dim=2).flatten(1)

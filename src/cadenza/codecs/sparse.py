"""Only the largest values of each chunk, with few bits each: the top-k of SparseLoCo."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from cadenza.codecs.base import Codec
from cadenza.codecs.checks import check_decode, check_encode
from cadenza.codecs.pieces import in_pieces, piece_values, read
from cadenza.common.checks import check_share, check_whole_number
from cadenza.common.later import torch
from cadenza.errors import TransportError

__all__ = ["topk"]

_NOTHING = 2.0**-100  # levels that are nearer to each other than this are one
_AWAY = 2.0**-24  # keeps sums, and numbers whose inverse is taken, from fp32's end
# Nearly the most that float32 has: rounded to bf16, low and step still have a finite sum.
_MOST = float.fromhex("0x1.fffffep127") * (1 - 2.0**-7)


def topk(
    density: float = 0.02, *, chunk: int = 4096, bits: int = 2, mean_of: Literal["all", "senders"] = "all"
) -> Codec:
    """Send only the largest magnitudes of each chunk, as in SparseLoCo (arXiv 2508.15706); the rest are zero.

    Meant for `error_feedback(topk(), decay=0.95)`: alone it never sends what is small.

    - *Choice*: of each chunk the k = max(1, round(density · chunk)) largest magnitudes; of the last, shorter chunk
      likewise by its own length. So the number of bytes depends on the number of values alone.
    - *Places*: 12 bits each, two in three bytes. A place in a chunk of 4096 needs no more, and uint16 would make the
      whole 28 % larger; codes of variable length would make the number of bytes depend on the values.
    - *Values*: a sign and `bits` − 1 bits of level; the magnitude is low + level · step. At 2 bits the two levels are
      the means of the small and of the large magnitudes (two rounds of 2-means from their mean), so that outliers do
      not stretch the scale; at 4 or 8 bits they run evenly from the smallest to the largest. If a zero was chosen, as
      in a chunk with fewer than k others, low is 0.
    - *Bytes*: chunk after chunk: places, values, low and step in bf16. 0.009 of fp32's bytes.
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
        for rows, data in self._pieces(values, out):
            magnitudes, places = _largest(rows, self._kept(rows.shape[1]))
            scales, codes = _quantise(magnitudes, self._levels)
            codes.add_(rows.gather(1, places) < 0, alpha=self._levels)
            place_bytes, code_bytes, scale_bytes = data.split(self._sizes(rows.shape[1]), dim=1)
            place_bytes.copy_(_pack_places(places))
            code_bytes.copy_(_pack_codes(codes, self.bits))
            scale_bytes.copy_(scales.view(torch.uint8))

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        check_decode(self, data, out)
        for rows, row_data in self._pieces(out, data):
            places, values = self._read(rows.shape[1], row_data)
            rows.zero_().scatter_(1, places, values)

    def decode_add(self, data: torch.Tensor, out: torch.Tensor, weight: float) -> None:
        check_decode(self, data, out)
        for rows, row_data in self._pieces(out, data):
            places, values = self._read(rows.shape[1], row_data)
            rows.scatter_add_(1, places, values.mul_(weight))

    @property
    def _levels(self) -> int:
        return 1 << (self.bits - 1)

    def _kept(self, width: int) -> int:
        return max(1, round(self.density * width))

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
        places = _unpack_places(place_bytes)[:, :kept]
        if width < 4096 and int(places.max()) >= width:
            raise TransportError(f"A message is damaged: it has values beyond the {width} that it is of.")
        return places, torch.where(codes >= levels, -values, values)


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


def _largest(rows: torch.Tensor, kept: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest magnitudes of each row, and their places in it."""
    few = max(1, piece_values(rows.device) // rows.shape[1])
    found = [torch.topk(part.abs(), kept, dim=1, sorted=False) for part in rows.split(few)]
    return torch.cat([part.values for part in found]), torch.cat([part.indices for part in found])


def _quantise(magnitudes: torch.Tensor, levels: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the two scales (low and step, in bf16) of each row, and each magnitude's level."""
    small = magnitudes.clamp(max=_MOST).mul_(_AWAY)
    least = small.amin(dim=1, keepdim=True)
    if levels == 2:
        low, high = _two_means(small)
    else:
        low, high = least, small.amax(dim=1, keepdim=True)
    low = torch.where(least > 0, low, 0.0)
    step = ((high - low) / (levels - 1)).clamp_(min=0.0)
    scales = torch.cat([low, step], dim=1).div_(_AWAY).to(torch.bfloat16)
    low, step = scales.to(torch.float32).mul_(_AWAY).split(1, dim=1)
    inverse = torch.where(step > _NOTHING * _AWAY, 1 / step, 0.0)
    return scales, ((small - low) * inverse).round_().clamp_(0, levels - 1).to(torch.uint8)


def _two_means(magnitudes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two numbers that stand well for a row: the means of its small and of its large magnitudes."""
    border = magnitudes.mean(dim=1, keepdim=True)
    for _ in range(2):  # with heavy tails, a second round takes a third off the error; a third one little more
        above = magnitudes > border
        low, high = _mean_where(magnitudes, ~above), _mean_where(magnitudes, above)
        border = (low + high) / 2
    return low, high


def _mean_where(magnitudes: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Return each row's mean over the chosen ones, or 0 if there are none."""
    return (magnitudes * chosen).sum(dim=1, keepdim=True) / chosen.sum(dim=1, keepdim=True).clamp_(min=1)


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

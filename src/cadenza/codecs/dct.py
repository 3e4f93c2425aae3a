"""The largest frequencies of each chunk of a matrix: the discrete cosine transform of DeMo."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from cadenza.codecs.base import Codec, ShapedCodec
from cadenza.codecs.checks import check_decode, check_encode
from cadenza.codecs.pieces import piece_values, read
from cadenza.common.checks import check_whole_number
from cadenza.common.later import torch
from cadenza.common.streams import made_once

__all__ = ["dct"]

_BITS = 24  # of a whole number that stands for a coefficient or for an entry of the transform
_MOST = 1 << 20  # values in a message, as for other sparse codecs
_LARGEST = float.fromhex("0x1.fffffep127")  # that float32 has


def dct(k: int = 32, *, chunk: int = 64) -> ShapedCodec:
    """Send only the k largest frequencies of each chunk of a tensor, as in DeMo (arXiv 2411.19870).

    Meant for `error_feedback(dct(), decay=0.999)`, which is DeMo's momentum: alone it never sends what is small.

    - *Chunks*: a matrix is cut into blocks whose sides are the largest divisors of its own that are at most `chunk`, as
      in the authors' code: 64 of 768, but 29 of 50257 and 1 of a prime. A vector is cut likewise. The paper has no
      other shapes: here a tensor of more dimensions is a matrix of its first by all others.
    - *Choice*: of the orthonormal DCT-II of a block, in both directions, the k largest magnitudes.
    - *Mean*: a frequency is averaged over the members that have sent it, not over all, before the transform back. A
      frequency of exactly 0 counts as not sent.
    - *Back*: in whole numbers below 2**53, which float64 adds without rounding. So all machines get the same bits,
      whatever their libraries; the authors' code leaves that open.
    - *Bytes*: block after block: places (1 byte, or 2 in a block of more than 256 values), then values in fp32. The
      authors send places as int64. 0.012 of fp32's bytes for large matrices.

    Only whole blocks of zeros come back as zeros.

    >>> codec = dct(k=1).for_shapes([(4, 2), (3,)])
    >>> data, out = torch.empty(codec.encoded_bytes(11), dtype=torch.uint8), torch.empty(11)
    >>> codec.encode(torch.tensor([2.0] * 8 + [1.0] * 3), data); codec.decode(data, out)
    >>> out, data.numel()
    (tensor([2.0000, 2.0000, 2.0000, 2.0000, 2.0000, 2.0000, 2.0000, 2.0000, 1.0000, 1.0000, 1.0000]), 10)
    """
    check_whole_number("chunk", chunk, least=1, most=256)
    check_whole_number("k", k, least=1, most=chunk * chunk)
    return Dct(k, chunk)


@dataclass(frozen=True)
class Grid:
    """A matrix of blocks; a part of a tensor keeps the sides of the blocks of the whole."""

    rows: int
    columns: int
    height: int
    width: int

    @property
    def numel(self) -> int:
        return self.rows * self.columns

    @property
    def block(self) -> int:
        return self.height * self.width

    @property
    def across(self) -> int:
        """How many blocks lie side by side."""
        return self.columns // self.width

    @property
    def blocks(self) -> int:
        return self.numel // self.block

    def cut(self, bands: int) -> Iterator[Grid]:
        """Cut along the first dimension into parts of at most so many rows of blocks."""
        for start in range(0, self.rows, bands * self.height):
            yield replace(self, rows=min(bands * self.height, self.rows - start))

    def pieces(self, values: torch.Tensor) -> Iterator[tuple[torch.Tensor, slice]]:
        """Yield views of some blocks each, (down, height, across, width), and the numbers of these blocks."""
        room = max(1, piece_values(values.device) // self.block)
        aside, tall = min(room, self.across), max(1, room // self.across)
        whole = values.view(-1, self.height, self.across, self.width)
        for down in range(0, whole.shape[0], tall):
            for at in range(0, self.across, aside):
                part = whole[down : down + tall, :, at : at + aside]
                first = down * self.across + at
                yield part, slice(first, first + part.shape[0] * part.shape[2])


@dataclass(frozen=True)
class Dct:
    """Block after block: the places of the frequencies that are sent, and their values; made by `dct`.

    Without `grids`, which `for_shapes` gives it, it takes any run of values for one vector.
    """

    k: int
    chunk: int
    grids: tuple[Grid, ...] | None = None
    exact: ClassVar[bool] = False
    sparse: ClassVar[bool] = True
    feedback: ClassVar[float | None] = None
    aligned: ClassVar[bool] = False
    shaped: ClassVar[bool] = True

    @property
    def name(self) -> str:
        return f"dct({self.k})"

    @property
    def block(self) -> int:
        return self.chunk * self.chunk

    def for_shapes(self, shapes: Sequence[tuple[int, ...]]) -> Codec:
        return replace(self, grids=tuple(_grid(shape, self.chunk) for shape in shapes if math.prod(shape)))

    def split(self, row_bytes: int) -> Sequence[tuple[int, Codec]]:
        if self.grids is None:
            raise ValueError(f"{self.name} is cut at tensors, which it does not know: call for_shapes(shapes) first.")
        messages: list[list[Grid]] = []
        for grid in self.grids:
            for part in grid.cut(self._bands(grid, row_bytes)):
                if messages and self._fits([*messages[-1], part], row_bytes):
                    messages[-1].append(part)
                else:
                    messages.append([part])
        return [(_numel(grids), replace(self, grids=tuple(grids))) for grids in messages]

    @property
    def back(self) -> Codec:
        return self

    def encoded_bytes(self, numel: int) -> int:
        return sum(self._bytes(grid) for grid in self._grids(numel))

    def encode(self, values: torch.Tensor, out: torch.Tensor) -> None:
        check_encode(self, values, out)
        for grid, blocks, [data] in self._pieces(values, [out]):
            frequencies = _forward(blocks).flatten(1)
            places = frequencies.abs().topk(self._kept(grid), dim=1, sorted=False).indices
            place_bytes, value_bytes = data.split(self._sizes(grid), dim=1)
            place_bytes.copy_(_pack(places, place_bytes.shape[1] // places.shape[1]))
            value_bytes.copy_(frequencies.gather(1, places).view(torch.uint8))

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        check_decode(self, data, out)
        for grid, blocks, [part] in self._pieces(out, [data]):
            blocks.copy_(_backward(self._scattered(grid, part, blocks), blocks))

    def decode_add(self, data: torch.Tensor, out: torch.Tensor, weight: float) -> None:
        check_decode(self, data, out)
        for grid, blocks, [part] in self._pieces(out, [data]):
            blocks.add_(_backward(self._scattered(grid, part, blocks), blocks).mul_(weight))

    def combine(self, contributions: Sequence[torch.Tensor], out: torch.Tensor, weights: Sequence[float]) -> None:
        for data in contributions:
            check_decode(self, data, out)
        for grid, blocks, parts in self._pieces(out, contributions):
            total, sent = blocks.new_zeros(2, parts[0].shape[0], grid.block, dtype=torch.float64)
            for part, weight in zip(parts, weights, strict=True):
                places, values = self._read(grid, part)
                total.scatter_add_(1, places, values * weight)
                sent.scatter_add_(1, places, values.ne(0).to(values) * weight)
            mean = torch.where(sent > 0, total / sent * sum(weights), 0.0)
            blocks.copy_(_backward(mean, blocks))

    def _grids(self, numel: int) -> Sequence[Grid]:
        grids = self.grids
        if grids is None:
            grids = (_grid((numel,), self.chunk),) if numel else ()
        if _numel(grids) != numel:
            raise ValueError(f"{self.name} was made for tensors of {_numel(grids)} values in all; got {numel}.")
        return grids

    def _kept(self, grid: Grid) -> int:
        return min(self.k, grid.block)

    def _sizes(self, grid: Grid) -> list[int]:
        """Return the bytes of one block's places and values."""
        kept = self._kept(grid)
        return [kept * (1 if grid.block <= 256 else 2), 4 * kept]

    def _bytes(self, grid: Grid) -> int:
        return grid.blocks * sum(self._sizes(grid))

    def _bands(self, grid: Grid, row_bytes: int) -> int:
        """Return how many rows of a tensor's blocks fit a message."""
        band = replace(grid, rows=grid.height)
        if self._bytes(band) > row_bytes:
            raise ValueError(
                f"One row of blocks of a tensor of {grid.rows} x {grid.columns} takes {self._bytes(band)} bytes in "
                f"{self.name}, more than the {row_bytes} that a message between so many members holds; choose a "
                "smaller k."
            )
        return max(1, min(row_bytes // self._bytes(band), _MOST // band.numel))

    def _fits(self, grids: Sequence[Grid], row_bytes: int) -> bool:
        return sum(map(self._bytes, grids)) <= row_bytes and _numel(grids) <= _MOST

    def _pieces(
        self, values: torch.Tensor, datas: Sequence[torch.Tensor]
    ) -> Iterator[tuple[Grid, torch.Tensor, list[torch.Tensor]]]:
        """Cut values, and the bytes that they become in each of some runs, into blocks that stay in the cache."""
        start = start_byte = 0
        for grid in self._grids(values.numel()):
            stop, stop_byte = start + grid.numel, start_byte + self._bytes(grid)
            rows = [data[start_byte:stop_byte].view(grid.blocks, -1) for data in datas]
            for blocks, numbers in grid.pieces(values[start:stop]):
                yield grid, blocks, [data[numbers] for data in rows]
            start, start_byte = stop, stop_byte

    def _read(self, grid: Grid, data: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the places of the frequencies that were sent, and their values, one block a row."""
        place_bytes, value_bytes = data.split(self._sizes(grid), dim=1)
        values = read(value_bytes, torch.float32).to(torch.float64)
        return _unpack(place_bytes, place_bytes.shape[1] // values.shape[1]), values

    def _scattered(self, grid: Grid, data: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
        """Return all frequencies of each block: those that were sent, and zeros."""
        places, values = self._read(grid, data)
        return blocks.new_zeros(values.shape[0], grid.block, dtype=torch.float64).scatter_(1, places, values)


def _grid(shape: Sequence[int], chunk: int) -> Grid:
    rows = shape[0] if shape else 1
    columns = math.prod(shape) // rows
    return Grid(rows, columns, _side(rows, chunk), _side(columns, chunk))


def _side(length: int, chunk: int) -> int:
    """Return the largest divisor that is at most `chunk`."""
    return next(side for side in range(min(length, chunk), 0, -1) if length % side == 0)


def _numel(grids: Sequence[Grid]) -> int:
    return sum(grid.numel for grid in grids)


@made_once
def _basis(size: int, device: torch.device) -> torch.Tensor:
    """Return the orthonormal DCT-II times 2**24, a column a frequency, in whole numbers."""
    angles = [[math.pi * (2 * i + 1) * f / (2 * size) for f in range(size)] for i in range(size)]
    scales = [math.sqrt((2 if f else 1) / size) * 2**_BITS for f in range(size)]
    entries = [[round(s * math.cos(angle)) for s, angle in zip(scales, row, strict=True)] for row in angles]
    return torch.tensor(entries, dtype=torch.float64, device=device)


def _forward(blocks: torch.Tensor) -> torch.Tensor:
    """Return the frequencies of blocks (down, height, across, width) in fp32, a matrix a block."""
    stacked = blocks.transpose(1, 2).to(torch.float64).flatten(0, 1)
    high, wide = (_basis(size, blocks.device) for size in stacked.shape[1:])
    return _as_fp32((high.T @ stacked @ wide).mul_(2.0 ** (-2 * _BITS)))


def _backward(frequencies: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """Return blocks, of the shape of those given, of frequencies in float64 with a block a row."""
    down, height, across, width = blocks.shape
    whole, scale = _whole_numbers(frequencies)
    halfway = whole.view(-1, height, width) @ _basis(width, blocks.device).T
    whole, next_scale = _whole_numbers(halfway.flatten(1))
    # At most 2**24 · 2**24 · 16, the most that a column of 256 sums up to: every order of the sums gives the same.
    values = _basis(height, blocks.device) @ whole.view(-1, height, width)
    values.mul_((scale * next_scale * 2.0 ** (-2 * _BITS)).unsqueeze(2))
    return _as_fp32(values).view(down, across, height, width).transpose(1, 2)


def _as_fp32(values: torch.Tensor) -> torch.Tensor:
    """Round values in float64, which are overwritten; a sum of large ones ends at fp32's largest number."""
    return values.clamp_(-_LARGEST, _LARGEST).to(torch.float32)


def _whole_numbers(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows as whole numbers of at most 2**24, and the powers of two by which they are to be multiplied."""
    exponents = torch.frexp(rows.abs().amax(dim=1, keepdim=True)).exponent.to(torch.int64) - _BITS
    return (rows * _power_of_two(-exponents)).round_(), _power_of_two(exponents)


def _power_of_two(exponents: torch.Tensor) -> torch.Tensor:
    """Return powers of two in float64, by their bits: `torch.pow` may round."""
    bits: torch.Tensor = (exponents.clamp(-1022, 1023) + 1023) << 52
    return bits.view(torch.float64)


def _pack(places: torch.Tensor, size: int) -> torch.Tensor:
    """Write numbers in one or two bytes each, the low one first."""
    parts = [places & 255, places >> 8][:size]
    return torch.stack(parts, dim=2).flatten(1).to(torch.uint8)


def _unpack(data: torch.Tensor, size: int) -> torch.Tensor:
    parts = data.to(torch.int64).unflatten(1, (-1, size)).unbind(2)
    places: torch.Tensor = parts[0] if size == 1 else parts[0] | (parts[1] << 8)
    return places

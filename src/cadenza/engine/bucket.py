"""Buckets: runs of values that travel as one message, and how tensors are cut into them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

import torch

__all__ = ["Bucket", "cut", "cut_alone", "overlapping"]


@dataclass
class Bucket:
    """A run of values of one dtype on one device that travels as one message.

    Between pieces there may be gaps, which are zeros; `alone` says that it may be averaged where it is.

    >>> weight = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    >>> [bucket] = cut([weight], weight.device, torch.float32, capacity=1024)
    >>> memory = torch.empty(bucket.numel)
    >>> bucket.pack(memory); memory.mul_(10)
    tensor([10., 20., 30., 40.])
    >>> bucket.unpack(memory); weight
    tensor([[10., 20.],
            [30., 40.]])
    """

    device: torch.device
    dtype: torch.dtype
    pieces: list[torch.Tensor] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    numel: int = 0
    alone: bool = False
    _gaps: list[int] = field(default_factory=list)  # how many values are free before each piece
    _flat: bool = True
    _spaced: bool = False

    def add(self, piece: torch.Tensor, *, at: int | None = None) -> None:
        """Put a piece behind the others, with a gap if it is to start later."""
        start = self.numel if at is None else at
        self._gaps.append(start - self.numel)
        self._spaced = self._spaced or start > self.numel
        self.pieces.append(piece)
        self.sizes.append(piece.numel())
        self._flat = self._flat and piece.ndim == 1 and piece.dtype == self.dtype
        self.numel = start + piece.numel()

    def pack(self, memory: torch.Tensor) -> None:
        """Copy the values into the first `numel` elements of `memory`; gaps between them are zeros."""
        if self._flat:  # one operation: for many small pieces half the time of copies
            torch.cat(self._pieces_and_zeros() if self._spaced else self.pieces, out=memory[: self.numel])
            return
        if self._spaced:
            torch._foreach_zero_([gap for gap in self._gaps_and_places(memory)[::2] if gap.numel()])
        torch._foreach_copy_(self.places_in(memory), self.pieces)

    def _pieces_and_zeros(self) -> list[torch.Tensor]:
        """Return the pieces, and zeros for the gaps between them."""
        device = self.pieces[0].device
        zeros = {size: torch.zeros(size, dtype=self.dtype, device=device) for size in set(self._gaps) - {0}}
        pairs = zip(self._gaps, self.pieces, strict=True)
        return [part for gap, piece in pairs for part in ((zeros[gap], piece) if gap else (piece,))]

    def _gaps_and_places(self, memory: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return what is free before each piece, and its place, in turn."""
        sizes = [size for pair in zip(self._gaps, self.sizes, strict=True) for size in pair]
        return memory[: self.numel].split_with_sizes(sizes)

    def chunks(self, most: int) -> Iterator[tuple[int, Bucket]]:
        """Cut the bucket into runs of at most `most` values, each on one device: yield where it starts, and it.

        A gap belongs to the piece after it, and is shorter than `most`.

        >>> bucket = Bucket(torch.device("cpu"), torch.float32)
        >>> bucket.add(torch.ones(3)); bucket.add(torch.ones(2), at=4)
        >>> [(start, chunk.numel) for start, chunk in bucket.chunks(2)]
        [(0, 2), (2, 1), (3, 2), (5, 1)]
        """
        end, first, chunk = 0, 0, Bucket(self.device, self.dtype)
        for piece, gap in zip(self.pieces, self._gaps, strict=True):
            start, done = end + gap, 0
            while done < piece.numel():
                at = start + done
                if chunk.numel and (chunk.device != piece.device or at - first >= most):
                    yield first, chunk
                    first, chunk = first + chunk.numel, Bucket(piece.device, self.dtype)
                chunk.device = piece.device
                stop = min(piece.numel(), done + max(1, most - (at - first)))
                for number, part in enumerate(_run(piece, done, stop)):
                    chunk.add(part, at=None if number else at - first)
                done = stop
            end = start + piece.numel()
        if chunk.numel:
            yield first, chunk

    def distance2(self, memory: torch.Tensor) -> torch.Tensor:
        """Return the squared distance between the values and `memory`, in fp64."""
        values = torch.empty(self.numel, dtype=self.dtype, device=memory.device)
        self.pack(values)
        return values.sub_(memory[: self.numel]).square_().sum(dtype=torch.float64)

    def unpack(self, memory: torch.Tensor) -> None:
        """Copy the first `numel` elements of `memory` back into the tensors, in place."""
        torch._foreach_copy_(self.pieces, self.places_in(memory))

    @property
    def own_memory(self) -> torch.Tensor | None:
        """The memory of the tensor that is the whole bucket, if it is averaged where it is."""
        piece = self.pieces[0]
        able = self.alone and self._flat and len(self.pieces) == 1 and piece.is_contiguous()
        return piece if able and not piece.is_inference() else None

    def places_in(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """Return where each piece lies in `memory`, in its shape."""
        if self._spaced:
            places = list(self._gaps_and_places(memory)[1::2])
        else:
            places = list(memory[: self.numel].split_with_sizes(self.sizes))
        if self._flat:
            return places
        return [
            place if piece.ndim == 1 else place.view(piece.shape)
            for place, piece in zip(places, self.pieces, strict=True)
        ]


def cut(views: Sequence[torch.Tensor], device: torch.device, wire: torch.dtype, capacity: int) -> Iterator[Bucket]:
    """Fill buckets to the brim, in order: where they are cut depends on sizes alone, and is the same on every rank.

    >>> [bucket.numel for bucket in cut([torch.ones(5), torch.ones(2)], torch.device("cpu"), torch.float32, 3)]
    [3, 3, 1]
    """
    bucket = Bucket(device, wire)
    for view in views:
        start, numel = 0, view.numel()
        while start < numel:
            stop = min(numel, start + capacity - bucket.numel)
            for piece in _run(view, start, stop):
                bucket.add(piece)
            start = stop
            if bucket.numel == capacity:
                yield bucket
                bucket = Bucket(device, wire)
    if bucket.numel:
        yield bucket


def cut_alone(
    views: Sequence[torch.Tensor], device: torch.device, wire: torch.dtype, most: int, shared: Collection[int]
) -> Iterator[Bucket]:
    """Make every tensor one bucket, or several of one length if it is longer than `most`; by sizes alone, as `cut`.

    `shared` are the ids of the views that must not be averaged where they are.

    >>> [bucket.numel for bucket in cut_alone([torch.ones(5)], torch.device("cpu"), torch.float32, 3, ())]
    [3, 2]
    """
    for view in views:
        numel = view.numel()
        each = -(-numel // -(-numel // most))
        for start in range(0, numel, each):
            bucket = Bucket(device, wire, alone=id(view) not in shared)
            for piece in _run(view, start, min(numel, start + each)):
                bucket.add(piece)
            yield bucket


def overlapping(views: Sequence[torch.Tensor]) -> set[int]:
    """Return the ids of those views that may have memory in common with another one.

    >>> memory = torch.ones(6)
    >>> first, second, apart = memory[:3], memory[2:4], memory[4:]
    >>> overlapping([first, second, apart]) == {id(first), id(second)}
    True
    """
    found: set[int] = set()
    end, last = 0, 0
    for start, stop, view in sorted(map(_span, views)):
        if start < end:
            found |= {view, last}
        if stop > end:
            end, last = stop, view
    return found


def _span(view: torch.Tensor) -> tuple[int, int, int]:
    """Return where the memory of a view begins and ends, and the view's id."""
    steps = sum((size - 1) * stride for size, stride in zip(view.shape, view.stride(), strict=True))
    start = view.data_ptr()
    return start, start + (steps + 1) * view.element_size(), id(view)


def _run(view: torch.Tensor, start: int, stop: int) -> Iterator[torch.Tensor]:
    """Yield views that hold the elements from `start` to `stop`, in logical order: few ones, as large as can be."""
    if start == 0 and stop == view.numel():
        yield view
        return
    if view.ndim == 1:
        yield view[start:stop]
        return
    row = view.numel() // view.shape[0]
    first, last = -(-start // row), stop // row
    if first > last:  # within one row
        yield from _run(view[last], start - last * row, stop - last * row)
        return
    if start < first * row:
        yield from _run(view[first - 1], start - (first - 1) * row, row)
    if first < last:
        yield view[first:last]
    if last * row < stop:
        yield from _run(view[last], 0, stop - last * row)

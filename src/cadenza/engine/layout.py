"""How a fragment's parameters lie in flat tensors, and the memory that rounds use again."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence

import torch

from cadenza.common.streams import Moment, devices_of, empty_on_host, has_streams, keep_for_stream
from cadenza.engine.bucket import Bucket
from cadenza.engine.host_copies import HostCopies
from cadenza.engine.packing import Fragment, packed_shape

__all__ = ["Layout", "SpareMemory"]

_MOST_SPARE = 64 << 20  # bytes


class Layout:
    """A fragment's parameters as they lie in flat tensors ("strips"), now.

    Args:
        named: The parameters, by name.
        home: Where the flat tensors are, if not beside the parameters.
        align: Every tensor starts at a multiple of this many values; see `alignment` for where small ones share.
        copies: Makes the copies between parameters on a device and flat tensors on the host.
    """

    def __init__(
        self,
        named: Mapping[str, torch.Tensor],
        *,
        home: torch.device | None,
        align: int = 1,
        copies: HostCopies | None = None,
    ) -> None:
        self.names = names = list(named)
        # What names positions must not refer to this layout: memory in a circle stays until Python's collector comes.
        self.fragment = Fragment(list(named.values()), label=lambda i: f"parameter {names[i]}", names=names)
        self.strips, places = self.fragment.strips(home, align=align)
        self.places = {self.names[position]: place for position, place in places.items()}
        self._named = dict(named)
        self._copies = copies

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The devices with streams on which flat tensors are."""
        return tuple(strip.device for strip in self.strips if has_streams(strip.device))

    def pack(self, flats: Sequence[torch.Tensor] | None = None) -> Sequence[torch.Tensor]:
        """Return flat copies of the values, in the memory that is given or in new one."""
        flats = self.start_packing(flats)
        self.settle()
        return flats

    def start_packing(self, flats: Sequence[torch.Tensor] | None = None) -> Sequence[torch.Tensor]:
        """Return memory that has flat copies of the values after `settle`; the parameters may change at once."""
        flats = self.empty() if flats is None else flats
        for strip, flat in zip(self.strips, flats, strict=True):
            if (copies := self._copies_of(strip)) is not None:
                copies.to_host(strip, flat)
            else:
                strip.pack(flat)
        return flats

    def settle(self) -> None:
        """Wait until flat tensors on the host have what was packed, and may be changed after they were unpacked."""
        if self._copies is not None:
            self._copies.wait()

    def unpack(self, flats: Sequence[torch.Tensor]) -> None:
        """Write flat values into the parameters, in place."""
        for strip, flat in zip(self.strips, flats, strict=True):
            if (copies := self._copies_of(strip)) is not None:
                for pieces, [places] in copies.to_device(strip, flat):
                    torch._foreach_copy_(pieces, places)
            else:
                strip.unpack(flat)

    def pieces(self, *flats: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, ...]]:
        """Yield parameters' own memory together with its part of each of the flat values, on its device."""
        for i, strip in enumerate(self.strips):
            own = [values[i] for values in flats]
            if (copies := self._copies_of(strip)) is not None:
                for pieces, places in copies.to_device(strip, *own):
                    yield from zip(pieces, *places, strict=True)
            else:
                yield from zip(strip.pieces, *map(strip.places_in, own), strict=True)

    def _copies_of(self, strip: Bucket) -> HostCopies | None:
        """Return what copies between a strip on the host and its parameters, if some of them are on a device."""
        far = strip.device.type == "cpu" and bool(devices_of(strip.pieces))
        return self._copies if far else None

    def as_written(self, flats: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return flat values as the parameters would hold them: rounded, where parameters have less precision."""
        return [self._rounded(strip, flat) for strip, flat in zip(self.strips, flats, strict=True)]

    def _rounded(self, strip: Bucket, flat: torch.Tensor) -> torch.Tensor:
        if all(piece.dtype == flat.dtype for piece in strip.pieces):
            return flat
        rounded = flat.clone()
        for piece, place in zip(strip.pieces, strip.places_in(rounded), strict=True):
            place.copy_(place.to(piece.dtype))
        return rounded

    def slices(self, flats: Sequence[torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each parameter's name and its part of the flat values."""
        for name, (strip, where) in self.places.items():
            yield name, flats[strip][where]

    def shapes(self, strip: int) -> list[tuple[int, ...]]:
        """Return the shapes of the tensors in a strip, in their order; what is free between them is flat."""
        found: list[tuple[int, ...]] = []
        end = 0
        for name, (number, where) in self.places.items():
            if number == strip:
                found += [(where.start - end,)] if where.start > end else []
                found.append(packed_shape(self._named[name]))
                end = where.stop
        return found

    @property
    def filled(self) -> float:
        """The share of the flat values that are parameters', and not gaps between them."""
        whole = sum(strip.numel for strip in self.strips)
        return sum(sum(strip.sizes) for strip in self.strips) / whole if whole else 1.0

    def empty(self) -> list[torch.Tensor]:
        """Return memory for flat values."""
        return [self._empty(strip) for strip in self.strips]

    def _empty(self, strip: Bucket) -> torch.Tensor:
        if strip.device.type == "cpu":
            return empty_on_host(strip.numel, strip.dtype, pinned=self._copies_of(strip) is not None)
        return torch.empty(strip.numel, dtype=strip.dtype, device=strip.device)


class SpareMemory:
    """Memory that rounds no longer need, kept for later ones while it is little: new memory is slow at its first use.

    >>> spare, layout = SpareMemory(), Layout({"weight": torch.zeros(3)}, home=None)
    >>> [flat] = first = spare.borrow(layout)
    >>> spare.give_back(first); spare.borrow(layout)[0] is flat
    True
    """

    def __init__(self) -> None:
        self._kept: list[tuple[Sequence[torch.Tensor], Moment]] = []
        self._lock = threading.Lock()  # the background thread uses it too

    def borrow(self, layout: Layout) -> Sequence[torch.Tensor]:
        """Return flat memory for a round: what an earlier one has given back, or new one."""
        with self._lock:
            for i, (flats, free) in enumerate(self._kept):
                if len(flats) == len(layout.strips) and all(map(_fits, flats, layout.strips)):
                    free.wait()
                    keep_for_stream(flats)
                    return self._kept.pop(i)[0]
        return layout.empty()

    def copy(self, flats: Sequence[torch.Tensor], layout: Layout) -> Sequence[torch.Tensor]:
        """Return copies of a round's flat values, in such memory."""
        copies = self.borrow(layout)
        layout.settle()  # what was borrowed may still be copied to a device
        for copy, flat in zip(copies, flats, strict=True):
            copy.copy_(flat)
        return copies

    def give_back(self, flats: Sequence[torch.Tensor]) -> None:
        """Keep memory, unless that would be much."""
        with self._lock:
            every = (*(kept for kept, _ in self._kept), flats)
            if flats and sum(flat.nbytes for kept in every for flat in kept) <= _MOST_SPARE:
                self._kept.append((flats, Moment(devices_of(flats))))


def _fits(flat: torch.Tensor, strip: Bucket) -> bool:
    return flat.numel() == strip.numel and flat.dtype == strip.dtype and flat.device == strip.device

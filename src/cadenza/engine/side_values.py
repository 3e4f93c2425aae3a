"""Buffers and optimizer state in a round that may fail: copied at its launch, averaged with it, written at its landing.

Members need not hold the same: a worker that has just come has no optimizer state yet. Each tells what it has, and the
mean is that of those who have what most have; whoever has something else keeps it.
"""

from __future__ import annotations

import logging
import math
import struct
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from cadenza.codecs import fp32
from cadenza.common.norms import norm_squared
from cadenza.engine.collectives import take_largest
from cadenza.engine.exchange import exchange_mean
from cadenza.engine.layout import Layout
from cadenza.errors import TransportError, UnsupportedTensorError
from cadenza.transports import Transport

__all__ = ["SideValues"]

_logger = logging.getLogger("cadenza")
_OFFER = struct.Struct("<16sQQd")
_DTYPES = (torch.float32, torch.float64)
_DAMAGED = 2.0  # times what was told may be the norm of a mean; rounding makes less of it
_TINY = 1e-20


@dataclass(frozen=True)
class _Offer:
    """What a member tells of its values: of which tensors, how many of each precision, and their norm."""

    digest: bytes
    sizes: tuple[int, int]
    norm2: float

    def pack(self) -> bytes:
        return _OFFER.pack(self.digest, *self.sizes, self.norm2)

    @property
    def counts(self) -> bool:
        """Whether there is something, all of it finite."""
        return any(self.sizes) and math.isfinite(self.norm2)


class _Part:
    """Tensors of one kind, and flat copies of them."""

    def __init__(self, what: str, find: Callable[[], Layout]) -> None:
        self.what = what
        self._find = find
        layout = find()
        if layout.fragment.problem is not None:
            raise UnsupportedTensorError(f"The {what} cannot be averaged: {layout.fragment.problem}")
        self._digest = layout.fragment.digest
        self._flats = layout.start_packing()
        self._averaged = False

    def offer(self) -> _Offer:
        first, second = (sum(flat.numel() for flat in self._flats if flat.dtype == dtype) for dtype in _DTYPES)
        return _Offer(self._digest, (first, second), norm_squared(*self._flats))

    def exchange(self, offers: Sequence[_Offer], transport: Transport, shares: Sequence[float]) -> int:
        """Take the mean of what most have, if this member has the same; return how many bytes were sent."""
        usual = Counter(offer.digest for offer in offers if offer.counts).most_common(1)
        if not usual:
            return 0
        wanted = next(offer for offer in offers if offer.digest == usual[0][0])
        weights = _weights(offers, wanted.digest, shares)
        self._averaged = self._digest == wanted.digest
        nothing = (torch.zeros(size, dtype=dtype) for size, dtype in zip(wanted.sizes, _DTYPES, strict=True))
        own = self._flats if self._averaged else list(nothing)
        if not weights[transport.position]:
            for flat in own:
                flat.zero_()  # whatever it was: zero times NaN would be NaN on all members
        flats = sorted(own, key=lambda flat: flat.dtype.itemsize)
        sent = sum(exchange_mean(flat, transport, fp32(), weights=weights).bytes_sent for flat in flats)
        told = sum(weight * math.sqrt(offer.norm2) for weight, offer in zip(weights, offers, strict=True) if weight)
        if not math.sqrt(norm_squared(*flats)) <= _DAMAGED * told + _TINY:
            raise TransportError(f"The mean of the {self.what} is larger than what went into it: it is damaged.")
        return sent

    def write(self) -> None:
        if self._averaged and (layout := self._find()).fragment.digest == self._digest:
            layout.unpack(self._flats)


def _weights(offers: Sequence[_Offer], digest: bytes, shares: Sequence[float]) -> list[float]:
    """Return what each member counts: its share in the round, among those who have the same, all of it finite."""
    able = [offer.counts and offer.digest == digest for offer in offers]
    found = [share if counts else 0.0 for share, counts in zip(shares, able, strict=True)]
    found = found if any(found) else [float(counts) for counts in able]
    return [weight / sum(found) for weight in found]


class SideValues:
    """What is averaged beside the parameters of one round.

    Args:
        parts: Of what, with what finds it now.
        counters: Finds the integer tensors that take the largest value.
    """

    def __init__(
        self, parts: Mapping[str, Callable[[], Layout]], counters: Callable[[], Mapping[str, torch.Tensor]]
    ) -> None:
        self._parts = [_Part(what, find) for what, find in parts.items()]
        self._find_counters = counters
        self._counters = {name: counter.clone() for name, counter in counters().items()}

    @torch.no_grad()
    def exchange(self, transport: Transport, shares: Sequence[float]) -> int:
        """Exchange everything, with what each member counts in the round; return how many bytes were sent."""
        if len(transport.members) == 1:
            return 0
        offers = [part.offer() for part in self._parts]
        sent = 0
        if offers:
            mine = b"".join(offer.pack() for offer in offers)
            rows = [_unpacked(reply) for reply in transport.exchange(mine)()]
            sent += (len(rows) - 1) * len(mine)
            for part, told, own in zip(self._parts, zip(*rows, strict=True), offers, strict=True):
                if not math.isfinite(own.norm2):
                    _logger.warning("The %s of this worker are not finite; it takes the others'.", part.what)
                sent += part.exchange(told, transport, shares)
        return sent + take_largest(transport, self._counters)

    @torch.no_grad()
    def write(self) -> None:
        """Give the tensors their means, as they were at the launch, and the counters the largest value."""
        for part in self._parts:
            part.write()
        now = self._find_counters()
        for name, largest in self._counters.items():
            if name in now:  # it may have counted on since then
                now[name].copy_(torch.maximum(now[name], largest.to(now[name].device)))


def _unpacked(reply: bytes) -> list[_Offer]:
    return [_Offer(digest, (one, two), norm2) for digest, one, two, norm2 in _OFFER.iter_unpack(reply)]

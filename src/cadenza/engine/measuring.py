"""What is measured of a round: the same numbers on all members, so that all decide alike.

Sums over many values depend on the machine: on its threads and its instructions. So at the end of a round the members
exchange what they have measured. A norm that each could find by itself is the sum of what they find of parts of it.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from cadenza.common.norms import distance_squared, norm_squared
from cadenza.common.sketches import Sketch, spread_of
from cadenza.engine.header import Header
from cadenza.transports import Transport

__all__ = ["Measured", "Meter", "share"]

_LAYOUT = struct.Struct("<ddd")


@dataclass(frozen=True)
class Measured:
    """What is known of a round, as far as it was asked for.

    Attributes:
        spread2: The members' mean squared distance from their mean.
        mean2: The squared norm of the mean of what was sent, differences or values.
        size2: The squared norm of the mean of the values.

    >>> Measured(spread2=0.25, size2=25.0).drift
    0.1
    """

    spread2: float = 0.0
    mean2: float = 0.0
    size2: float = 0.0

    @property
    def drift(self) -> float:
        """How far the workers had moved apart: sqrt(mean‖x_i − mean x‖²) / ‖mean x‖."""
        return math.sqrt(max(0.0, self.spread2) / max(self.size2, 1e-300))


def share(transport: Transport, own: Measured, weights: Sequence[float], sketch: Sketch | None) -> tuple[Measured, int]:
    """Return what holds for all members of what each has measured, and how many bytes this one has sent.

    The spread is the weighted mean of the members' own or, with sketches, that of the vectors for which they stand. The
    norms of the mean are sums: each member has measured another part.
    """
    payload = _LAYOUT.pack(own.spread2, own.mean2, own.size2) + (sketch.pack() if sketch else b"")
    alone = len(transport.members) == 1
    payloads = [payload] if alone else transport.exchange(payload)()
    told = [Measured(*_LAYOUT.unpack(data[: _LAYOUT.size])) for data in payloads]
    if sketch is None:
        spread2 = math.fsum(weight * one.spread2 for weight, one in zip(weights, told, strict=True))
    else:
        spread2 = spread_of([data[_LAYOUT.size :] for data in payloads], weights)
    mean2, size2 = math.fsum(one.mean2 for one in told), math.fsum(one.size2 for one in told)
    return Measured(spread2, mean2, size2), (len(payloads) - 1) * len(payload)


@dataclass
class Meter:
    """Measures a round of flat values: what was sent is looked at by `begin`, the mean by `end`.

    Attributes:
        drift: Whether the drift is to be known.
        clip: Whether the norm of the mean is.
        exact: Whether the mean is as exact as the values; from another one no spread can be told, so it is estimated.
        anchors: Where the values are differences from, if they are.
        origins: Copies of the values, where they are no differences.
    """

    drift: bool = False
    clip: bool = False
    exact: bool = True
    anchors: Sequence[torch.Tensor] | None = None
    origins: Sequence[torch.Tensor] | None = None
    _sketch: Sketch | None = field(default=None, init=False)

    def start_sketch(self, values: Sequence[torch.Tensor]) -> Sketch | None:
        """Return a sketch, if one is needed, for whoever reads the values anyway to fill."""
        if self.drift and not self.exact:
            self._sketch = Sketch(sum(flat.numel() for flat in values))
        return self._sketch

    def forget(self) -> None:
        """Look at the values anew: they have changed since the sketch was filled."""
        self._sketch = None

    def begin(self, values: Sequence[torch.Tensor]) -> None:
        """Look at what this member is about to send, if nobody has yet."""
        if self._sketch is None and (sketch := self.start_sketch(values)) is not None:
            for flat in values:
                sketch.add(flat)

    def end(
        self,
        mean: Sequence[torch.Tensor],
        transport: Transport,
        headers: Sequence[Header],
        weights: Sequence[float],
        whole: Callable[[Measured], Measured] = lambda own: own,
    ) -> tuple[Measured, int]:
        """Return what holds for all members, now that they have the mean, and how many bytes this one has sent.

        `whole` makes of what was measured here what holds for the whole model.
        """
        if not (self.drift or self.clip):
            return Measured(), 0
        own = Measured(self._own_spread2(mean), self._mean2(mean, transport), self._size2(mean, transport))
        found, sent = share(transport, own, weights, self._sketch)
        found = whole(found)
        if self.anchors is None or self._sketch is not None or not self.drift:
            return found, sent
        norms = math.fsum(weight * header.norm2 for weight, header in zip(weights, headers, strict=True))
        return Measured(norms - found.mean2, found.mean2, found.size2), sent

    def _own_spread2(self, mean: Sequence[torch.Tensor]) -> float:
        if self.origins is None or self._sketch is not None:
            return 0.0
        return sum(distance_squared(flat, was) for flat, was in zip(mean, self.origins, strict=True))

    def _mean2(self, mean: Sequence[torch.Tensor], transport: Transport) -> float:
        wanted = self.clip or (self.anchors is not None and self._sketch is None)
        return norm_squared(*(_own_part(flat, transport) for flat in mean)) if wanted else 0.0

    def _size2(self, mean: Sequence[torch.Tensor], transport: Transport) -> float:
        if not self.drift:
            return 0.0
        parts = [_own_part(flat, transport) for flat in mean]
        if self.anchors is None:
            return norm_squared(*parts)
        anchors = [_own_part(anchor, transport) for anchor in self.anchors]
        return sum(distance_squared(anchor, delta) for anchor, delta in zip(anchors, parts, strict=True))


def _own_part(flat: torch.Tensor, transport: Transport) -> torch.Tensor:
    """Return the part of values, the same on all members, that this one measures for all."""
    size, place = -(-flat.numel() // len(transport.members)), transport.position
    return flat[place * size : (place + 1) * size]

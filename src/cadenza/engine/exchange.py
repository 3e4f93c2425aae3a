"""The mean of a flat run of values over a transport, in the codec's bytes: the only place where codec meets transport.

Exact values take the transport's own mean. Encoded ones are reduced by their owners: every member sends each other
member its share, encoded; the owner of a share decodes and sums them in fp32, encodes the mean once, in what the codec
has for the way back, and sends it to all, who decode the same bytes. Sparse ones are gathered whole and summed by
everybody alike.

Error feedback keeps what encoding lost: a member's own residual, and the residual of the mean of its share.
`Residual` holds both. They change in place, bucket by bucket, unless the round is atomic: then only when the caller
commits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from cadenza.codecs import Codec, CombiningCodec
from cadenza.common.norms import exact_square, norm_squared
from cadenza.engine.cutting import in_turn, padded, pipeline, put, rows_of, sparse_messages
from cadenza.engine.tally import Tally
from cadenza.errors import CadenzaError, TransportError
from cadenza.transports import Lane, Transport
from cadenza.transports.base import bytes_of

_SAMPLE = 1 << 16  # values by which it is told what encoding loses of all
_WINDOW = 1 << 10  # neighbours among them: few enough that every layer of a large model has some
_LARGEST = torch.finfo(torch.float32).max

__all__ = ["Exchanged", "Residual", "exchange_mean"]


@dataclass
class Exchanged:
    """What an exchange cost and lost.

    Attributes:
        bytes_sent: What was handed to the transport, on all stages of the way.
        encoded_bytes: What the codec made of this member's contribution; on a staged way, of the part that goes across.
        raw_bytes: The size of the same values as they were.
        error2: The squared norm of what encoding lost of some of them, 0 where the codec is exact.
        norm2: The squared norm of these values, 0 where the codec is exact.
    """

    bytes_sent: int = 0
    encoded_bytes: int = 0
    raw_bytes: int = 0
    error2: float = 0.0
    norm2: float = 0.0

    def add(self, other: Exchanged) -> None:
        """Count another exchange in."""
        self.bytes_sent += other.bytes_sent
        self.encoded_bytes += other.encoded_bytes
        self.raw_bytes += other.raw_bytes
        self.error2 += other.error2
        self.norm2 += other.norm2


class Residual:
    """What encoding has lost so far: of a member's own values, and of the mean of its share.

    An exchange leaves what it lost in `next_own` and `next_share`. They are the memory of `own` and `share` themselves,
    unless it was begun as an atomic one, of which nothing is to stay if it fails.
    """

    def __init__(self, own: torch.Tensor, share: torch.Tensor) -> None:
        self.own = self.next_own = own
        self.share = self.next_share = share

    @classmethod
    def zeros(cls, values: torch.Tensor, transport: Transport, codec: Codec) -> Residual:
        """Start with nothing lost."""
        rows = [] if codec.sparse else list(rows_of(values, transport, codec))
        share = torch.zeros(sum(row for _, row in rows), dtype=values.dtype, device=values.device)
        return cls(torch.zeros_like(values), share)

    @property
    def norm(self) -> float:
        """How much it is, at the most, of what will be sent."""
        return math.sqrt(norm_squared(self.own)) + math.sqrt(norm_squared(self.share))

    def begin(self, *, atomic: bool) -> None:
        """Make ready for an exchange."""
        self.next_own = torch.empty_like(self.own) if atomic else self.own
        self.next_share = torch.empty_like(self.share) if atomic else self.share

    def commit(self) -> None:
        """Take over what the last exchange left."""
        self.own, self.share = self.next_own, self.next_share

    def spread_share(self, transport: Transport, codec: Codec) -> torch.Tensor:
        """Return what was lost of the mean of this member's share, at the share's places among zeros."""
        found = torch.zeros_like(self.own)
        if not self.share.numel():
            return found
        rows = list(rows_of(self.own, transport, codec))
        for (start, row), part in zip(rows, self.share.split([row for _, row in rows]), strict=True):
            put(found, start + transport.position * row, part)
        return found

    def gather_shares(self, transport: Transport, codec: Codec) -> torch.Tensor:
        """Return what was lost of the mean of every member's share, where it lies; all members call this."""
        found, longest = torch.zeros_like(self.own), transport.row_bytes(self.own.device) // 4
        rows = list(rows_of(self.own, transport, codec))
        parts = [
            (start + at, row, part)
            for (start, row), share in zip(rows, self.share.split([row for _, row in rows]), strict=True)
            for at, part in zip(range(0, row, longest), share.split(longest), strict=True)
        ]

        def send(item: int, lane: Lane) -> None:
            part = bytes_of(parts[item][2])
            lane.gather(part.numel()).copy_(part)
            lane.launch_gather()

        def receive(item: int, lane: Lane) -> None:
            start, row, _ = parts[item]
            for member, part in enumerate(lane.gathered()):
                put(found, start + member * row, part.view(torch.float32))

        pipeline(in_turn(len(parts), transport, found.device), send, receive)
        return found

    def take_share(self, whole: torch.Tensor, transport: Transport, codec: Codec) -> None:
        """Take this member's share out of what `gather_shares` gave."""
        rows = rows_of(self.own, transport, codec)
        self.share.copy_(torch.cat([padded(whole, start + transport.position * row, row) for start, row in rows]))

    def clear(self) -> None:
        """Forget what was lost."""
        self.own.zero_()
        self.share.zero_()


def exchange_mean(
    values: torch.Tensor,
    transport: Transport,
    codec: Codec,
    *,
    weights: Sequence[float],
    residual: Residual | None = None,
    verify: bool = False,
) -> Exchanged:
    """Replace the values by their weighted sum over the members, in place; `weights` has one for each member.

    With `verify`, encoded messages that were damaged on their way are a TransportError.
    """
    done = Exchanged(raw_bytes=values.numel() * values.element_size())
    if not values.numel():
        return done
    if codec.exact:
        _exchange_exact(values, transport, weights[transport.position], done)
        return done
    way = (_Sparse if codec.sparse else _Encoded)(values, transport, codec, weights, residual, done)
    way.tally = Tally(len(transport.members), on=verify and len(transport.members) > 1)
    try:
        way.run()
    except (RuntimeError, ValueError, IndexError) as error:
        if verify and not isinstance(error, CadenzaError):  # of a damaged message places may lie outside
            raise TransportError(f"What was received cannot be decoded: it was damaged on its way. {error}") from error
        raise
    done.bytes_sent += way.tally.compare(transport)
    return done


def _exchange_exact(values: torch.Tensor, transport: Transport, weight: float, done: Exchanged) -> None:
    members = len(transport.members)
    done.encoded_bytes = done.raw_bytes
    done.bytes_sent = 2 * (members - 1) * done.raw_bytes // members
    if (factor := weight * members) != 1:
        values.mul_(factor)
    if members == 1:
        return
    parts = values.split(transport.capacity(values.device, values.dtype))

    def launch(item: int, lane: Lane) -> None:
        lane.outgoing(parts[item].numel(), values.dtype).copy_(parts[item])
        lane.launch()

    def land(item: int, lane: Lane) -> None:
        parts[item].copy_(lane.land())

    pipeline(in_turn(len(parts), transport, values.device), launch, lambda _, lane: lane.combine(), land)


class _Losses:
    """Squared norms of values and of what encoding lost of them, without waiting for a device before the end."""

    def __init__(self, device: torch.device) -> None:
        self._both = torch.zeros(2, dtype=torch.float64, device=device)

    def count(self, values: torch.Tensor, lost: torch.Tensor) -> None:
        self._both += torch.stack([exact_square(lost), exact_square(values)])

    def tell(self, done: Exchanged) -> None:
        done.error2, done.norm2 = self._both.tolist()


def _sample(values: torch.Tensor, unit: int) -> torch.Tensor:
    """Return some of the values, in windows that begin at multiples of `unit` and lie all over them."""
    width = -(-_WINDOW // unit) * unit
    count = max(8, _SAMPLE // width)
    if values.numel() <= count * width:
        return values.to(torch.float32)
    room = (values.numel() - width) // unit
    starts = [room * i // (count - 1) * unit for i in range(count)]
    return torch.cat([values[start : start + width] for start in starts]).to(torch.float32)


@dataclass
class _Way:
    """What an exchange of encoded values is about."""

    values: torch.Tensor
    transport: Transport
    codec: Codec
    weights: Sequence[float]
    residual: Residual | None
    done: Exchanged
    tally: Tally = field(default_factory=lambda: Tally(0, on=False))


@dataclass
class _Encoded(_Way):
    """Reduce by the owners of shares: encode → scatter → decode and sum → encode → gather → decode."""

    def __post_init__(self) -> None:
        values = self.values
        self._rows = list(rows_of(values, self.transport, self.codec))
        self._members = len(self.transport.members)
        self._losses = _Losses(values.device)
        # Fresh memory for every message would cost more time, in page faults, than what is done in it.
        longest = max(row for _, row in self._rows)
        self._one, self._two = torch.empty(2, longest, dtype=torch.float32, device=values.device)

    def run(self) -> None:
        self._sample_losses()
        lanes = in_turn(len(self._rows), self.transport, self.values.device)
        pipeline(lanes, self._send_shares, self._reduce_share, self._receive)
        self._losses.tell(self.done)

    def _sample_losses(self) -> None:
        """Tell by some values from all over what encoding loses of all."""
        values = _sample(self.values, self.codec.block)
        if self.residual is not None:
            values = values + _sample(self.residual.own, self.codec.block)
        data = torch.empty(self.codec.encoded_bytes(values.numel()), dtype=torch.uint8, device=values.device)
        self.codec.encode(values, data)
        back = _decoded(self.codec, data, torch.empty_like(values))
        self._losses.count(values, torch.sub(values, back, out=back))

    def _send_shares(self, item: int, lane: Lane) -> None:
        start, row = self._rows[item]
        size = self.codec.encoded_bytes(row)
        outgoing = lane.scatter(size)
        for member in range(self._members):
            at = start + member * row
            values = padded(self.values, at, row)
            if self.residual is not None:
                values = torch.add(values, padded(self.residual.own, at, row), out=self._one[:row])
                values.clamp_(-_LARGEST, _LARGEST)
            self.codec.encode(values, outgoing[member])
            if self.residual is not None:
                back = _decoded(self.codec, outgoing[member], self._two[:row])
                lost = torch.sub(values, back, out=back)
                put(self.residual.next_own, at, lost.mul_(self.codec.feedback or 0.0))
            self.tally.sent(member, outgoing[member])
        lane.launch_scatter()
        self.done.encoded_bytes += self._members * size
        self.done.bytes_sent += (self._members - 1) * (size + self.codec.back.encoded_bytes(row))

    def _reduce_share(self, item: int, lane: Lane) -> None:
        _, row = self._rows[item]
        total = self._one[:row].zero_()
        for member, (encoded, weight) in enumerate(zip(lane.scattered(), self.weights, strict=True)):
            self.tally.received(member, encoded)
            self.codec.decode_add(encoded, total, weight)
        at = sum(earlier for _, earlier in self._rows[:item])
        if self.residual is not None:
            total += self.residual.share[at : at + row]
        total.clamp_(-_LARGEST, _LARGEST)  # the shares of large values may add up to a little more
        outgoing = lane.gather(self.codec.back.encoded_bytes(row))
        self.codec.back.encode(total, outgoing)
        if self.residual is not None:
            back = _decoded(self.codec.back, outgoing, self._two[:row])
            lost = torch.sub(total, back, out=back)
            self.residual.next_share[at : at + row] = lost.mul_(self.codec.feedback or 0.0)
        self.tally.sent_to_all(outgoing)
        lane.launch_gather()

    def _receive(self, item: int, lane: Lane) -> None:
        start, row = self._rows[item]
        for member, encoded in enumerate(lane.gathered()):
            self.tally.received_by_all(member, encoded)
            at = start + member * row
            place = self.values[at : at + row]
            if place.dtype == torch.float32 and place.numel() == row:
                self.codec.back.decode(encoded, place)
            else:
                put(self.values, at, _decoded(self.codec.back, encoded, self._one[:row]))


def _decoded(codec: Codec, encoded: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    codec.decode(encoded, out)
    return out


@dataclass
class _Sparse(_Way):
    """Gather whole: a union of sparse contributions is summed by everybody, not made sparse again."""

    def __post_init__(self) -> None:
        cut = sparse_messages(self.values.numel(), self.codec, self.transport.row_bytes(self.values.device))
        sizes = [size for size, _ in cut]
        self._codecs = [codec for _, codec in cut]
        self._parts = self.values.split(sizes)
        self._own = self.residual.own.split(sizes) if self.residual else ()
        self._next_own = self.residual.next_own.split(sizes) if self.residual else ()
        self._losses = _Losses(self.values.device)

    def run(self) -> None:
        lanes = in_turn(len(self._parts), self.transport, self._parts[0].device)
        pipeline(lanes, self._send, self._receive)
        self._losses.tell(self.done)

    def _send(self, item: int, lane: Lane) -> None:
        values = self._parts[item].to(torch.float32)
        if self.residual is not None:
            values = (values + self._own[item]).clamp_(-_LARGEST, _LARGEST)
        codec = self._codecs[item]
        size = codec.encoded_bytes(values.numel())
        outgoing = lane.gather(size)
        codec.encode(values, outgoing)
        kept = torch.empty_like(values)
        codec.decode(outgoing, kept)
        lost = torch.sub(values, kept, out=kept)
        self._losses.count(values, lost)
        if self.residual is not None:
            self._next_own[item].copy_(lost.mul_(self.codec.feedback or 0.0))
        self.tally.sent_to_all(outgoing)
        lane.launch_gather()
        self.done.encoded_bytes += size
        self.done.bytes_sent += (len(self.weights) - 1) * size

    def _receive(self, item: int, lane: Lane) -> None:
        total = torch.zeros(self._parts[item].numel(), dtype=torch.float32, device=self._parts[item].device)
        codec, messages = self._codecs[item], list(lane.gathered())
        for member, encoded in enumerate(messages):
            self.tally.received_by_all(member, encoded)
        if isinstance(codec, CombiningCodec):
            codec.combine(messages, total, self.weights)
        else:
            for encoded, weight in zip(messages, self.weights, strict=True):
                codec.decode_add(encoded, total, weight)
        self._parts[item].copy_(total)

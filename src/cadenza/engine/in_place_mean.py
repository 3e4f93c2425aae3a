"""The mean of parameters in place: buckets go through the transport's lanes in a pipeline.

While one is on the wire the next is packed and the one before is unpacked, so only the lanes are extra memory. Large
tensors are averaged where they are, if the transport can: they need no packing, and no memory at all. An atomic round
collects everything in a scratch copy and changes the parameters after a vote in which every member took part.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from cadenza.common.norms import told
from cadenza.common.sketches import Sketch
from cadenza.engine.bucket import Bucket
from cadenza.engine.cutting import pipeline
from cadenza.engine.exchange import Exchanged
from cadenza.engine.header import HEADER_BYTES, Header
from cadenza.engine.measuring import Measured, share
from cadenza.engine.opening import Scales, abandoning, open_round, unsent
from cadenza.engine.packing import Fragment
from cadenza.engine.round_result import RoundResult
from cadenza.errors import (
    MixedParametersError,
    NothingToAverageError,
    RoundAbortedError,
    RoundError,
    TransportError,
    UnsupportedTensorError,
)
from cadenza.participants.vote import Vote
from cadenza.transports import Lane, Transport, connect

__all__ = ["average", "average_in_place"]

_NO_GRADIENT = (
    "There is nothing to average: none of the {} given parameters has a gradient. Averaging leaves out parameters "
    "whose grad is None, so call it after backward() and optimizer.step() and before zero_grad()."
)


def average(fragment: Fragment, group: dist.ProcessGroup, *, step: int = 0, atomic: bool = False) -> None:
    """Replace the fragment's values by their mean over the group, in place, on every member alike."""
    with torch.no_grad(), torch.profiler.record_function("cadenza::round"):
        try:
            transport = connect(group)
        except TransportError as error:
            raise unsent(step, error) from error
        average_in_place(fragment, transport, step=step, atomic=atomic, by_averager=True)


def average_in_place(
    fragment: Fragment,
    transport: Transport,
    header: Header | None = None,
    *,
    step: int = 0,
    atomic: bool = False,
    problem: str | None = None,
    scales: Scales | None = None,
    spread: bool = False,
    by_averager: bool = False,
) -> RoundResult:
    """Average a fragment in place over a transport.

    Args:
        fragment: What is averaged.
        transport: With whom.
        header: What the others are told, if it is more than the step.
        step: What ranks call the present, compared between them.
        atomic: Whether all or nothing is changed.
        problem: What keeps this member from taking part, if something does.
        scales: What each contribution counts; all alike by default.
        spread: Whether to measure how far the members were from the mean.
        by_averager: Whether an averager asks for it, not a synchronizer.
    """
    fragment.refuse_mesh_overlap(transport.members, transport.members[transport.position])
    header = header or Header(step, fragment.digest, able=True, atomic=atomic)
    scales = scales or Scales()
    number = transport.next_round()
    if len(transport.members) == 1:
        _check_content(fragment)
        size = _bytes(fragment.buckets(transport.capacity))
        return _result([header], scales, transport, Exchanged(0, size, size))
    started = time.perf_counter()
    work = _Pipeline(fragment, transport, spread=spread, in_place=not (header.atomic or spread))
    with abandoning(transport):
        headers = open_round(
            transport,
            header,
            problem=problem or fragment.problem,
            describe=fragment.describe,
            meanwhile=work.pack_first,
            by_averager=by_averager,
        )
    _check_content(fragment)
    result = _result(headers, scales, transport, Exchanged())
    work.scales = [weight * len(headers) for weight in result.weights]
    with abandoning(transport):
        if header.atomic:
            _land_together(work, transport, header.step, number)
        else:
            spread2 = _land_one_by_one(work, header.step)
    size = _bytes(work.buckets)
    result.exchanged = Exchanged(2 * (len(headers) - 1) * size // len(headers), size, size)
    result.exchanged.bytes_sent += (len(headers) - 1) * HEADER_BYTES
    if spread:
        own = Measured(spread2, size2=0.0 if transport.position else fragment.norm2())
        with abandoning(transport):
            result.measured, sent = share(transport, own, result.weights, work.sketch)
        result.exchanged.bytes_sent += sent
    result.wire_s = time.perf_counter() - started
    return result


def _result(headers: list[Header], scales: Scales, transport: Transport, exchanged: Exchanged) -> RoundResult:
    weighed, weights = scales.weigh(headers, transport.members)
    members = tuple(transport.members)
    return RoundResult(headers, weighed, weights, exchanged, members=members, position=transport.position)


class _Pipeline:
    """The buckets of a fragment on their way through the transport's lanes: pack and launch, combine, land.

    With `in_place`, large tensors are not packed where the transport can do without.
    """

    def __init__(self, fragment: Fragment, transport: Transport, *, spread: bool, in_place: bool) -> None:
        self._fragment = fragment
        self._transport = transport
        self._in_place = in_place
        self.buckets: list[Bucket] = []
        self._stations: list[Lane] = []
        self.spread = spread
        self.sketch: Sketch | None = None
        self.scales = [1.0] * len(transport.members)
        self.landed = 0
        self._packed = 0

    def pack_first(self) -> None:
        """Cut the fragment and pack the first bucket, which hides the exchange of headers."""
        if self._fragment.problem is None:
            self._cut(widen=False)
            if self.buckets:
                self._pack(0)

    def run(self, land: Callable[[int, torch.Tensor], object]) -> None:
        """Take every bucket through its stages; `land` gets its number and the mean of its values."""
        if any(scale != 1 for scale in self.scales) and self._narrow:
            self._cut(widen=True)  # weights are not lost in 16 bits

        def launch(number: int, lane: Lane) -> None:
            self._pack(number)
            lane.launch()

        def finish(number: int, lane: Lane) -> None:
            land(number, lane.land())
            self.landed += 1

        pipeline(self._stations, launch, lambda _, lane: lane.combine(), finish)

    def _cut(self, *, widen: bool) -> None:
        in_place = self._transport.in_place if self._in_place else None
        self.buckets = self._fragment.buckets(self._transport.capacity, widen=widen, in_place=in_place)
        # The mean of 16-bit values is rounded by as much as workers may be apart, and distances from it have that in.
        self.sketch = Sketch(self._fragment.numel) if self.spread and self._narrow else None
        self._stations = [_station(bucket, i, self._transport) for i, bucket in enumerate(self.buckets)]
        self._packed = 0

    def _pack(self, number: int) -> None:
        bucket = self.buckets[number]
        if number == self._packed:
            self._memory = self._fill(self._stations[number], bucket)
            self._packed += 1
            if self.sketch is not None:
                self.sketch.add(self._memory)
        scale = self.scales[self._transport.position]
        if scale == 0:
            self._memory.zero_()  # whatever it was: zero times NaN would be NaN on all members
        elif scale != 1:
            self._memory.mul_(scale)

    @property
    def _narrow(self) -> bool:
        return any(bucket.dtype.itemsize <= 2 for bucket in self.buckets)

    @staticmethod
    def _fill(lane: Lane, bucket: Bucket) -> torch.Tensor:
        """Give a lane the values of a bucket; return the memory that they travel in."""
        if (own := bucket.own_memory) is not None:
            lane.adopt(own)
            return own
        memory = lane.outgoing(bucket.numel, bucket.dtype)
        bucket.pack(memory)
        return memory


def _bytes(buckets: Sequence[Bucket]) -> int:
    return sum(bucket.numel * bucket.dtype.itemsize for bucket in buckets)


def _station(bucket: Bucket, number: int, transport: Transport) -> Lane:
    """Return the lane that a bucket uses; neighbours get different ones."""
    lanes = transport.lanes(bucket.device)
    return lanes[number % len(lanes)]


def _check_content(fragment: Fragment) -> None:
    """Refuse an empty round. All members hold the same, so all of them come to the same answer."""
    if fragment.problem is not None:
        raise UnsupportedTensorError(f"These parameters cannot be averaged: {fragment.problem}")
    if fragment.given == 0:
        raise NothingToAverageError("There is nothing to average: no parameter was given.")
    if fragment.taken == 0:
        raise NothingToAverageError(_NO_GRADIENT.format(fragment.given))


def _land_one_by_one(work: _Pipeline, step: int) -> float:
    distances: list[torch.Tensor] = []

    def land(number: int, mean: torch.Tensor) -> None:
        if work.spread and work.sketch is None:
            distances.append(work.buckets[number].distance2(mean))
        if work.buckets[number].own_memory is None:
            work.buckets[number].unpack(mean)

    try:
        work.run(land)
    except TransportError as error:
        raise MixedParametersError(
            f"The round at step {step} failed on its way: {work.landed} of {len(work.buckets)} buckets hold the mean, "
            "the others this rank's own values or, in large tensors, parts of a sum, and other ranks may have got "
            "further or less far. Restore the parameters from a checkpoint; atomic=True would have kept them. "
            f"{error}"
        ) from error
    return sum(told(distances))


def _land_together(work: _Pipeline, transport: Transport, step: int, number: int) -> None:
    vote = Vote(
        transport.store, f"cadenza/round/{number}", members=len(transport.members), timeout_s=transport.timeout_s
    )
    scratch: dict[int, torch.Tensor] = {}

    def land() -> None:
        for number, mean in scratch.items():
            work.buckets[number].unpack(mean)

    try:
        work.run(lambda number, mean: scratch.update({number: mean.clone()}))
    except BaseException as error:
        vote.abort()
        if isinstance(error, TransportError):
            raise _aborted(step, str(error)) from error
        raise
    try:
        committed = vote.ready()
    except TransportError as error:
        raise RoundError(f"The round at step {step} failed. {error}") from error
    except BaseException:  # Ctrl-C while waiting: the others may have gone on, and then so must we
        if vote.settle():
            land()
        raise
    if not committed:
        raise _aborted(step, "Another rank failed, or did not come to the vote in time.")
    land()


def _aborted(step: int, reason: str) -> RoundAbortedError:
    return RoundAbortedError(
        f"The round at step {step} failed; by a vote, the parameters are as they were on every rank. {reason}"
    )

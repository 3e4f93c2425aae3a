"""One round: header, pack, send, agree, land.

`open_round` exchanges headers; nothing is sent before all of them agree. Then there are two ways. `run_round`
averages parameters in place: buckets go through the transport's lanes in a pipeline, so that while one is on the wire
the next is packed and the one before is unpacked, and only the lanes are extra memory; an atomic round collects
everything in a scratch copy and changes the parameters after a vote in which every member took part. `fly` averages
flat copies, in any codec, while the parameters stay as they are until the caller lands the result.
"""

from __future__ import annotations

import math
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from cadenza.codecs import Codec
from cadenza.common.norms import distance_squared
from cadenza.engine.exchange import Exchanged, Residual, Stage, exchange_mean, exchange_staged, pipeline
from cadenza.engine.header import HEADER_BYTES, Header, Stance, disagreement
from cadenza.engine.packing import Bucket, Fragment
from cadenza.errors import (
    CadenzaError,
    DisagreementError,
    MixedParametersError,
    NotFiniteError,
    NothingToAverageError,
    RoundAbortedError,
    RoundError,
    TransportError,
    UnsupportedTensorError,
)
from cadenza.participants.vote import Vote
from cadenza.transports import Lane, Transport, connect

__all__ = [
    "Passage",
    "average",
    "fly",
    "mean_over",
    "open_round",
    "run_round",
    "shares",
]

_NO_GRADIENT = (
    "There is nothing to average: none of the {} given parameters has a gradient. Averaging leaves out parameters "
    "whose grad is None, so call it after backward() and optimizer.step() and before zero_grad()."
)


@dataclass
class Passage:
    """What a round was: who took part with which weight, and what it cost."""

    headers: list[Header]
    weights: list[float]
    exchanged: Exchanged = field(default_factory=Exchanged)
    wire_s: float = 0.0
    spread2: float = 0.0
    members: tuple[int, ...] = ()
    position: int = 0

    @property
    def weightless(self) -> bool:
        """Whether nobody had anything to add, as when all have run out of data; then all count alike."""
        return not any(header.weight for header in self.headers)


def average(fragment: Fragment, group: dist.ProcessGroup, *, step: int = 0, atomic: bool = False) -> None:
    """Replace the fragment's values by their mean over the group, in place, on every member alike."""
    with torch.no_grad(), torch.profiler.record_function("cadenza::round"):
        try:
            transport = connect(group)
        except TransportError as error:
            raise _unsent(step, error) from error
        run_round(fragment, transport, step=step, atomic=atomic)


def run_round(
    fragment: Fragment,
    transport: Transport,
    header: Header | None = None,
    *,
    step: int = 0,
    atomic: bool = False,
    problem: str | None = None,
    spread: bool = False,
) -> Passage:
    """Average a fragment in place over a transport; `spread` measures how far this member was from the mean."""
    fragment.refuse_mesh_overlap(transport.members, transport.members[transport.position])
    header = header or Header(step, fragment.digest, able=True, atomic=atomic)
    number = transport.next_round()
    if len(transport.members) == 1:
        _check_content(fragment)
        size = _bytes(fragment.buckets(transport.capacity))
        return Passage([header], [1.0], Exchanged(0, size, size))
    started = time.perf_counter()
    work = _Pipeline(fragment, transport)
    with _abandoning(transport):
        headers = open_round(
            transport,
            header,
            problem=problem or fragment.problem,
            describe=fragment.describe,
            meanwhile=work.pack_first,
        )
    _check_content(fragment)
    passage = Passage(headers, shares(headers))
    work.scale = passage.weights[transport.position] * len(headers)
    with _abandoning(transport):
        if header.atomic:
            _land_together(work, transport, header.step, number)
        else:
            spread2 = _land_one_by_one(work, header.step, spread)
            passage.spread2 = mean_over(transport, spread2, passage.weights) if spread else 0.0
    size = _bytes(work.buckets)
    passage.exchanged = Exchanged(2 * (len(headers) - 1) * size // len(headers), size, size)
    passage.exchanged.bytes_sent += (len(headers) - 1) * HEADER_BYTES
    passage.wire_s = time.perf_counter() - started
    return passage


def fly(
    values: Sequence[torch.Tensor],
    transport: Transport,
    header: Header,
    codec: Codec,
    *,
    problem: str | None,
    describe: Callable[[], list[str]],
    residuals: Sequence[Residual] | None = None,
    stage: Stage | None = None,
    normalise: bool = False,
    origins: Sequence[torch.Tensor] | None = None,
    judge: Callable[[list[Header]], list[Header]] | None = None,
) -> Passage:
    """Replace flat values by their weighted mean over the members; nothing but them and the residuals changes.

    Residuals change in place, or, in an atomic round, only when they are committed.

    With `normalise`, contributions are differences over unequal numbers of steps, and are put on an equal footing. With
    `origins`, copies of the values as they were, the members' mean squared distance from the mean is measured. `judge`
    may take the weight from contributions that would do harm, on all members alike.
    """
    started = time.perf_counter()
    transport.next_round()
    alone = len(transport.members) == 1
    with torch.no_grad(), torch.profiler.record_function("cadenza::fly"), _abandoning(transport):
        headers = [header] if alone else open_round(transport, header, problem=problem, describe=describe)
        if alone and problem is not None:
            raise NotFiniteError(problem)
        headers = headers if judge is None else judge(headers)
        passage = Passage(headers, shares(headers, normalise=normalise), members=tuple(transport.members))
        passage.position = transport.position
        passage.exchanged.bytes_sent += (len(headers) - 1) * HEADER_BYTES
        try:
            for i, flat in enumerate(values):
                residual = residuals[i] if residuals else None
                if residual is not None:
                    residual.begin(atomic=header.atomic)
                if stage is None:
                    done = exchange_mean(flat, transport, codec, weights=passage.weights, residual=residual)
                else:
                    inside = [passage.weights[transport.members.index(rank)] for rank in stage.inside.members]
                    done = exchange_staged(flat, stage, codec, weights=inside, residual=residual)
                passage.exchanged.add(done)
            if origins is not None:
                distance2 = sum(distance_squared(flat, was) for flat, was in zip(values, origins, strict=True))
                passage.spread2 = mean_over(transport, distance2, passage.weights)
        except TransportError as error:
            raise RoundAbortedError(
                f"The round at step {header.step} failed on its way; this rank's parameters are as they were, but "
                f"other ranks may have finished it. Restore all of them from a checkpoint. {error}"
            ) from error
    passage.wire_s = time.perf_counter() - started
    return passage


def open_round(
    transport: Transport,
    header: Header,
    *,
    problem: str | None,
    describe: Callable[[], list[str]],
    meanwhile: Callable[[], None] | None = None,
) -> list[Header]:
    """Exchange headers, and return them if every member is able and about to send the same.

    Otherwise all members raise the same error. `meanwhile` runs while the headers are under way.
    """
    header = Header(**{**header.__dict__, "able": problem is None})
    try:
        replies = transport.exchange(header.pack())
        if meanwhile is not None:
            meanwhile()
        headers = [Header.unpack(reply) for reply in replies()]
        if len({header.intent for header in headers}) == 1 and header.able:
            return headers
        raise _disagreement(transport, Stance(header.step, problem, describe(), header.atomic), headers)
    except TransportError as error:
        raise _unsent(header.step, error) from error


def shares(headers: Sequence[Header], *, normalise: bool = False) -> list[float]:
    """Return what each member's contribution counts, from the weights and steps in the headers.

    >>> shares([Header(0, b"", True, weight=3.0), Header(0, b"", True, weight=1.0)])
    [0.75, 0.25]
    """
    total = sum(header.weight for header in headers)
    weights = [header.weight / total if total else 1 / len(headers) for header in headers]
    if not normalise:
        return weights
    typical = sum(weight * header.steps for weight, header in zip(weights, headers, strict=True))
    return [weight * typical / max(1, header.steps) for weight, header in zip(weights, headers, strict=True)]


def mean_over(transport: Transport, number: float, weights: Sequence[float]) -> float:
    """Return the weighted mean of a number over the members: the same on all of them."""
    if len(transport.members) == 1:
        return number
    theirs = transport.exchange(struct.pack("<d", number))()
    numbers: list[float] = [struct.unpack("<d", data)[0] for data in theirs]
    return sum(weight * number for weight, number in zip(weights, numbers, strict=True))


class _Pipeline:
    """The buckets of a fragment on their way through the transport's lanes: pack and launch, combine, land."""

    def __init__(self, fragment: Fragment, transport: Transport) -> None:
        self._fragment = fragment
        self._transport = transport
        self.buckets: list[Bucket] = []
        self._stations: list[Lane] = []
        self.scale = 1.0
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
        if self.scale != 1 and any(bucket.dtype.itemsize <= 2 for bucket in self.buckets):
            self._cut(widen=True)  # weights are not lost in 16 bits

        def launch(number: int, lane: Lane) -> None:
            self._pack(number)
            lane.launch()

        def finish(number: int, lane: Lane) -> None:
            land(number, lane.land())
            self.landed += 1

        pipeline(self._stations, launch, lambda _, lane: lane.combine(), finish)

    def _cut(self, *, widen: bool) -> None:
        self.buckets = self._fragment.buckets(self._transport.capacity, widen=widen)
        self._stations = [_station(bucket, i, self._transport) for i, bucket in enumerate(self.buckets)]
        self._packed = 0

    def _pack(self, number: int) -> None:
        bucket = self.buckets[number]
        if number == self._packed:
            self._memory = self._stations[number].outgoing(bucket.numel, bucket.dtype)
            bucket.pack(self._memory)
            self._packed += 1
        if self.scale != 1:
            self._memory.mul_(self.scale)


def _bytes(buckets: Sequence[Bucket]) -> int:
    return sum(bucket.numel * bucket.dtype.itemsize for bucket in buckets)


def _station(bucket: Bucket, number: int, transport: Transport) -> Lane:
    """Return the lane that a bucket uses; neighbours get different ones."""
    lanes = transport.lanes(bucket.device)
    return lanes[number % len(lanes)]


@contextmanager
def _abandoning(transport: Transport) -> Iterator[None]:
    """Give the transport up when a round breaks off, whatever the reason: its members are out of step."""
    try:
        yield
    except (DisagreementError, NotFiniteError, UnsupportedTensorError):
        raise  # found by all members alike, so they are still in step
    except BaseException:
        transport.abandon()
        raise


def _disagreement(transport: Transport, stance: Stance, headers: Sequence[Header]) -> CadenzaError:
    """Collect every member's side and return the error that all of them raise."""
    mine = stance.pack()
    sizes = transport.exchange(len(mine).to_bytes(8, "little"))()
    longest = max(int.from_bytes(size, "little") for size in sizes)
    replies = transport.exchange(mine.ljust(longest))()
    stances = dict(zip(transport.members, map(Stance.unpack, replies), strict=True))
    text = f"{disagreement(stances)} Nothing was sent and no parameter was changed."
    if not any(stance.problem for stance in stances.values()):
        return DisagreementError(text)
    poisoned = any(not math.isfinite(header.norm2) for header in headers)
    return NotFiniteError(text) if poisoned else UnsupportedTensorError(text)


def _check_content(fragment: Fragment) -> None:
    """Refuse an empty round. All members hold the same, so all of them come to the same answer."""
    if fragment.problem is not None:
        raise UnsupportedTensorError(f"These parameters cannot be averaged: {fragment.problem}")
    if fragment.given == 0:
        raise NothingToAverageError("There is nothing to average: no parameter was given.")
    if fragment.taken == 0:
        raise NothingToAverageError(_NO_GRADIENT.format(fragment.given))


def _land_one_by_one(work: _Pipeline, step: int, spread: bool) -> float:
    distances: list[torch.Tensor] = []

    def land(number: int, mean: torch.Tensor) -> None:
        if spread:
            distances.append(work.buckets[number].distance2(mean))
        work.buckets[number].unpack(mean)

    try:
        work.run(land)
    except TransportError as error:
        raise MixedParametersError(
            f"The round at step {step} failed on its way: {work.landed} of {len(work.buckets)} buckets hold the mean, "
            "the others this rank's own values, and other ranks may have got further or less far. Restore the "
            f"parameters from a checkpoint; atomic=True would have kept them. {error}"
        ) from error
    return sum(float(distance) for distance in distances)


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


def _unsent(step: int, error: TransportError) -> RoundAbortedError:
    return RoundAbortedError(
        f"The round at step {step} failed before any value was sent; the parameters are as they were. {error}"
    )


def _aborted(step: int, reason: str) -> RoundAbortedError:
    return RoundAbortedError(
        f"The round at step {step} failed; by a vote, the parameters are as they were on every rank. {reason}"
    )

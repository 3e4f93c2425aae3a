"""One round: header, pack, send, agree, land.

Buckets go through the transport's lanes in a pipeline: while one is on the wire, the next is packed and the one
before is unpacked. Nothing is sent before all headers agree. By default a bucket's mean goes into the parameters as
soon as it is there, so that only the lanes are extra memory; an atomic round collects everything in a scratch copy
and changes the parameters after a vote in which every member took part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from cadenza.agreement import Header, Stance, Vote, disagreement
from cadenza.errors import (
    CadenzaError,
    DisagreementError,
    MixedParametersError,
    NothingToAverageError,
    RoundAbortedError,
    TransportError,
    UnsupportedTensorError,
)
from cadenza.fragments import Bucket, Fragment
from cadenza.transports import Lane, Transport, connect

__all__ = ["average", "run_round"]

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
            raise _unsent(step, error) from error
        run_round(fragment, transport, step=step, atomic=atomic)


def run_round(fragment: Fragment, transport: Transport, *, step: int = 0, atomic: bool = False) -> None:
    """Run one round of a fragment over a transport."""
    fragment.refuse_mesh_overlap(transport.members, transport.members[transport.position])
    number = transport.next_round()
    if len(transport.members) == 1:
        _check_content(fragment)
        return
    with _abandoning(transport):
        work = _open(fragment, transport, step)
    _check_content(fragment)
    with _abandoning(transport):
        if atomic:
            _land_together(work, transport, step, number)
        else:
            _land_one_by_one(work, step)


@contextmanager
def _abandoning(transport: Transport) -> Iterator[None]:
    """Give the transport up when a round breaks off, whatever the reason: its members are out of step."""
    try:
        yield
    except (DisagreementError, UnsupportedTensorError):
        raise  # found by all members alike, so they are still in step
    except BaseException:
        transport.abandon()
        raise


def _open(fragment: Fragment, transport: Transport, step: int) -> _Pipeline:
    """Exchange headers while the first bucket is packed, and go on only if all members are about to send the same."""
    header = Header(step, fragment.digest, able=fragment.problem is None)
    try:
        replies = transport.exchange(header.pack())
        work = _Pipeline(fragment, transport)
        work.pack_first()
        headers = [Header.unpack(reply) for reply in replies()]
        if len(set(headers)) > 1 or not header.able:
            raise _disagreement(fragment, transport, step)
    except TransportError as error:
        raise _unsent(step, error) from error
    return work


def _disagreement(fragment: Fragment, transport: Transport, step: int) -> CadenzaError:
    """Collect every member's side and return the error that all of them raise."""
    mine = Stance(step, fragment.problem, fragment.describe()).pack()
    sizes = transport.exchange(len(mine).to_bytes(8, "little"))()
    longest = max(int.from_bytes(size, "little") for size in sizes)
    replies = transport.exchange(mine.ljust(longest))()
    stances = dict(zip(transport.members, map(Stance.unpack, replies), strict=True))
    unable = any(stance.problem for stance in stances.values())
    kind = UnsupportedTensorError if unable else DisagreementError
    return kind(f"{disagreement(stances)} Nothing was sent and no parameter was changed.")


def _check_content(fragment: Fragment) -> None:
    """Refuse an empty round. All members hold the same, so all of them come to the same answer."""
    if fragment.problem is not None:
        raise UnsupportedTensorError(f"These parameters cannot be averaged: {fragment.problem}")
    if fragment.given == 0:
        raise NothingToAverageError("There is nothing to average: no parameter was given.")
    if fragment.taken == 0:
        raise NothingToAverageError(_NO_GRADIENT.format(fragment.given))


def _land_one_by_one(work: _Pipeline, step: int) -> None:
    try:
        work.run(lambda number, mean: work.buckets[number].unpack(mean))
    except TransportError as error:
        raise MixedParametersError(
            f"The round at step {step} failed on its way: {work.landed} of {len(work.buckets)} buckets hold the mean, "
            "the others this rank's own values, and other ranks may have got further or less far. Restore the "
            f"parameters from a checkpoint; atomic=True would have kept them. {error}"
        ) from error


def _land_together(work: _Pipeline, transport: Transport, step: int, number: int) -> None:
    vote = Vote(
        transport.store, f"cadenza/round/{number}", members=len(transport.members), timeout_s=transport.timeout_s
    )
    try:
        scratch = [torch.empty(bucket.numel, dtype=bucket.dtype, device=bucket.device) for bucket in work.buckets]
        work.run(lambda number, mean: scratch[number].copy_(mean))
    except BaseException as error:
        vote.abort()
        if isinstance(error, TransportError):
            raise _aborted(step, str(error)) from error
        raise
    if not vote.ready():
        raise _aborted(step, "Another rank failed, or did not come to the vote in time.")
    for bucket, mean in zip(work.buckets, scratch, strict=True):
        bucket.unpack(mean)


def _unsent(step: int, error: TransportError) -> RoundAbortedError:
    return RoundAbortedError(
        f"The round at step {step} failed before any value was sent; the parameters are as they were. {error}"
    )


def _aborted(step: int, reason: str) -> RoundAbortedError:
    return RoundAbortedError(
        f"The round at step {step} failed; by a vote, the parameters are as they were on every rank. {reason}"
    )


class _Pipeline:
    """The buckets of a fragment on their way through the transport's lanes: pack and launch, combine, land."""

    def __init__(self, fragment: Fragment, transport: Transport) -> None:
        able = fragment.problem is None
        self.buckets = fragment.buckets(transport.capacity) if able else []
        self._stations = [_station(bucket, i, transport) for i, bucket in enumerate(self.buckets)]
        self.landed = 0
        self._packed = 0

    def pack_first(self) -> None:
        """Pack the first bucket, which hides the exchange of headers."""
        if self.buckets:
            self._pack(0)

    def run(self, land: Callable[[int, torch.Tensor], object]) -> None:
        """Take every bucket through its stages; `land` gets its number and the mean of its values."""
        count = len(self.buckets)
        for tick in range(count + 2):
            if tick < count:
                self._pack(tick)
                self._stations[tick].launch()
            if 0 <= tick - 1 < count:
                self._stations[tick - 1].combine()
            if 0 <= tick - 2 < count:
                land(tick - 2, self._stations[tick - 2].land())
                self.landed += 1

    def _pack(self, number: int) -> None:
        if number == self._packed:
            bucket = self.buckets[number]
            bucket.pack(self._stations[number].outgoing(bucket.numel, bucket.dtype))
            self._packed += 1


def _station(bucket: Bucket, number: int, transport: Transport) -> Lane:
    """Return the lane that a bucket uses; neighbours get different ones."""
    lanes = transport.lanes(bucket.device)
    return lanes[number % len(lanes)]

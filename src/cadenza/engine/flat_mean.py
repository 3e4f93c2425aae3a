"""The mean of flat copies, in any codec, while the parameters stay as they are until the result lands."""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from zlib import crc32

import torch

from cadenza.codecs import Codec, fp32
from cadenza.common.norms import norm_squared
from cadenza.engine.exchange import Exchanged, Residual, exchange_mean
from cadenza.engine.header import HEADER_BYTES, Header
from cadenza.engine.inside import measured_of_replica
from cadenza.engine.measuring import Meter
from cadenza.engine.opening import Scales, abandoning, open_round, text_of_first
from cadenza.engine.round_result import RoundResult
from cadenza.engine.staged_exchange import exchange_parts, exchange_staged
from cadenza.errors import NotFiniteError, RoundAbortedError, TransportError
from cadenza.participants.level_group import LevelGroup
from cadenza.transports import Transport

__all__ = ["FlatRound", "average_flat"]

_LOSSY = 4.0  # times its norm may be what a codec makes of a contribution
_FED_BACK = 1e3  # where what was lost in earlier rounds is added
_TINY = 1e-20


@dataclass
class FlatRound:
    """What is averaged, and how.

    Attributes:
        values: The flat values; the mean, afterwards.
        codecs: How each of them is written.
        residuals: What encoding has lost so far, where it is fed back. They change in place or, in an atomic round,
            only when they are committed.
        scales: What each contribution counts.
        exact: More flat values, averaged as they are, all members alike.
        inner_lrs: The learning rates that the outer update uses; the first member's, should members differ.
        meter: Measures what is to be known of the round.
        make_equal: Called before anything is sent, on all members, if their anchors are not the same bits, with the
            position of the member whose anchor all take.
        more: Exchanges what is averaged beside the values, with each member's share, and returns the bytes sent.
    """

    values: Sequence[torch.Tensor]
    codecs: Sequence[Codec]
    scales: Scales
    residuals: Sequence[Residual] | None = None
    exact: Sequence[torch.Tensor] = ()
    inner_lrs: dict[str, float] = field(default_factory=dict)
    meter: Meter = field(default_factory=Meter)
    make_equal: Callable[[int], None] | None = None
    more: Callable[[Transport, Sequence[float]], int] | None = None

    @property
    def lr_mark(self) -> int:
        """A number that tells learning rates apart."""
        return crc32(json.dumps(self.inner_lrs, sort_keys=True).encode())


def average_flat(
    work: FlatRound, group: LevelGroup, header: Header, *, problem: str | None, describe: Callable[[], list[str]]
) -> RoundResult:
    """Replace flat values by their weighted mean over the members; nothing but them and the residuals changes.

    Args:
        work: What is averaged.
        group: With whom.
        header: What the others are told.
        problem: What keeps this member from taking part, if something does.
        describe: Says what this member holds, a line a tensor, should the members disagree.
    """
    started = time.perf_counter()
    transport = group.transport
    transport.next_round()
    alone = len(transport.members) == 1
    with torch.no_grad(), torch.profiler.record_function("cadenza::average_flat"), abandoning(transport):
        headers = [header] if alone else open_round(transport, header, problem=problem, describe=describe)
        if alone and problem is not None:
            raise NotFiniteError(problem)
        weighed, weights = work.scales.weigh(headers, transport.members)
        members = tuple(transport.members)
        result = RoundResult(headers, weighed, weights, members=members, position=transport.position)
        result.exchanged.bytes_sent += (len(headers) - 1) * HEADER_BYTES
        try:
            if len({header.lr_mark for header in headers}) > 1:
                work.inner_lrs = json.loads(text_of_first(transport, json.dumps(work.inner_lrs)))
            if work.make_equal is not None and len({header.anchor for header in headers}) > 1:
                work.make_equal(_commonest_anchor(headers))
            work.meter.begin(work.values)
            _exchange(work, group, header, result)
        except TransportError as error:
            raise RoundAbortedError(
                f"The round at step {header.step} failed on its way; this rank's parameters are as they were, but "
                f"other ranks may have finished it. Restore all of them from a checkpoint. {error}"
            ) from error
    result.wire_s = time.perf_counter() - started
    return result


def _commonest_anchor(headers: Sequence[Header]) -> int:
    """Return the first member that has the anchor of most, so that one that was damaged does not spread."""
    counts = Counter(header.anchor for header in headers if not header.faulty)
    return max(range(len(headers)), key=lambda i: (not headers[i].faulty, counts[headers[i].anchor], -i))


def _exchange(work: FlatRound, group: LevelGroup, header: Header, result: RoundResult) -> None:
    transport = group.transport
    for i, flat in enumerate(work.values):
        residual = work.residuals[i] if work.residuals else None
        if residual is not None:
            residual.begin(atomic=header.atomic)
        result.exchanged.add(_mean(flat, group, work.codecs[i], result.weights, residual, verify=header.atomic))
    if header.atomic:
        _check_result(work, result)
    for flat in work.exact:
        result.exchanged.add(exchange_mean(flat, transport, fp32(), weights=_equal(transport)))
    if work.more is not None:
        result.exchanged.bytes_sent += work.more(transport, result.weighed.shares)
    whole = partial(measured_of_replica, island=group.island)
    result.measured, sent = work.meter.end(work.values, transport, result.headers, result.weights, whole)
    result.exchanged.bytes_sent += sent


def _check_result(work: FlatRound, result: RoundResult) -> None:
    """Refuse a mean that cannot be that of what the headers tell: it was damaged on its way, or a member lied."""
    norm = math.sqrt(norm_squared(*work.values))
    told = sum(abs(w) * math.sqrt(h.norm2) for w, h in zip(result.weights, result.headers, strict=True))
    times = _FED_BACK if work.residuals else _LOSSY
    # What was lost before is sent as well; where nobody has moved since, it is all that is. Members owe much alike.
    told += math.sqrt(norm_squared(*(lost for one in work.residuals or () for lost in (one.own, one.share))))
    if not norm <= times * told + _TINY:
        raise TransportError(f"The mean has a norm of {norm:.3g}, where contributions have {told:.3g}: it is damaged.")


def _mean(
    flat: torch.Tensor,
    group: LevelGroup,
    codec: Codec,
    weights: Sequence[float],
    residual: Residual | None,
    *,
    verify: bool,
) -> Exchanged:
    transport, stage = group.transport, group.stage
    if stage is None:
        return exchange_mean(flat, transport, codec, weights=weights, residual=residual, verify=verify)
    if stage.alike:
        part_of = partial(exchange_mean, transport=transport, codec=codec, weights=weights, residual=residual)
        mean_of = partial(part_of, verify=verify)
        return exchange_parts(flat, stage, codec, lambda part: group.island.rounds.agree(lambda: mean_of(part)))
    inside = [weights[transport.members.index(rank)] for rank in stage.inside.members]
    return exchange_staged(flat, stage, codec, weights=inside, residual=residual, verify=verify)


def _equal(transport: Transport) -> list[float]:
    members = len(transport.members)
    return [1 / members] * members

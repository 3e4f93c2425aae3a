"""The mean over groups of groups: reduce inside, exchange across in the codec's bytes, gather inside.

So a site of several hosts sends the model once, and not once for each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from cadenza.codecs import Codec
from cadenza.engine.cutting import in_turn, padded, pipeline, plain_rows, put
from cadenza.engine.exchange import Exchanged, Residual, exchange_mean
from cadenza.participants.level_group import Stage
from cadenza.transports import Lane, Transport

__all__ = ["exchange_parts", "exchange_staged", "spread_part", "stage_part"]


def exchange_staged(
    values: torch.Tensor,
    stage: Stage,
    codec: Codec,
    *,
    weights: Sequence[float],
    residual: Residual | None = None,
    verify: bool = False,
) -> Exchanged:
    """Replace the values by their weighted sum over all groups, in place; `weights` has one for each inside member.

    With `verify`, encoded messages that were damaged on their way across are a TransportError.
    """
    done = Exchanged()
    if not values.numel():
        return done
    part = _reduce_scatter(values, stage.inside, codec, weights, done)
    equal = [1.0] * len(stage.across.members)
    across = exchange_mean(part, stage.across, codec, weights=equal, residual=residual, verify=verify)
    _all_gather(part, values, stage.inside, codec, done)
    done.add(across)
    return done


def exchange_parts(
    values: torch.Tensor, stage: Stage, codec: Codec, exchange: Callable[[torch.Tensor], Exchanged]
) -> Exchanged:
    """Replace values that all inside hold alike by their mean over all groups, in place, each a part of them.

    `exchange` replaces this member's part by the mean; it raises on all inside, if it does on one.
    """
    if not values.numel():
        return Exchanged()
    rows = list(plain_rows(values, stage.inside, codec))
    part = torch.cat([padded(values, start + stage.inside.position * row, row, values.dtype) for start, row in rows])
    done = exchange(part)
    _all_gather(part, values, stage.inside, codec, done)
    return done


def stage_part(values: torch.Tensor, stage: Stage, codec: Codec) -> torch.Tensor:
    """Return memory like the part of the values that this member exchanges across."""
    return values.new_empty(sum(row for _, row in plain_rows(values, stage.inside, codec)))


def spread_part(part: torch.Tensor, values: torch.Tensor, stage: Stage, codec: Codec) -> torch.Tensor:
    """Return the part that this member exchanges across, at its places among zeros."""
    found = torch.zeros_like(values)
    rows = list(plain_rows(values, stage.inside, codec))
    for (start, row), piece in zip(rows, part.split([row for _, row in rows]), strict=True):
        put(found, start + stage.inside.position * row, piece)
    return found


def _reduce_scatter(
    values: torch.Tensor, transport: Transport, codec: Codec, weights: Sequence[float], done: Exchanged
) -> torch.Tensor:
    """Return this member's part of the weighted sum over the members."""
    rows = list(plain_rows(values, transport, codec))
    part = values.new_empty(sum(row for _, row in rows))
    parts = part.split([row for _, row in rows])
    members = len(transport.members)

    def send(item: int, lane: Lane) -> None:
        start, row = rows[item]
        outgoing = lane.scatter(row * values.element_size()).view(values.dtype)
        for member in range(members):
            outgoing[member].copy_(padded(values, start + member * row, row, values.dtype))
        lane.launch_scatter()
        done.bytes_sent += (members - 1) * row * values.element_size()

    def reduce(item: int, lane: Lane) -> None:
        received = lane.scattered().view(values.dtype)
        torch.mul(received[0], weights[0], out=parts[item])
        for member in range(1, members):
            parts[item].add_(received[member] * weights[member])

    pipeline(in_turn(len(rows), transport, values.device), send, reduce)
    transport.exchange(b"\0")()  # nobody packs anew before all have used what they got
    return part


def _all_gather(part: torch.Tensor, values: torch.Tensor, transport: Transport, codec: Codec, done: Exchanged) -> None:
    """Give every member the parts of all."""
    rows = list(plain_rows(values, transport, codec))
    parts = part.split([row for _, row in rows])
    members = len(transport.members)

    def send(item: int, lane: Lane) -> None:
        _, row = rows[item]
        lane.gather(row * values.element_size()).view(values.dtype).copy_(parts[item])
        lane.launch_gather()
        done.bytes_sent += (members - 1) * row * values.element_size()

    def receive(item: int, lane: Lane) -> None:
        start, row = rows[item]
        for member, received in enumerate(lane.gathered().view(values.dtype)):
            put(values, start + member * row, received)

    pipeline(in_turn(len(rows), transport, values.device), send, receive)

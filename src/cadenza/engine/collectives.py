"""What a group does together besides rounds of parameters: plain means, largest counters, one start for all."""

from __future__ import annotations

import struct
from collections.abc import Mapping

import torch

from cadenza.common.checksums import checksum
from cadenza.engine.header import HEADER_BYTES, Header
from cadenza.engine.in_place_mean import average_in_place
from cadenza.engine.opening import abandoning, open_round
from cadenza.engine.packing import Fragment, local_part, wire_dtype
from cadenza.errors import TopologyError
from cadenza.transports import Transport

__all__ = ["average_tensors", "differing", "take_from_first", "take_largest"]


@torch.no_grad()
def average_tensors(
    transport: Transport,
    tensors: Mapping[str, torch.Tensor],
    *,
    step: int,
    what: str,
    weight: float = 1.0,
    may_be_none: bool = False,
) -> int:
    """Replace tensors by their mean over the members, weighted by what each says, in place; return the bytes sent.

    `what` they are, such as "gradient of", goes before their names: members that are about to average other things of
    the same names and shapes are found out, and told so. Where some members may have tensors and others none
    (`may_be_none`), they find out by asking.
    """
    if len(transport.members) == 1 or not (tensors or may_be_none):
        return 0
    fragment = _fragment(tensors, what)
    header = Header(step, fragment.digest, able=True, weight=weight)
    if tensors:
        return average_in_place(fragment, transport, header).exchanged.bytes_sent
    transport.next_round()
    with abandoning(transport):
        open_round(transport, header, problem=None, describe=fragment.describe)
    return (len(transport.members) - 1) * HEADER_BYTES


def differing(transport: Transport, tensors: Mapping[str, torch.Tensor]) -> str | None:
    """Return the name of a tensor of which members hold different values; None if there is none."""
    if len(transport.members) == 1 or not tensors:
        return None
    sums = b"".join(struct.pack("<Q", checksum(local_part(tensor))) for tensor in tensors.values())
    theirs = transport.exchange(sums)()
    names = list(tensors)
    rows = [struct.unpack(f"<{len(names)}Q", reply) for reply in theirs]
    return next((name for name, *found in zip(names, *rows, strict=True) if len(set(found)) > 1), None)


@torch.no_grad()
def take_largest(transport: Transport, counters: Mapping[str, torch.Tensor]) -> int:
    """Give integer tensors the largest value that any member has; return the bytes sent."""
    if not counters or len(transport.members) == 1:
        return 0
    mine = torch.cat([counter.reshape(-1).to("cpu", torch.int64) for counter in counters.values()])
    replies = transport.exchange(bytes(mine.view(torch.uint8).tolist()))()
    largest = torch.stack([torch.frombuffer(bytearray(reply), dtype=torch.int64) for reply in replies]).amax(0)
    parts = largest.split([counter.numel() for counter in counters.values()])
    for counter, part in zip(counters.values(), parts, strict=True):
        counter.copy_(part.view(counter.shape))
    return (len(transport.members) - 1) * mine.nbytes


@torch.no_grad()
def take_from_first(transport: Transport, tensors: Mapping[str, torch.Tensor]) -> None:
    """Give tensors the values that the first member has, in place."""
    averageable = {name: tensor for name, tensor in tensors.items() if wire_dtype(tensor.dtype) is not None}
    fragment = _fragment(averageable)
    fragment.refuse_mesh_overlap(transport.members, transport.members[transport.position])
    if fragment.problem is not None:
        raise TopologyError(fragment.problem)
    if len(transport.members) == 1:
        return
    for name, tensor in tensors.items():
        if name not in averageable:
            memory = tensor.contiguous()
            transport.broadcast(memory, source=0)
            tensor.copy_(memory)
    for bucket in fragment.buckets(transport.capacity):
        memory = torch.empty(bucket.numel, dtype=bucket.dtype, device=bucket.device)
        bucket.pack(memory)
        transport.broadcast(memory, source=0)
        bucket.unpack(memory)


def _fragment(tensors: Mapping[str, torch.Tensor], what: str = "tensor") -> Fragment:
    names = [f"{what} {name}" for name in tensors]
    return Fragment(list(tensors.values()), label=lambda i: names[i], names=names)

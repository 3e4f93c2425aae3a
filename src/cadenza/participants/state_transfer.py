"""How a worker takes the state that the others share: anchors, outer state, step and schedules, over a process group.

JSON travels as bytes and tensors as bytes; nothing that comes over the network is unpickled. All of it is received and
checked before any of it is used. What the worker has done since it was last in step is kept (`SharedState.adopt`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch

from cadenza.common.checksums import checksum
from cadenza.errors import DisagreementError
from cadenza.participants.base import SharedState
from cadenza.participants.generation import Generation
from cadenza.transports import Transport

__all__ = ["check_received", "gather_parts", "transfer_state"]

Part: TypeAlias = tuple[int, int]

_LONGEST = 64 << 20  # bytes of JSON; more than a million fragments have


@torch.no_grad()
def transfer_state(
    state: SharedState,
    generation: Generation,
    leader: int,
    facts: Mapping[str, Any],
    *,
    receives: bool,
    part: Part = (0, 1),
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Give the leader's state to the other members of a group; return the leader's facts and the tensors.

    Args:
        state: This worker's state.
        generation: The group of the leader and of those who receive.
        leader: Who gives.
        facts: What the leader tells beside the state.
        receives: Whether this worker receives.
        part: Which of how many parts of every tensor this rank gives or takes; its mates have the others.
    """
    tensors = state.shared_tensors()
    told = {
        **facts,
        "state": state.shared_facts(),
        "sizes": {name: [tensor.numel(), str(tensor.dtype)] for name, tensor in tensors.items()},
        "sums": {} if receives else {name: checksum(tensor) for name, tensor in tensors.items()},
    }
    heard = _broadcast_json(generation, leader, told)
    if heard["sizes"] != told["sizes"]:
        raise DisagreementError("The state of the others does not fit this worker's model.")
    found = {}
    for name, tensor in tensors.items():
        memory = tensor.detach().to("cpu", copy=receives).contiguous()
        mine = _cut(memory, *part)
        if mine.numel():
            generation.broadcast(mine, source=leader)
        found[name] = memory
    return heard, found


def gather_parts(tensors: Mapping[str, torch.Tensor], inside: Transport) -> None:
    """Give every rank of a replica the parts of tensors that its mates have received."""
    ranks = len(inside.members)
    for tensor in tensors.values():
        for rank in range(ranks):
            inside.broadcast(_cut(tensor, rank, ranks), rank)


def check_received(heard: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise if a tensor is not what the leader has told of it."""
    if damaged := [name for name, tensor in tensors.items() if checksum(tensor) != heard["sums"][name]]:
        raise DisagreementError(f"The state of the others arrived damaged: {damaged[0]}.")


def _cut(tensor: torch.Tensor, part: int, parts: int) -> torch.Tensor:
    """Return one of so many parts of a tensor's bytes."""
    data = tensor.reshape(-1).view(torch.uint8)
    return data[data.numel() * part // parts : data.numel() * (part + 1) // parts]


def _broadcast_json(generation: Generation, leader: int, told: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the leader tells."""
    text = json.dumps(told).encode()
    size = torch.tensor([len(text), _sum_of(text)])
    generation.broadcast(size, source=leader)
    length, expected = size.tolist()
    if not 0 < length <= _LONGEST:
        raise DisagreementError(f"The state of the others is told in {length} bytes, which cannot be.")
    data = torch.zeros(length, dtype=torch.uint8)
    if generation.members[generation.position] == leader:
        data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    generation.broadcast(data, source=leader)
    arrived = data.numpy().tobytes()
    if _sum_of(arrived) != expected:
        raise DisagreementError("The state of the others arrived damaged: what is told of it.")
    heard: dict[str, Any] = json.loads(arrived)
    return heard


def _sum_of(text: bytes) -> int:
    """Return a number of 8 bytes, with a sign, that tells texts apart."""
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little", signed=True)

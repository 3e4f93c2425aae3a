"""How a worker takes the state that the others share: anchors, outer state, step and schedules, over a process group.

JSON travels as bytes and tensors as bytes; nothing that comes over the network is unpickled. All of it is received and
checked before any of it is used. What the worker has done since it was last in step is kept (`SharedState.adopt`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from cadenza.common.checksums import checksum
from cadenza.errors import DisagreementError
from cadenza.participants.base import SharedState
from cadenza.participants.generation import Generation

__all__ = ["transfer_state"]

_LONGEST = 64 << 20  # bytes of JSON; more than a million fragments have


@torch.no_grad()
def transfer_state(
    state: SharedState, generation: Generation, leader: int, facts: Mapping[str, Any], *, receives: bool, new: bool
) -> dict[str, Any]:
    """Give the leader's state to the other members of a group; return the leader's facts.

    Args:
        state: This worker's state.
        generation: The group of the leader and of those who receive.
        leader: Who gives.
        facts: What the leader tells beside the state.
        receives: Whether this worker receives.
        new: Whether it has done nothing yet that is worth keeping.
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
        generation.broadcast(memory.reshape(-1).view(torch.uint8), source=leader)
        found[name] = memory
    if not receives:
        return heard
    if damaged := [name for name, tensor in found.items() if checksum(tensor) != heard["sums"][name]]:
        raise DisagreementError(f"The state of the others arrived damaged: {damaged[0]}.")
    state.adopt(heard["state"], found, new=new)
    return heard


def _broadcast_json(generation: Generation, leader: int, told: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the leader tells."""
    text = json.dumps(told).encode()
    size = torch.tensor([len(text)])
    generation.broadcast(size, source=leader)
    if not 0 < int(size) <= _LONGEST:
        raise DisagreementError(f"The state of the others is told in {int(size)} bytes, which cannot be.")
    data = torch.zeros(int(size), dtype=torch.uint8)
    if generation.members[generation.position] == leader:
        data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    generation.broadcast(data, source=leader)
    heard: dict[str, Any] = json.loads(bytes(data.tolist()))
    return heard

"""How a worker takes the state that the others share: anchors, outer state, step and schedules, over a process group.

JSON travels as bytes and tensors as bytes; nothing that comes over the network is unpickled. All of it is received and
checked before any of it is used. What the worker has done since it was last in step is kept: x ← anchor_new + (x −
anchor_old), so its work counts in the next round.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from cadenza.engine.run_state import Held, checksum
from cadenza.errors import DisagreementError
from cadenza.participants.generation import Generation

__all__ = ["hand_over"]

_LONGEST = 64 << 20  # bytes of JSON; more than a million fragments have


@torch.no_grad()
def hand_over(
    sync: Held, generation: Generation, leader: int, facts: Mapping[str, Any], *, receives: bool, new: bool
) -> dict[str, Any]:
    """Give the leader's state to the other members of a group; return the leader's facts.

    Args:
        sync: Whose state it is.
        generation: The group of the leader and of those who receive.
        leader: Who gives.
        facts: What the leader tells beside the state.
        receives: Whether this worker receives.
        new: Whether it has done nothing yet that is worth keeping.
    """
    tensors = dict(_tensors(sync))
    told = {
        **facts,
        "clock": sync.clock,
        "tracks": {f"{number}/{f}": [t.schedule_state, t.rounds] for (number, f), t in sync._tracks.items()},
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
    _take(sync, heard, tensors, found, new=new)
    return heard


def _tensors(sync: Held) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what all workers share, by name, in one order: anchors, outer state, and what is not trained."""
    for (number, fragment), track in sorted(sync._tracks.items()):
        for i, anchor in enumerate(track.anchors):
            yield f"{number}/{fragment}/{i}/anchor", anchor
        for i, state in enumerate(track.outer_states):
            for key in sorted(state):
                yield f"{number}/{fragment}/{i}/outer/{key}", state[key]
    trained = sync._view.parameters().keys()
    for name, tensor in sync._view.everything().items():
        if name not in trained and tensor.numel():
            yield f"model/{name}", tensor


def _take(
    sync: Held,
    heard: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    found: Mapping[str, torch.Tensor],
    *,
    new: bool,
) -> None:
    sync._flights.clear()
    progress = {} if new else {key: _progress(sync, *key) for key in sync._tracks}
    for name, tensor in tensors.items():
        if new or not name.startswith("model/"):  # buffers of a worker that comes back are its own
            tensor.copy_(found[name].view(tensor.shape))
    for key, (schedule, rounds) in heard["tracks"].items():
        number, fragment = map(int, key.split("/"))
        track = sync._tracks[number, fragment]
        track.schedule_state, track.rounds = dict(schedule), rounds
        layout = sync._layout(fragment)
        moved = progress.get((number, fragment))
        if moved is None or not all(bool(flat.isfinite().all()) for flat in moved):
            layout.unpack(track.anchors)
        else:
            layout.unpack([flat.add_(anchor) for flat, anchor in zip(moved, track.anchors, strict=True)])
    sync.clock = heard["clock"]


def _progress(sync: Held, number: int, fragment: int) -> list[torch.Tensor]:
    """Return how far the parameters are from their anchor."""
    track = sync._tracks[number, fragment]
    flats = sync._layout(fragment).pack()
    return [flat.sub_(anchor) for flat, anchor in zip(flats, track.anchors, strict=True)]


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

"""A run's state as one flat dict of tensors and JSON.

| key | what |
| --- | --- |
| `shared/meta` | step, workers, strategy, parameters, schedules: JSON, the same on all workers |
| `shared/level/L/fragment/F/…` | anchors and outer state of a level at which all workers meet |
| `worker/ID/meta` | counts, weights, rounds in flight: JSON of one worker; ID is its global rank |
| `worker/ID/level/L/fragment/F/…` | residuals; anchors and outer state of a level of several groups |
| `worker/ID/pending/F/…` | the result of a round in flight, which lands when it was due, unless it is the anchor |

Where a model is sharded, every shard has its own `shared/shard/S/…`. `shared/meta` and `worker/ID/meta` list the
tensors that belong to them, so that a loss is found before anything is changed.

Saving is local: it waits for what is in flight, but lands nothing, so it never changes the trajectory.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import torch

from cadenza.common.identity import identity
from cadenza.engine.model_view import ModelView
from cadenza.engine.place import Place
from cadenza.engine.replica import Replica
from cadenza.version import __version__

__all__ = ["FORMAT", "State", "collect", "describe_parameters", "local", "name_of", "state_dict"]

State: TypeAlias = dict[str, torch.Tensor | str]

FORMAT = 3


def state_dict(replica: Replica) -> State:
    """Return copies of everything that a synchronizer needs to go on where it is; local, never a collective."""
    return {key: value if isinstance(value, str) else value.clone() for key, value in collect(replica).items()}


def collect(replica: Replica) -> State:
    """Return the state like `state_dict`, but the tensors themselves, to be written before training goes on."""
    results = replica.state.results()
    place = replica.place()
    shared, own = _Entry(place.shared_root), _Entry(place.worker_root)
    for (number, fragment), state in sorted(replica.state.levels.items()):
        where = f"level/{number}/fragment/{fragment}"
        common = shared if _is_common(replica, number, place) else own
        common.levels[f"{number}/{fragment}"] = state.facts()
        common.add(where, dict(state.shared_state()))
        own.add(where, dict(state.worker_state()))
    for fragment, (pending, _) in results.items():
        own.add(f"pending/{fragment}", pending.tensors())
    in_flight = [pending.facts(result) for pending, result in results.values()]
    return shared.state(**_shared_facts(replica, place)) | own.state(**_own_facts(replica, place), pending=in_flight)


class _Entry:
    """A part of the state under one root: tensors, and a `meta` that lists them."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.levels: dict[str, Any] = {}
        self.tensors: dict[str, torch.Tensor] = {}

    def add(self, where: str, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors |= {f"{where}/{key}": tensor for key, tensor in tensors.items() if tensor.numel()}

    def state(self, **facts: Any) -> State:
        kinds = {key: [tensor.numel(), name_of(tensor.dtype)] for key, tensor in self.tensors.items()}
        meta = json.dumps({**facts, "levels": self.levels, "tensors": kinds})
        return {f"{self.root}/meta": meta, **{f"{self.root}/{key}": tensor for key, tensor in self.tensors.items()}}


def _is_common(replica: Replica, number: int, place: Place) -> bool:
    """Say whether all workers hold the same at a level; where they come and go, only the outermost one is for all."""
    groups, group = replica.participants.levels, replica.participants.levels[number]
    for_all = replica.participants.always_together or group is groups[-1]
    return for_all and group.ranks == place.workers and group.agrees


def _shared_facts(replica: Replica, place: Place) -> dict[str, Any]:
    state = replica.state
    return {
        "format": FORMAT,
        "version": __version__,
        "workers": place.workers,
        "shards": place.shards,
        # Balanced workers take steps of their own number, so there the clock is not the same on all.
        "clock": None if replica.strategy.balanced else state.clock,
        "strategy": identity(replica.strategy),
        "parameters": describe_parameters(replica.view),
        "known": sorted(state.known),
        "held": replica.participants.held,
        "fragments": state.fragment_count,
        "fragment_of": state.fragments,
    }


def _own_facts(replica: Replica, place: Place) -> dict[str, Any]:
    groups = replica.participants.levels
    return {
        "groups": [place.positions(group) for group in groups],
        "staged": [group.stage is not None for group in groups],
        **replica.state.facts(),
    }


def describe_parameters(view: ModelView, also: Iterable[str] = ()) -> list[str]:
    """Return a line for each parameter that takes part, or did so in an earlier life, as this rank holds it."""
    names = {*view.parameters(), *also}
    found = {name: local(parameter) for name, parameter in view.all_parameters().items() if name in names}
    return [f"{name}: {tuple(part.shape)} {name_of(part.dtype)}" for name, part in found.items()]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor that this rank holds."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def name_of(dtype: torch.dtype) -> str:
    """Return a dtype's name.

    >>> name_of(torch.bfloat16)
    'bfloat16'
    """
    return str(dtype).removeprefix("torch.")

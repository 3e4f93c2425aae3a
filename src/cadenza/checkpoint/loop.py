"""The state of a training loop beside the synchronizer's: model, optimizers, random numbers, and what users add.

It lies under the worker's root as well: `worker/ID/model/…`, `worker/ID/optimizer/…`, `worker/ID/random/…` and
`worker/ID/extra/…`, all tensors, and `worker/ID/loop`, JSON that says how they belong together and holds the rest.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from cadenza.engine.loading import Restoration, read_json
from cadenza.engine.saving import State
from cadenza.errors import CheckpointError

__all__ = [
    "Loop",
    "belongs_to_loop",
    "collect_loop",
    "prepare_loop",
    "random_state",
    "read_loop",
    "read_model",
    "set_random_state",
]


def collect_loop(
    root: str, model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], extra: Mapping[str, Any] | None
) -> State:
    """Return what the loop needs to go on: the tensors themselves, to be written before training goes on."""
    writer = _Writer(root)
    described = {
        "model": writer.write("model", _unwrapped(model).state_dict()),
        "optimizer": writer.write("optimizer", [optimizer.state_dict() for optimizer in optimizers]),
        "random": writer.write("random", random_state()),
        "extra": writer.write("extra", extra),
    }
    return {f"{root}/loop": json.dumps(described), **writer.tensors}


def belongs_to_loop(key: str) -> bool:
    """Say whether a key of a worker is the loop's, and not the synchronizer's.

    >>> belongs_to_loop("worker/0/model/weight"), belongs_to_loop("worker/0/level/0/fragment/0/residual/0")
    (True, False)
    """
    return key.split("/")[2] in ("model", "optimizer", "random", "extra", "loop")


@dataclass(frozen=True)
class Loop:
    """A saved state of a loop that was found to fit the model and the optimizers."""

    extra: dict[str, Any] | None
    model: torch.nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    _values: dict[str, Any]
    _optimizers: list[dict[str, Any]]
    _random: dict[str, Any] | None

    def apply(self) -> None:
        """Give the state to the model, the optimizers and the generators of random numbers."""
        self.model.load_state_dict(self._values)
        for optimizer, saved in zip(self.optimizers, self._optimizers, strict=True):
            optimizer.load_state_dict(saved)
        if self._random is not None:
            set_random_state(self._random)


def prepare_loop(
    state: Mapping[str, torch.Tensor | str],
    restoration: Restoration,
    model: torch.nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
) -> Loop:
    """Check that a state belongs to this model and these optimizers, before anything is changed."""
    root = f"worker/{restoration.worker}"
    if f"{root}/loop" not in state:
        raise CheckpointError(f"This state has no {root}/loop: it was not saved by cadenza.checkpoint.")
    described = read_json(f"{root}/loop", state[f"{root}/loop"])
    inner = _unwrapped(model)
    values = _fitted_model(_read(described["model"], state), inner.state_dict())
    states = _fitted_optimizers(_read(described["optimizer"], state, copy=True), optimizers)
    # Of workers that go on from one entry, only one may draw its random numbers.
    numbers = _read(described["random"], state) if restoration.first else None
    return Loop(_read(described["extra"], state, copy=True), inner, optimizers, values, states, numbers)


def read_loop(
    state: Mapping[str, torch.Tensor | str], worker: int, optimizers: Sequence[torch.optim.Optimizer]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return what a worker's optimizers held, as they take it, and its `extra`; nothing is changed."""
    described = read_json(f"worker/{worker}/loop", state.get(f"worker/{worker}/loop"))
    states = _fitted_optimizers(_read(described["optimizer"], state, copy=True), optimizers)
    return states, _read(described["extra"], state, copy=True) or {}


def read_model(state: Mapping[str, torch.Tensor | str], worker: int) -> dict[str, Any]:
    """Return what a worker's model held, as its `state_dict` gave it."""
    values: dict[str, Any] = _read(
        read_json(f"worker/{worker}/loop", state.get(f"worker/{worker}/loop"))["model"], state
    )
    return values


# ---- values and JSON -------------------------------------------------------------------------------------------------


class _Writer:
    """Turns nested values into JSON, and puts the tensors among them into a flat dict."""

    def __init__(self, root: str) -> None:
        self.tensors: State = {}
        self._root = root
        self._known: dict[tuple[Any, ...], str] = {}

    def write(self, path: str, value: Any) -> Any:
        if value is None or isinstance(value, bool | str):
            return value
        if isinstance(value, int):
            return int(value)
        if isinstance(value, float):
            return float(value)  # JSON holds it in as many digits as it needs to come back to the bit
        if isinstance(value, torch.Tensor):
            return self._tensor(path, value)
        if isinstance(value, Mapping):
            keys = {key: self.write(f"{path}, a key", key) for key in value}
            return {"dict": [[keys[key], self.write(f"{path}/{key}", item)] for key, item in value.items()]}
        if isinstance(value, list | tuple):
            kind = "list" if isinstance(value, list) else "tuple"
            return {kind: [self.write(f"{path}/{i}", item) for i, item in enumerate(value)]}
        raise CheckpointError(
            f"{path} is a {type(value).__name__}, which has no place in a checkpoint without pickle: only tensors, "
            "numbers, texts, lists, tuples and dicts of them do. Leave it out, or save it yourself."
        )

    def _tensor(self, path: str, tensor: torch.Tensor) -> dict[str, Any]:
        local = _local(tensor.detach())
        # Memory that is held twice (tied weights) is written once.
        memory = (local.data_ptr(), local.device, local.dtype, *local.shape, *local.stride())
        key = f"{self._root}/{path}"
        if local.numel():
            key = self._known.setdefault(memory, key)
        self.tensors[key] = local
        described: dict[str, Any] = {"tensor": key}
        if not local.is_contiguous() and 0 not in local.stride():
            described["stride"] = local.stride()  # kernels may round differently along other strides
        return described


def _read(described: Any, state: Mapping[str, torch.Tensor | str], *, copy: bool = False) -> Any:
    """Return nested values as they were before `_Writer` wrote them; `copy` if they are taken as they are."""
    if not isinstance(described, dict):
        return described
    if "tensor" in described:
        tensor = state.get(described["tensor"])
        if not isinstance(tensor, torch.Tensor):
            raise CheckpointError(f"The state has no tensor {described['tensor']}.")
        if "stride" not in described:
            return tensor.clone() if copy else tensor
        return torch.empty_strided(tensor.shape, described["stride"], dtype=tensor.dtype).copy_(tensor)
    if "dict" in described:
        return {_read(key, state): _read(item, state, copy=copy) for key, item in described["dict"]}
    if "tuple" in described:
        return tuple(_read(item, state, copy=copy) for item in described["tuple"])
    return [_read(item, state, copy=copy) for item in described["list"]]


# ---- models and optimizers -------------------------------------------------------------------------------------------


def _unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """Return the user's own module, so that a run may go on under other wrappers."""
    inner = model.module if isinstance(model, DistributedDataParallel) else getattr(model, "_orig_mod", None)
    return model if inner is None else _unwrapped(inner)


def _fitted_model(saved: Mapping[str, Any], here: Mapping[str, Any]) -> dict[str, Any]:
    """Return saved values as `load_state_dict` wants them; refuse those of another model."""
    for name in (*saved, *here):
        then, now = (_facts(values[name]) if name in values else "nothing" for values in (saved, here))
        if then != now:
            raise CheckpointError(
                f"This checkpoint is of another model: {name} is {then} in it, and {now} here. Nothing was changed."
            )
    return {name: _like(value, here[name]) for name, value in saved.items()}


def _fitted_optimizers(
    saved: Sequence[dict[str, Any]], optimizers: Sequence[torch.optim.Optimizer]
) -> list[dict[str, Any]]:
    then, now = ([_sizes(s["param_groups"]) for s in states] for states in (saved, map(_described, optimizers)))
    if then != now:
        raise CheckpointError(
            f"This checkpoint's optimizers have groups of {then} parameters, those here of {now}. Build them as they "
            "were. Nothing was changed."
        )
    return [_sharded(state, optimizer) for state, optimizer in zip(saved, optimizers, strict=True)]


def _described(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"param_groups": optimizer.param_groups}


def _sizes(groups: Iterable[Mapping[str, Any]]) -> list[int]:
    return [len(group["params"]) for group in groups]


def _sharded(saved: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return an optimizer's saved state with the state of sharded parameters sharded like them."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    of = dict(zip(numbers, parameters, strict=True))
    states = {
        number: {key: _like(value, of[number]) for key, value in kept.items()}
        for number, kept in saved["state"].items()
    }
    return {**saved, "state": states}


def _facts(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    local = _local(value)
    return f"{tuple(local.shape)} {str(local.dtype).removeprefix('torch.')}"


def _local(tensor: torch.Tensor) -> torch.Tensor:
    local: torch.Tensor = tensor.to_local() if _is_dtensor(tensor) else tensor  # type: ignore[attr-defined]
    return local


def _like(value: Any, there: Any) -> Any:
    """Return a tensor as a shard, if that is what it was a copy of."""
    if not isinstance(value, torch.Tensor) or not _is_dtensor(there) or value.shape != _local(there).shape:
        return value
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        value.to(there.device),
        there.device_mesh,
        there.placements,
        run_check=False,
        shape=there.shape,
        stride=there.stride(),
    )


def _is_dtensor(value: Any) -> bool:
    return hasattr(value, "device_mesh") and hasattr(value, "placements")


# ---- random numbers --------------------------------------------------------------------------------------------------


def random_state() -> dict[str, Any]:
    """Return the state of Python's, torch's and, if it is loaded, NumPy's generators of random numbers."""
    state: dict[str, Any] = {"python": random.getstate(), "cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    if "numpy" in sys.modules:
        kind, keys, *rest = sys.modules["numpy"].random.get_state(legacy=True)
        state["numpy"] = (kind, keys.tolist(), *rest)
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Let the generators of random numbers go on from a state."""
    random.setstate(state["python"])
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    if "numpy" in state and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(state["numpy"])

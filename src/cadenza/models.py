"""What Cadenza sees of a model: its parameters by their own names, whatever wrappers are around it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch.nn.parallel import DistributedDataParallel

from cadenza.errors import UnsupportedModelError

__all__ = ["ModelView"]

_WRAPPERS = ("module.", "_orig_mod.", "_checkpoint_wrapped_module.")


class ModelView:
    """A model and its optimizers, looked at anew in every round: parameters may be frozen, unfrozen or added."""

    def __init__(self, model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"A torch.nn.Module is required; got {type(model).__name__}.")
        for optimizer in optimizers:
            if not isinstance(optimizer, torch.optim.Optimizer):
                raise TypeError(f"A torch.optim.Optimizer is required; got {type(optimizer).__name__}.")
        self.model = model
        self.optimizers = optimizers
        self.ddp = model if isinstance(model, DistributedDataParallel) else None
        self._refuse_what_cannot_work()

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """Return the parameters that are trained, by their own names, ties once."""
        return {_plain(name): p for name, p in self.model.named_parameters() if p.requires_grad}

    def float_buffers(self) -> dict[str, torch.Tensor]:
        """Return the buffers that have a mean."""
        return {_plain(name): b for name, b in self._buffers() if b.is_floating_point()}

    def counters(self) -> dict[str, torch.Tensor]:
        """Return the integer buffers, such as BatchNorm's count of batches."""
        return {_plain(name): b for name, b in self._buffers() if not b.is_floating_point() and not b.is_complex()}

    def describe(self) -> list[str]:
        """Return a line for each parameter and buffer, to be compared between ranks."""
        named: Iterable[tuple[str, torch.Tensor]] = [*self.model.named_parameters(), *self.model.named_buffers()]
        return [f"{_plain(name)}: {tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for name, t in named]

    def inner_lrs(self) -> dict[str, float]:
        """Return the learning rate that each parameter has now."""
        lrs = {id(p): float(g.get("lr", 0.0)) for o in self.optimizers for g in o.param_groups for p in g["params"]}
        return {name: lrs[id(p)] for name, p in self.parameters().items() if id(p) in lrs}

    def optimizer_tensors(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Return the optimizers' state of the named parameters that has a mean: tensors of the parameter's shape."""
        parameters = self.parameters()
        found: dict[str, torch.Tensor] = {}
        for optimizer in self.optimizers:
            for name in names:
                for key, value in optimizer.state.get(parameters[name], {}).items():
                    if isinstance(value, torch.Tensor) and value.shape == parameters[name].shape and value.ndim:
                        found[f"{name}/{key}"] = value
        return found

    def reset_optimizer_state(self, names: Sequence[str]) -> None:
        """Let the optimizers forget what they know of the named parameters."""
        parameters = self.parameters()
        for optimizer in self.optimizers:
            for name in names:
                optimizer.state.pop(parameters[name], None)

    def reset_momentum(self, names: Sequence[str]) -> None:
        """Zero SGD's momentum of the named parameters, as SlowMo does; Adam's moments are left."""
        for name, tensor in self.optimizer_tensors(names).items():
            if name.endswith("/momentum_buffer"):
                tensor.zero_()

    def _buffers(self) -> list[tuple[str, torch.Tensor]]:
        return [(name, buffer) for name, buffer in self.model.named_buffers() if buffer.numel()]

    def _refuse_what_cannot_work(self) -> None:
        parameters = self.parameters()
        if not parameters:
            raise UnsupportedModelError(
                "The model has no parameter with requires_grad=True, so there is nothing to train."
            )
        for name, parameter in parameters.items():
            if parameter.is_meta:
                raise UnsupportedModelError(f"Parameter {name} is on the meta device: materialise the model first.")
            mesh = getattr(parameter, "device_mesh", None)
            if mesh is not None and mesh.ndim > 1 and _replicated(parameter):
                raise UnsupportedModelError(
                    f"Parameter {name} is replicated by FSDP2 itself (a mesh of {mesh.ndim} dimensions): it would "
                    "average gradients in every step. Give fully_shard only the shard dimension, mesh['shard'], and "
                    "Cadenza the other: topology=Topology.from_mesh(mesh, ['replicate'])."
                )


def _replicated(parameter: torch.Tensor) -> bool:
    return any(placement.is_replicate() for placement in parameter.placements)  # type: ignore[attr-defined]


def _plain(name: str) -> str:
    """Return a parameter's own name, without what wrappers put before it."""
    for wrapper in _WRAPPERS:
        while name.startswith(wrapper):
            name = name.removeprefix(wrapper)
        if wrapper != "module.":
            name = name.replace(f".{wrapper}", ".")
    return name


def named(tensors: Mapping[str, torch.Tensor], names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Return the tensors of the given names."""
    return {name: tensors[name] for name in names}

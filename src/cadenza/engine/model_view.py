"""What Cadenza sees of a model: its parameters by their own names, whatever wrappers are around it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from cadenza.engine.ddp import covers, find_ddps_around
from cadenza.engine.foreign import refuse_deepspeed
from cadenza.errors import UnsupportedModelError
from cadenza.strategy import Buffers, Strategy

__all__ = ["ModelView"]

_STATISTICS = ("running_mean", "running_var")
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


class ModelView:
    """A model and its optimizers, looked at anew in every round: parameters may be frozen, unfrozen or added.

    A parameter takes part from the first round that finds it trained: it has `requires_grad`, a gradient or state in an
    optimizer. It stays, whatever becomes of it then: what is frozen may have moved since the last round, and a loop
    that freezes one network while it trains the other may freeze either at `sync.step()`.
    """

    def __init__(self, model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"A torch.nn.Module is required; got {type(model).__name__}.")
        for optimizer in optimizers:
            if not isinstance(optimizer, torch.optim.Optimizer):
                raise TypeError(f"A torch.optim.Optimizer is required; got {type(optimizer).__name__}.")
        refuse_deepspeed(model, optimizers)
        self.model = model
        self.optimizers = optimizers
        found = {name: m for name, m in model.named_modules() if isinstance(m, DistributedDataParallel)}
        self.ddps = list(found.values())
        self._ddp_prefixes = [f"{name}.module." if name else "module." for name in reversed(found)]
        self._taking_part: set[str] = set()
        inner = model
        while isinstance(inner, DistributedDataParallel) or hasattr(inner, "_orig_mod"):
            inner = getattr(inner, "module" if isinstance(inner, DistributedDataParallel) else "_orig_mod")
        self.inner: torch.nn.Module = inner

    @property
    def by_ddp(self) -> bool:
        """Whether everything that is trained belongs to a DistributedDataParallel, around the model or inside it."""
        own = {id(parameter) for ddp in self.ddps for parameter in ddp.module.parameters()}
        return bool(own) and all(id(parameter) in own for parameter in self.parameters().values())

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """Return the parameters that take part, by their own names, ties once."""
        found = self.all_parameters()
        known = self._taking_part
        known.update(name for name, p in found.items() if name not in known and self._is_trained(p))
        return {name: p for name, p in found.items() if name in known}

    def all_parameters(self) -> dict[str, torch.nn.Parameter]:
        """Return all parameters, whether or not they take part, by their own names, ties once."""
        return {self._plain(name): p for name, p in self.model.named_parameters()}

    def take_part(self, names: Iterable[str]) -> None:
        """Let parameters take part that did so in an earlier life of this run."""
        self._taking_part.update(names)

    def _is_trained(self, parameter: torch.nn.Parameter) -> bool:
        if parameter.requires_grad or parameter.grad is not None:
            return True
        return any(parameter in optimizer.state for optimizer in self.optimizers)

    def everything(self) -> dict[str, torch.Tensor]:
        """Return all parameters and buffers, trained or not."""
        found: list[tuple[str, torch.Tensor]] = [*self.model.named_parameters(), *self._buffers()]
        return {self._plain(name): tensor for name, tensor in found}

    def settle(self) -> None:
        """Let FSDP2 put its shards back where they belong, should a forward pass have left parameters gathered."""
        for module in self.model.modules():
            reshard = getattr(module, "reshard", None)
            if callable(reshard) and hasattr(module, "unshard"):
                reshard()

    def float_buffers(self, which: Buffers) -> dict[str, torch.Tensor]:
        """Return the buffers that have a mean: all, none, or those of modules with running statistics."""
        return {self._plain(name): b for name, b in self._chosen_buffers(which) if b.is_floating_point()}

    def counters(self, which: Buffers) -> dict[str, torch.Tensor]:
        """Return the integer buffers, such as BatchNorm's count of batches: all, none, or those of such modules."""
        whole = ((name, b) for name, b in self._chosen_buffers(which) if not b.is_floating_point())
        return {self._plain(name): b for name, b in whole if not b.is_complex()}

    def modules_with_statistics(self) -> list[str]:
        """Return the names of the modules that have running statistics: BatchNorm and whatever is built like it."""
        owners = (name.rpartition(".") for name, _ in self._buffers())
        return list(dict.fromkeys(self._plain(module) for module, _, own in owners if own in _STATISTICS))

    def _chosen_buffers(self, which: Buffers) -> list[tuple[str, torch.Tensor]]:
        if isinstance(which, bool):
            return self._buffers() if which else []
        chosen = set(self.modules_with_statistics())
        return [(name, b) for name, b in self._buffers() if self._plain(name.rpartition(".")[0]) in chosen]

    def describe(self) -> list[str]:
        """Return a line for each parameter and buffer, to be compared between ranks."""
        found: list[tuple[str, torch.Tensor]] = [*self.model.named_parameters(), *self.model.named_buffers()]
        return [f"{self._plain(name)}: {_facts(tensor)}" for name, tensor in found]

    def inner_lrs(self) -> dict[str, float]:
        """Return the learning rate that each parameter has now."""
        lrs = {id(p): float(g.get("lr", 0.0)) for o in self.optimizers for g in o.param_groups for p in g["params"]}
        return {name: lrs[id(p)] for name, p in self.parameters().items() if id(p) in lrs}

    def optimizer_tensors(self, names: Sequence[str], keys: Collection[str] | None = None) -> dict[str, torch.Tensor]:
        """Return the optimizers' state of the named parameters that has a mean: floating-point tensors.

        Without `keys`, all but those that count steps: `step`, and single numbers beside a parameter that is none.
        """
        found: dict[str, torch.Tensor] = {}
        for name, parameter, key, value in self._optimizer_state(names):
            counts = key == "step" or (isinstance(value, torch.Tensor) and value.ndim == 0 < parameter.ndim)
            if not isinstance(value, torch.Tensor) or not value.is_floating_point():
                continue
            if not counts if keys is None else key in keys:
                found[f"{name}/{key}"] = value
        return found

    def state_without_mean(self, names: Sequence[str]) -> str | None:
        """Say which of the optimizers' state of the named parameters has no mean, if there is such."""
        kept: dict[str, list[str]] = {}
        for name, _, key, value in self._optimizer_state(names):
            if _has_no_mean(value):
                kept.setdefault(name, []).append(key)
        if not kept:
            return None
        name, keys = next(iter(kept.items()))
        return (
            f"the optimizer's state of parameter {name} has no mean: {', '.join(keys)} are no floating-point tensors. "
            'Use optimizer_state="leave" or "reset", or another optimizer.'
        )

    def _optimizer_state(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor, str, object]]:
        parameters = self.parameters()
        for optimizer in self.optimizers:
            for name in names:
                for key, value in optimizer.state.get(parameters[name], {}).items():
                    yield name, parameters[name], key, value

    def reset_optimizer_state(self, names: Sequence[str]) -> None:
        """Let the optimizers forget what they know of the named parameters."""
        parameters = self.parameters()
        for optimizer in self.optimizers:
            for name in names:
                optimizer.state.pop(parameters[name], None)

    def reset_momentum(self, names: Sequence[str]) -> None:
        """Zero the momentum that torch.optim.SGD has of the named parameters, as SlowMo does; other state is left."""
        parameters = self.parameters()
        for optimizer in (o for o in self.optimizers if isinstance(o, torch.optim.SGD)):
            for name in names:
                momentum = optimizer.state.get(parameters[name], {}).get("momentum_buffer")
                if momentum is not None:
                    momentum.zero_()

    def _plain(self, name: str) -> str:
        """Return a tensor's own name, without what wrappers put into it."""
        for prefix in self._ddp_prefixes:  # the innermost first
            if name.startswith(prefix):
                name = prefix.removesuffix("module.") + name.removeprefix(prefix)
        for wrapper in _WRAPPERS:
            name = name.removeprefix(wrapper).replace(f".{wrapper}", ".")
        return name

    def _buffers(self) -> list[tuple[str, torch.Tensor]]:
        return [(name, buffer) for name, buffer in self.model.named_buffers() if buffer.numel()]

    @property
    def sharded(self) -> bool:
        """Whether this rank holds parts of parameters."""
        return any(hasattr(parameter, "device_mesh") for parameter in self.parameters().values())

    def refuse_what_cannot_work(self, strategy: Strategy, *, replica: Collection[int] = ()) -> None:
        """Raise if the model, or the strategy on this model, cannot work, and say what to change.

        `replica` are the global ranks that are one elastic worker, if there are several.
        """
        parameters = self.parameters()
        if not parameters:
            raise UnsupportedModelError(
                "The model has no parameter with requires_grad=True, so there is nothing to train."
            )
        if strategy.faults.tolerant:
            self._refuse_what_cannot_shrink(strategy, replica)
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
            if mesh is not None and not replica and any(level.outer.clip is not None for level in strategy.levels):
                raise UnsupportedModelError(
                    f"Parameter {name} is sharded, and clipping needs the norm of the whole difference, which no rank "
                    "has: use an outer update without clip."
                )
            if mesh is not None and not replica and any(level.follows for level in strategy.levels):
                raise UnsupportedModelError(
                    f"Parameter {name} is sharded, and every shard has a drift of its own, and times, so their "
                    'periods would differ: use a schedule that does not follow the drift or times, and no codec="auto".'
                )
        self._refuse_strange_optimizers()

    def _refuse_strange_optimizers(self) -> None:
        """Raise if an optimizer trains something else than this model."""
        own = {id(parameter) for parameter in self.model.parameters()}
        for number, optimizer in enumerate(self.optimizers):
            if not any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
                raise UnsupportedModelError(
                    f"Optimizer {number} ({type(optimizer).__name__}) holds none of the model's parameters, so it "
                    "trains something else. Make it of model.parameters() after the model has its final form: "
                    "fully_shard(), to() and others may replace parameters."
                )

    def refuse_ddp_elsewhere(self, ranks: Collection[int]) -> None:
        """Raise if a DistributedDataParallel that `attach` was not given averages this model's gradients over all."""
        for ddp in find_ddps_around(self.inner) if len(ranks) > 1 else ():
            if ddp not in self.ddps and ddp.require_backward_grad_sync and covers(ddp, ranks):
                raise UnsupportedModelError(
                    "This model's parameters belong to a DistributedDataParallel as well, which would average their "
                    f"gradients over all {len(ranks)} ranks in every step: nothing would be saved. Pass the "
                    "DistributedDataParallel itself to attach(), which then falls silent, or train the bare module "
                    "without one. Where a framework makes it (accelerator.prepare(), Trainer, fabric.setup()), attach "
                    "what that gave back, afterwards; cadenza.integrations does it for you."
                )

    def _refuse_what_cannot_shrink(self, strategy: Strategy, replica: Collection[int]) -> None:
        """Raise if the model is one copy on others than the replica's ranks, or groups that come and go cannot work."""
        policy, ranks = strategy.faults.name, sorted(replica)
        told = f"the ranks of this worker's replica, {ranks}" if ranks else "this process alone"
        mend = "Pass the process group of the ranks that hold one copy together to cadenza.join(replica=…)"
        for ddp in self.ddps:
            if (own := sorted(dist.get_process_group_ranks(ddp.process_group))) != ranks:
                raise UnsupportedModelError(
                    f"Under {policy} a worker is {told}, and the model's DistributedDataParallel averages over ranks "
                    f"{own}: it would end with the first of them that dies. {mend}, and the same one to "
                    "DistributedDataParallel; or pass the module itself."
                )
        for name, parameter in self.parameters().items():
            mesh = getattr(parameter, "device_mesh", None)
            if mesh is not None and (own := sorted(mesh.mesh.flatten().tolist())) != ranks:
                raise UnsupportedModelError(
                    f"Parameter {name} is sharded over ranks {own}, and under {policy} a worker is {told}. {mend}, and "
                    "shard the model over the same ones; or use faults=raise_error()."
                )
            if mesh is None and self.sharded:
                raise UnsupportedModelError(
                    f"Parameter {name} is not sharded, and others are: its mean would be rounded differently on each "
                    "rank of this replica. Shard all parameters that are trained, or none."
                )
            if parameter.device.type != "cpu" and not strategy.offload:
                raise UnsupportedModelError(
                    f"Parameter {name} is on {parameter.device}, and groups that come and go are made by Gloo on the "
                    "CPU: use offload=True, which does the rounds there."
                )


def _has_no_mean(value: object) -> bool:
    """Say whether a part of an optimizer's state is more than a number and cannot be averaged."""
    if isinstance(value, torch.Tensor):
        return value.ndim > 0 and not value.is_floating_point()
    return isinstance(value, Collection) and not isinstance(value, str)


def _replicated(parameter: torch.Tensor) -> bool:
    return any(placement.is_replicate() for placement in parameter.placements)  # type: ignore[attr-defined]


def _facts(tensor: torch.Tensor) -> str:
    facts = f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
    if tensor.layout == torch.strided and not hasattr(tensor, "placements") and not tensor.is_contiguous():
        facts += f" with strides {tuple(tensor.stride())}"
    return facts + (", trained" if tensor.requires_grad else "")


def named(tensors: Mapping[str, torch.Tensor], names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Return the tensors of the given names."""
    return {name: tensors[name] for name in names}

"""The first forward pass of the model that carries a hook's state: until then the state does not know its model."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TypeVar

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel

from cadenza.common.process_groups import comm_hooks_of

__all__ = ["on_first_pass"]

State = TypeVar("State")


def on_first_pass(state: State, call: Callable[[State, DistributedDataParallel], None]) -> None:
    """Call `call(state, ddp)` before the first forward pass that leads to gradients, of the model with this state.

    A state never sees its model before the first backward pass, so every forward pass is looked at until then. Nothing
    here keeps the state alive.

    >>> import torch.distributed as dist
    >>> from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> model = DistributedDataParallel(torch.nn.Linear(2, 1))
    >>> state = dist.group.WORLD
    >>> on_first_pass(state, lambda _, ddp: print(ddp is model))
    >>> model.register_comm_hook(state, allreduce_hook)
    >>> _ = model(torch.ones(1, 2))
    True
    >>> dist.destroy_process_group()
    """
    watched = weakref.ref(state)

    def look(module: torch.nn.Module, inputs: object) -> None:
        state = watched()
        if state is None:
            handle.remove()
        elif isinstance(module, DistributedDataParallel) and torch.is_grad_enabled() and _carries(module, state):
            handle.remove()
            call(state, module)

    handle = register_module_forward_pre_hook(look)


def _carries(ddp: DistributedDataParallel, state: object) -> bool:
    return any(state is registered for _, registered in comm_hooks_of(ddp))

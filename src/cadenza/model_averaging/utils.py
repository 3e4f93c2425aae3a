"""Averaging of parameters by function, as in `torch.distributed.algorithms.model_averaging.utils`.

Values change in place: storage, strides and ties stay. Beyond torch's arguments, `atomic=True` keeps the parameters
untouched on every rank if the averaging fails, at the price of one scratch copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from cadenza.common.process_groups import is_member, resolve
from cadenza.engine.in_place_mean import average
from cadenza.engine.packing import Fragment

__all__ = ["average_parameters", "average_parameters_or_parameter_groups", "get_params_to_average"]

Params = Iterable[torch.nn.Parameter] | Iterable[dict[str, Any]]


def average_parameters(
    params: Iterable[torch.Tensor], process_group: dist.ProcessGroup | None, *, atomic: bool = False
) -> None:
    """Replace every given parameter, with or without a gradient, by its mean over the group (None: the world).

    Plain tensors are averaged as well: buffers, momentum, snapshots. A rank outside the group returns without touching
    anything.

    >>> import torch, torch.distributed as dist
    >>> from cadenza.model_averaging.utils import average_parameters
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> average_parameters(torch.nn.Linear(2, 1).parameters(), dist.group.WORLD)
    >>> dist.destroy_process_group()
    """
    group = resolve(process_group)
    if is_member(group):
        average(_all_given(params), group, atomic=atomic)


def get_params_to_average(params: Params) -> list[torch.nn.Parameter]:
    """Return the parameters that have a gradient, from parameters or from an optimizer's parameter groups.

    >>> layer = torch.nn.Linear(2, 1)
    >>> layer.weight.grad = torch.zeros(1, 2)
    >>> get_params_to_average(layer.parameters()) == [layer.weight]
    True
    """
    return [param for _, param in _labelled(params) if param.grad is not None]


def average_parameters_or_parameter_groups(
    params: Params, process_group: dist.ProcessGroup | None, *, atomic: bool = False
) -> None:
    """Replace every parameter that has a gradient by its mean over the group (None: the world).

    >>> import torch, torch.distributed as dist
    >>> from cadenza.model_averaging.utils import average_parameters_or_parameter_groups
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> layer = torch.nn.Linear(2, 1)
    >>> layer(torch.ones(2)).backward()
    >>> average_parameters_or_parameter_groups(torch.optim.SGD(layer.parameters()).param_groups, None)
    >>> dist.destroy_process_group()
    """
    average_at_step(params, process_group, step=0, atomic=atomic)


def average_at_step(params: Params, process_group: dist.ProcessGroup | None, *, step: int, atomic: bool) -> None:
    """Average what has a gradient, and make sure that every rank does so at the same step."""
    group = resolve(process_group)
    if not is_member(group):
        return
    average(_with_gradients(params), group, step=step, atomic=atomic)


def _all_given(params: Iterable[torch.Tensor]) -> Fragment:
    """Return all the given tensors as one fragment."""
    try:
        _refuse_lone(params)
        tensors = list(params)
        for i, tensor in enumerate(tensors):
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(f"Parameters are tensors; number {i} is of type {type(tensor).__name__}.")
        return Fragment(tensors)
    except TypeError as error:
        return Fragment([], problem=str(error))


def _with_gradients(params: Params) -> Fragment:
    """Return the given parameters as one fragment in which those with a gradient take part.

    What is no parameter becomes the fragment's problem, which the round tells to every rank.
    """
    try:
        labelled = list(_labelled(params))
    except (TypeError, NotImplementedError) as error:
        return Fragment([], problem=str(error))
    return Fragment(
        [param for _, param in labelled],
        taking=[param.grad is not None for _, param in labelled],
        label=lambda i: labelled[i][0],
    )


def _labelled(params: Params) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Give every parameter a name for messages: its position, and its own name where the optimizer knows it."""
    _refuse_lone(params)
    for i, item in enumerate(params):
        if isinstance(item, torch.nn.Parameter):
            yield f"parameter {i}", item
        elif isinstance(item, dict):
            params_of_group = list(item["params"])
            names = item.get("param_names") or [""] * len(params_of_group)
            for j, (name, param) in enumerate(zip(names, params_of_group, strict=True)):
                yield f"parameter {j} of group {i}" + (f" ({name})" if name else ""), param
        else:
            raise NotImplementedError(f"Parameter input of type {type(item)} is not supported")


def _refuse_lone(params: object) -> None:
    """Refuse what iterates, but surely not over parameters."""
    if isinstance(params, torch.Tensor | torch.nn.Module | dict | str) or not isinstance(params, Iterable):
        raise TypeError(
            "An iterable of parameters or an optimizer's param_groups is required, for instance model.parameters(); "
            f"got {type(params).__name__}."
        )

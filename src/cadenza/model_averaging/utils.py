"""Averaging of parameters by function, as in `torch.distributed.algorithms.model_averaging.utils`.

Values change in place: storage, strides and ties stay. Beyond torch's arguments, `atomic=True` keeps the parameters
untouched on every rank if the averaging fails, at the price of one scratch copy.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from cadenza.common.process_groups import is_member, resolve
from cadenza.engine.in_place_mean import average
from cadenza.engine.packing import Fragment
from cadenza.model_averaging.plans import kept_fragment

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
        average(_all_given(params, group), group, atomic=atomic)


def get_params_to_average(params: Params) -> list[torch.nn.Parameter]:
    """Return the parameters that have a gradient, from parameters or from an optimizer's parameter groups.

    >>> layer = torch.nn.Linear(2, 1)
    >>> layer.weight.grad = torch.zeros(1, 2)
    >>> get_params_to_average(layer.parameters()) == [layer.weight]
    True
    """
    return [param for param in _Given(params).tensors if param.grad is not None]


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
    average(_with_gradients(params, group), group, step=step, atomic=atomic)


def _all_given(params: Iterable[torch.Tensor], group: dist.ProcessGroup) -> Fragment:
    """Return all the given tensors as one fragment."""
    try:
        _refuse_lone(params)
        tensors = list(params)
        for i, tensor in enumerate(tensors):
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(f"Parameters are tensors; number {i} is of type {type(tensor).__name__}.")
        return kept_fragment(group, tensors)
    except TypeError as error:
        return Fragment([], problem=str(error))


def _with_gradients(params: Params, group: dist.ProcessGroup) -> Fragment:
    """Return the given parameters as one fragment in which those with a gradient take part.

    What is no parameter becomes the fragment's problem, which the round tells to every rank.
    """
    try:
        given = _Given(params)
    except (TypeError, NotImplementedError) as error:
        return Fragment([], problem=str(error))
    tensors = given.tensors
    del given.tensors  # a fragment that is kept shall not keep the parameters
    return kept_fragment(group, tensors, taking=[t.grad is not None for t in tensors], label=given.label)


class _Given:
    """The parameters that were given, or those of the groups that were, and a name for each of them."""

    def __init__(self, params: Params) -> None:
        _refuse_lone(params)
        self.tensors: list[torch.nn.Parameter] = []
        self._starts: list[int] = []
        self._names: dict[int, list[str]] = {}  # of the items that are groups
        for i, item in enumerate(params):
            self._starts.append(len(self.tensors))
            if isinstance(item, torch.nn.Parameter):
                self.tensors.append(item)
            elif isinstance(item, dict):
                of_group = list(item["params"])
                self.tensors += of_group
                self._names[i] = list(item.get("param_names") or [""] * len(of_group))
            else:
                raise NotImplementedError(f"Parameter input of type {type(item)} is not supported")

    def label(self, position: int) -> str:
        """Name a parameter for messages: by its position, and its own name where the optimizer knows it."""
        i = bisect_right(self._starts, position) - 1
        if i not in self._names:
            return f"parameter {i}"
        j = position - self._starts[i]
        name = self._names[i][j]
        return f"parameter {j} of group {i}" + (f" ({name})" if name else "")


def _refuse_lone(params: object) -> None:
    """Refuse what iterates, but surely not over parameters."""
    if isinstance(params, torch.Tensor | torch.nn.Module | dict | str) or not isinstance(params, Iterable):
        raise TypeError(
            "An iterable of parameters or an optimizer's param_groups is required, for instance model.parameters(); "
            f"got {type(params).__name__}."
        )

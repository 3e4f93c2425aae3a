"""Fragments that are kept from one averaging to the next: to read a thousand tensors takes a tenth of a fast round."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from cadenza.engine.packing import Fragment

__all__ = ["kept_fragment"]


@dataclass
class _Plan:
    """A fragment, what its tensors were when it was made, and who is watched so that it does not outlive them."""

    facts: list[tuple[object, ...]]
    fragment: Fragment
    watched: list[weakref.ref[torch.Tensor]]


_plans: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, int], _Plan]] = WeakKeyDictionary()


def kept_fragment(
    group: dist.ProcessGroup,
    tensors: Sequence[torch.Tensor],
    *,
    taking: Sequence[bool] | None = None,
    label: Callable[[int], str] = "parameter {}".format,
) -> Fragment:
    """Return the tensors as a fragment: the one of the last averaging over the group if nothing has changed since.

    Memory, shapes, strides, dtypes and who takes part are compared. A fragment that is kept goes when a parameter does;
    memory that a parameter has left (`p.data = …`) is kept until the next averaging.

    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> tensors = [torch.ones(2), torch.ones(3)]
    >>> fragment = kept_fragment(dist.group.WORLD, tensors)
    >>> kept_fragment(dist.group.WORLD, tensors) is fragment
    True
    >>> tensors[0].data = torch.ones(2)
    >>> kept_fragment(dist.group.WORLD, tensors) is fragment
    False
    >>> dist.destroy_process_group()
    """
    facts = _facts(tensors, taking)
    if not facts:
        return Fragment(tensors, taking=taking, label=label)
    plans = _plans.setdefault(group, {})
    place = (len(tensors), id(tensors[0]))
    plan = plans.get(place)
    if plan is None or plan.facts != facts:
        fragment = Fragment([tensor.detach() for tensor in tensors], taking=taking, label=label)
        if fragment.problem is not None:
            return fragment
        plan = plans[place] = _Plan(facts, fragment, _watch(tensors, lambda: plans.pop(place, None)))
    return plan.fragment


def _facts(tensors: Sequence[torch.Tensor], taking: Sequence[bool] | None) -> list[tuple[object, ...]]:
    """Return what a fragment depends on, or nothing for tensors of other kinds than torch's own, which may hide it.

    While a plan holds on to the memory, no other tensor can have its address.
    """
    if any(type(tensor) not in (torch.nn.Parameter, torch.Tensor) or tensor.is_sparse for tensor in tensors):
        return []
    return [
        (t.data_ptr(), t.dtype, t.shape, t.stride(), t.is_conj(), t.is_neg(), taking is None or taking[i])
        for i, t in enumerate(tensors)
    ]


def _watch(tensors: Sequence[torch.Tensor], forget: Callable[[], object]) -> list[weakref.ref[torch.Tensor]]:
    return [weakref.ref(tensor, lambda _: forget()) for tensor in tensors]

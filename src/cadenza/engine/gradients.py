"""The gradients of one step as one atomic round takes them: flat copies, which become the mean of those that count."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch

from cadenza.codecs import fp32
from cadenza.common.norms import norm_squared
from cadenza.engine.flat_mean import FlatRound, average_flat
from cadenza.engine.header import Header
from cadenza.engine.inside import header_of_replica
from cadenza.engine.opening import Scales
from cadenza.engine.replica import Replica
from cadenza.engine.round_result import RoundResult
from cadenza.errors import UnsupportedTensorError
from cadenza.participants.level_group import LevelGroup

__all__ = ["Gradients"]


class Gradients:
    """Copies of gradients, of all parameters: zeros where one has none, so that all members send the same.

    Args:
        replica: Whose parameters they belong to.
        own: The gradients, by the parameters' names.
        idle: Whether they do not count.
    """

    def __init__(self, replica: Replica, own: Mapping[str, torch.Tensor], *, idle: bool) -> None:
        parameters = replica.view.parameters()
        self._own, self._idle = own, idle
        self._tensors = {name: _like(name, p, own.get(name)) for name, p in parameters.items()}
        self._layout = replica.layout_of(self._tensors)
        self._flats = self._layout.pack()
        self._found: set[str] | None = None

    @property
    def digest(self) -> bytes:
        """What must be the same on all members."""
        return self._layout.fragment.digest

    def exchange(self, group: LevelGroup, scales: Scales, *, step: int, apart: bool) -> RoundResult:
        """Replace the copies by their mean; `apart` tells the others that this member's parameters may be others."""
        weight, norm2 = 0.0 if self._idle else 1.0, norm_squared(*self._flats)
        header = Header(step, self.digest, able=True, atomic=True, weight=weight, norm2=norm2, steps=int(apart))
        problem = None if math.isfinite(norm2) else "gradients are not finite"
        header, problem = header_of_replica(header, problem, group.island)
        if problem is not None:
            header = replace(header, weight=0.0, norm2=0.0, faulty=True)
            for flat in self._flats:
                flat.zero_()
        work = FlatRound(self._flats, [fp32()] * len(self._flats), scales)
        result = average_flat(work, group, header, problem=None, describe=self._layout.fragment.describe)
        mine = bytes(name in self._own for name in self._tensors)
        replies = [mine] if group.alone else group.transport.exchange(mine)()
        if not result.weightless:
            self._found = {name for name, *has in zip(self._tensors, *replies, strict=True) if any(has)}
        return result

    def means(self) -> dict[str, torch.Tensor] | None:
        """Give this worker's gradients their means, and return those of all members; None if nobody had finite ones."""
        if self._found is None:
            return None
        self._layout.unpack(self._flats)
        return {name: tensor for name, tensor in self._tensors.items() if name in self._found}


def _like(name: str, parameter: torch.Tensor, gradient: torch.Tensor | None) -> torch.Tensor:
    """Return a gradient that lies in memory as its parameter does; zeros where there is none."""
    if gradient is None:
        return torch.zeros_like(parameter)
    if gradient.layout != torch.strided:
        raise UnsupportedTensorError(
            f"The gradient of {name} has layout {gradient.layout}; only dense (strided) ones can be averaged: use "
            "sparse=False, or warmup_steps=0."
        )
    if gradient.stride() == parameter.stride() and gradient.dtype == parameter.dtype:
        return gradient
    return torch.empty_like(parameter).copy_(gradient)

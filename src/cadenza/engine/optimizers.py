"""The optimizer that holds the state, taken out of the wrappers that frameworks put around it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["plain_optimizers"]


def plain_optimizers(given: Any) -> list[torch.optim.Optimizer]:
    """Return one optimizer or several as a list, each without wrappers: Accelerate's, Lightning's, any `.optimizer`.

    A wrapper may leave a step out (when gradients are accumulated, or not finite), so what is counted is the step of
    the optimizer inside.

    >>> class Wrapper:
    ...     optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    >>> plain_optimizers(Wrapper()) == plain_optimizers([Wrapper.optimizer])
    True
    """
    several = given if isinstance(given, Sequence) and not isinstance(given, str) else [given]
    return [_plain(optimizer) for optimizer in several]


def _plain(optimizer: Any) -> Any:
    inner = getattr(optimizer, "optimizer", None)
    return _plain(inner) if isinstance(inner, torch.optim.Optimizer) else optimizer

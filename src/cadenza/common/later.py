"""torch, imported when it is first used: a strategy is described and checked, and a mistake in it told, without it.

What the command line needs before it starts workers says `from cadenza.common.later import torch`, and uses it inside
functions only.

>>> torch.zeros(2).sum().item()
0.0
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
else:

    class _Later:
        """Stands for a module that is imported when something of it is asked for."""

        def __init__(self, name: str) -> None:
            self._name = name

        def __getattr__(self, name: str) -> Any:
            value = self.__dict__[name] = getattr(import_module(self._name), name)
            return value

    torch, dist = _Later("torch"), _Later("torch.distributed")

__all__ = ["dist", "torch"]

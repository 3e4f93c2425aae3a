"""Noticing that a model was given other values behind the synchronizer's back: `model.load_state_dict` after `attach`.

Anchors are what all workers started from. If the parameters are replaced and the anchors are not, the next round takes
the whole distance between the two for progress, and moves the model by it.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch

from cadenza.common.checksums import checksum

__all__ = ["ModelRewrites"]


class ModelRewrites:
    """Watches a module's `load_state_dict`.

    Attributes:
        found: Whether the values are others than before it was called.
        expected: Whether values may be replaced now: a state was loaded, and training has not gone on since.

    >>> model = torch.nn.Linear(1, 1)
    >>> rewrites, kept = ModelRewrites(model), {name: value.clone() for name, value in model.state_dict().items()}
    >>> _ = model.load_state_dict({"weight": torch.ones(1, 1), "bias": torch.ones(1)}); rewrites.found
    True
    >>> _ = model.load_state_dict(kept); rewrites.found  # as it was, so nothing has happened
    False
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.found = False
        self.expected = False
        self._before: int | None = None
        _watched[module] = self
        self._handles = [
            module.register_load_state_dict_pre_hook(_before_loading),
            module.register_load_state_dict_post_hook(_after_loading),
        ]

    def begin(self, module: torch.nn.Module) -> None:
        """Remember the values, unless they were replaced already."""
        if not self.found:
            self._before = _sum(module)

    def end(self, module: torch.nn.Module) -> None:
        """Compare the values with those before the first replacement."""
        self.found = not self.expected and _sum(module) != self._before

    def forgive(self) -> None:
        """Take the values as they are, also those that are loaded before training goes on."""
        self.found, self.expected = False, True

    def was_rewritten(self) -> bool:
        """Say whether values were replaced since training last went on, as it does now."""
        found, self.found, self.expected = self.found, False, False
        return found

    def close(self) -> None:
        """Watch no more."""
        for handle in self._handles:
            handle.remove()


# The hooks are plain functions, so that a module that is watched can be copied and pickled like any other.
_watched: WeakKeyDictionary[torch.nn.Module, ModelRewrites] = WeakKeyDictionary()


def _before_loading(module: torch.nn.Module, *_: Any) -> None:
    if (rewrites := _watched.get(module)) is not None:
        rewrites.begin(module)


def _after_loading(module: torch.nn.Module, _: Any) -> None:
    if (rewrites := _watched.get(module)) is not None:
        rewrites.end(module)


def _sum(module: torch.nn.Module) -> int:
    found = (p.to_local() if hasattr(p, "to_local") else p for p in module.parameters())
    return sum((i + 1) * checksum(part.detach()) for i, part in enumerate(found) if part.numel() and not part.is_meta)

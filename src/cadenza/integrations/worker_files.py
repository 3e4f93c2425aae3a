"""Every worker's own state beside a framework's checkpoint, of which frameworks write the first rank's alone.

It lies in a folder `cadenza` inside the checkpoint: what is trained, the optimizer's state, the synchronizer's, random
numbers. Frozen parameters are in the framework's own file, so a worker's file of a LoRA run is a small one.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch

from cadenza import checkpoint
from cadenza.checkpoint.folders import collect_part
from cadenza.engine.model_view import ModelView
from cadenza.engine.synchronizer import Synchronizer

__all__ = ["has_workers", "load_worker", "save_worker"]

_FOLDER = "cadenza"


def save_worker(folder: str | Path, sync: Synchronizer, extra: Mapping[str, Any] | None = None) -> None:
    """Write this worker's part into a framework's checkpoint; all workers do so, and none waits for another.

    What is there of an earlier run is written over, as frameworks do.
    """
    view = sync.replica.view
    part = collect_part(_trained(view), view.optimizers, sync, extra)
    part.write(Path(folder) / _FOLDER, shared=part.place.position == 0, overwrite=True)


def load_worker(folder: str | Path, sync: Synchronizer) -> dict[str, Any]:
    """Go on from what this worker saved; return its `extra`."""
    view = sync.replica.view
    return checkpoint.load(Path(folder) / _FOLDER, model=_trained(view), optimizer=view.optimizers, sync=sync) or {}


def has_workers(folder: str | Path) -> bool:
    """Say whether a framework's checkpoint holds the workers' own state.

    >>> has_workers("/not/there")
    False
    """
    return (Path(folder) / _FOLDER).is_dir()


def _trained(view: ModelView) -> torch.nn.Module:
    return cast(torch.nn.Module, _TrainedPart(view))


class _TrainedPart:
    """What differs between workers of a model: what is trained, and buffers; as much of a module as checkpoints use."""

    def __init__(self, view: ModelView) -> None:
        self._view = view

    def state_dict(self) -> dict[str, torch.Tensor]:
        frozen = self._view.all_parameters().keys() - self._view.parameters().keys()
        return {name: tensor.detach() for name, tensor in self._view.everything().items() if name not in frozen}

    @torch.no_grad()
    def load_state_dict(self, values: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in self.state_dict().items():
            tensor.copy_(values[name])

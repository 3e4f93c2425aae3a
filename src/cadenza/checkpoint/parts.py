"""Checkpoints of workers that come and go: a part for each worker, and one that all share, written by whoever leads.

The folder is that of `save`, and so are the files, but it counts as soon as the shared part and one worker's part
belong together: a worker whose part is missing, or was saved beside another round, goes on from another worker's part
and from what was agreed on, the anchor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from cadenza.checkpoint.files import Manifest, read_manifest, read_state, verify, write_state
from cadenza.checkpoint.loop import collect_loop, prepare_loop, read_loop
from cadenza.common.checksums import fingerprint
from cadenza.engine.saving import FORMAT, collect
from cadenza.engine.synchronizer import Synchronizer
from cadenza.errors import CheckpointError

__all__ = ["Found", "find", "load_part", "save_part", "take_up"]

_SHARED = "shared.safetensors"


def save_part(
    folder: Path,
    worker: int,
    *,
    leads: bool,
    model: torch.nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    sync: Synchronizer,
    extra: Mapping[str, Any],
) -> int:
    """Write a worker's part of a checkpoint and, if it leads, what all share; return the bytes of its part."""
    state = collect(sync.replica)
    place = sync.replica.place()
    state |= collect_loop(place.worker_root, model, optimizers, extra)
    mark = fingerprint(state, place.shared_root)
    folder.mkdir(parents=True, exist_ok=True)
    describe = partial(Manifest, FORMAT, step=sync.clock, fingerprint=mark)
    mine, shared = ({key: state[key] for key in state if key.startswith(f"{root}/")} for root in _roots(worker))
    write_state(folder / _file(worker), mine, describe)
    if leads:
        write_state(folder / _SHARED, shared, partial(describe, workers=list(place.workers)))
    return sum(path.stat().st_size for path in folder.glob(f"worker-{worker:05}.*"))


@dataclass(frozen=True)
class Found:
    """A checkpoint that can be gone on from, and whose part of it a worker takes."""

    folder: Path
    worker: int


def find(folder: Path, worker: int, *, verified: bool = True) -> Found:
    """Return whose part of a checkpoint a worker goes on from: its own, if it belongs to what is shared.

    Args:
        folder: The checkpoint.
        worker: Who asks.
        verified: Whether to read all bytes of what is found.

    Raises:
        CheckpointError: Nobody can go on from it.
    """
    shared = read_manifest(folder / _SHARED)
    if verified:
        verify(folder / _SHARED, shared)
    others = sorted(int(path.stem.rpartition("-")[2]) for path in folder.glob("worker-*.json"))
    problem = CheckpointError(f"{folder} has no worker's part that belongs to what all share.")
    for number in [worker, *(other for other in others if other != worker)]:
        path = folder / _file(number)
        try:
            manifest = read_manifest(path)
            if manifest.fingerprint != shared.fingerprint:
                continue
            if verified:
                verify(path, manifest)
        except CheckpointError as error:
            problem = error
            continue
        return Found(folder, number)
    raise problem


def load_part(
    found: Found,
    *,
    worker: int,
    model: torch.nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    sync: Synchronizer,
) -> dict[str, Any]:
    """Go on from a checkpoint; return the `extra` of the part that was taken."""
    state = read_state(found.folder / _SHARED) | read_state(found.folder / _file(found.worker))
    restoration = sync.prepare_to_load(state, worker=found.worker)
    loop = prepare_loop(state, restoration, model, optimizers)
    loop.apply()
    restoration.apply()
    if found.worker != worker:  # another's progress since the last round is its own
        sync.replica.start_from_anchors()
    return loop.extra or {}


def take_up(folder: Path, worker: int, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Any]:
    """Give a worker's optimizers what its part of a checkpoint holds, and return its `extra`.

    For one that has taken all else from the others.
    """
    path = folder / _file(worker)
    verify(path, read_manifest(path))
    states, extra = read_loop(read_state(path), worker, optimizers)
    for optimizer, state in zip(optimizers, states, strict=True):
        optimizer.load_state_dict(state)
    return extra


def _file(worker: int) -> str:
    return f"worker-{worker:05}.safetensors"


def _roots(worker: int) -> tuple[str, str]:
    return f"worker/{worker}", "shared"

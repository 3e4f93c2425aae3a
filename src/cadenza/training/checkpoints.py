"""The checkpoints of a run: which one to go on from, which ones to keep.

Only worker 0 decides and deletes. A newer checkpoint that is not whole, because a crash came while it was written or
because it was damaged since, is set aside under `checkpoints/set-aside`, and said to be.
"""

from __future__ import annotations

import os
import re
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from cadenza.checkpoint import latest
from cadenza.checkpoint.files import read_manifest
from cadenza.errors import CheckpointError, UsageError
from cadenza.training.runs import Run

__all__ = ["Choice", "agree_on_checkpoint", "checkpoint_folders", "choose_checkpoint", "prune", "set_aside"]

_SET_ASIDE = "set-aside"
_NAME = re.compile(r"step-\d+")


@dataclass(frozen=True)
class Choice:
    """The checkpoint to go on from, None for a start from the beginning, and what to say of those that were not."""

    folder: Path | None
    warnings: tuple[str, ...] = ()


def choose_checkpoint(run: Run) -> Choice:
    """Return the newest whole checkpoint of a run, verified, and set aside what is newer and not whole."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        folder = latest(run.checkpoints)
    newer = [path for path in checkpoint_folders(run) if folder is None or path.name > folder.name]
    for path in newer:
        set_aside(run, path)
    told = tuple(str(one.message) for one in caught if issubclass(one.category, UserWarning))
    return Choice(folder, told)


def set_aside(run: Run, path: Path) -> None:
    """Put a checkpoint where it is in nobody's way."""
    aside = run.checkpoints / _SET_ASIDE / path.name
    shutil.rmtree(aside, ignore_errors=True)
    aside.parent.mkdir(exist_ok=True)
    os.replace(path, aside)


def agree_on_checkpoint(run: Run, store: dist.Store, *, worker: int) -> Choice:
    """Return worker 0's choice, on every worker; the warnings are worker 0's to pass on."""
    store = dist.PrefixStore("cadenza/resume", store)
    if worker == 0:
        choice = choose_checkpoint(run)
        store.set("name", choice.folder.name if choice.folder else "none")
        return choice
    name = store.get("name").decode()
    if name == "none":
        return Choice(None)
    folder = run.checkpoints / name
    if not folder.is_dir():
        raise UsageError(
            f"Worker 0 goes on from {folder}, which worker {worker} cannot see: the run must be in a folder that all "
            "nodes share."
        )
    return Choice(folder)


def prune(run: Run, keep: int) -> None:
    """Delete all but the newest `keep` complete checkpoints; one that is being written is newer, and stays."""
    complete = [path for path in checkpoint_folders(run) if _is_complete(path)]
    if not complete:
        return
    kept = set(complete[-keep:])
    for path in checkpoint_folders(run):
        if path not in kept and path.name < complete[-1].name:
            shutil.rmtree(path, ignore_errors=True)


def checkpoint_folders(run: Run) -> list[Path]:
    """Return the folders of all checkpoints, the oldest first."""
    if not run.checkpoints.is_dir():
        return []
    return sorted(path for path in run.checkpoints.iterdir() if _NAME.fullmatch(path.name) and path.is_dir())


def _is_complete(folder: Path) -> bool:
    """Say whether all workers have finished writing; what they wrote is not read again."""
    try:
        workers = read_manifest(folder / "shared.safetensors").workers or []
        for worker in workers:
            read_manifest(folder / f"worker-{worker:05}.safetensors")
    except CheckpointError:
        return False
    return bool(workers)

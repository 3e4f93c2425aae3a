"""A checkpoint is a folder: a file for each worker, and one for what they share."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from cadenza.checkpoint.files import Manifest, read_manifest, read_state, write_state
from cadenza.checkpoint.files import verify as verify_file
from cadenza.checkpoint.layout import is_checkpoint_file, manifests, shared_file, worker_file
from cadenza.checkpoint.loop import belongs_to_loop, collect_loop, prepare_loop, read_loop
from cadenza.checkpoint.selection import Selection, select_whole
from cadenza.common.checksums import fingerprint
from cadenza.engine.optimizers import plain_optimizers
from cadenza.engine.place import Place
from cadenza.engine.saving import FORMAT, State, collect
from cadenza.engine.synchronizer import Synchronizer
from cadenza.errors import CheckpointError

__all__ = ["Part", "collect_part", "latest", "load", "load_optimizers", "restore", "save"]


def save(
    folder: str | Path,
    *,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    sync: Synchronizer,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Write this worker's part of a checkpoint; every worker calls it at the same step, and none waits for another.

    Rounds in flight are waited for and written, but not landed: saving does not change what comes after. Where workers
    come and go, one that was left out of the last round takes nothing from the others' checkpoint.

    Args:
        folder: The checkpoint's own folder, a new one for each: an earlier whole checkpoint is never overwritten.
        model: The model that was given to `attach`.
        optimizer: The optimizer or optimizers that were given to `attach`.
        sync: The synchronizer.
        extra: What else this worker shall find again, such as the position in its data or the `state_dict()` of a
            learning rate schedule: a dict of tensors, numbers, texts, lists, tuples and dicts of them.

    >>> import os, tempfile, torch.distributed as dist, cadenza
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> sync = cadenza.attach(model, optimizer, cadenza.diloco(period=4))
    >>> folder = tempfile.mkdtemp()
    >>> save(folder, model=model, optimizer=optimizer, sync=sync)
    >>> sorted(os.listdir(folder))
    ['shared.json', 'shared.safetensors', 'worker-00000.json', 'worker-00000.safetensors']
    >>> dist.destroy_process_group()
    """
    part = collect_part(model, plain_optimizers(optimizer), sync, extra)
    part.write(Path(folder), shared=part.place.position == 0, overwrite=False)


def load(
    folder: str | Path,
    *,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    sync: Synchronizer,
    verify: Literal["all", "own"] = "all",
) -> dict[str, Any] | None:
    """Go on from a checkpoint: restore model, optimizer, synchronizer and random numbers, after `attach`.

    As many workers as saved resume bit for bit. Another number goes on as well: worker j takes the model and the
    optimizer of entry j mod N, anchors and outer state are shared by all, residuals become the mean of the old ones.
    Files are verified first, and nothing is changed unless everything fits.

    Args:
        folder: The checkpoint, for instance `latest(root)`.
        model: The model that was given to `attach`.
        optimizer: The optimizer or optimizers that were given to `attach`.
        sync: The synchronizer.
        verify: Whether this worker verifies the files of all workers, so that all find the same damage, or only those
            that it reads, which with very many workers is quicker.

    Returns:
        The `extra` that the worker had saved.

    >>> import tempfile, torch.distributed as dist, cadenza
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> sync = cadenza.attach(model, optimizer, cadenza.diloco(period=4))
    >>> parts = {"model": model, "optimizer": optimizer, "sync": sync}
    >>> folder = tempfile.mkdtemp()
    >>> save(folder, **parts, extra={"epoch": 1})
    >>> sync.step()
    >>> load(folder, **parts)
    {'epoch': 1}
    >>> sync.clock
    0
    >>> dist.destroy_process_group()
    """
    selection = select_whole(Path(folder), sync.replica.place(), verify_files=verify)
    return restore(selection, model, plain_optimizers(optimizer), sync)


def latest(root: str | Path) -> Path | None:
    """Return the newest whole checkpoint among the folders in `root`, or None; warn of those that are not whole.

    Every rank that sees the same files comes to the same answer.

    >>> latest("/a/folder/that/is/not/there") is None
    True
    """
    root = Path(root)
    folders = [path for path in root.iterdir() if path.is_dir()] if root.is_dir() else []
    begun = [folder for folder in folders if any(is_checkpoint_file(path.name) for path in folder.iterdir())]
    for folder in sorted(begun, key=_age, reverse=True):
        try:
            for name, manifest in manifests(folder).items():
                verify_file(folder / name, manifest)
        except CheckpointError as error:
            warnings.warn(f"{folder} is not a whole checkpoint and is left out. {error}", stacklevel=2)
        else:
            return folder
    return None


# ---- one worker's part -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """What one worker adds to a checkpoint; the tensors are those in use, to be written before training goes on."""

    state: State
    place: Place
    step: int
    fingerprint: str
    held: int = 0

    def write(self, folder: Path, *, shared: bool, overwrite: bool) -> int:
        """Write this worker's file; return its size in bytes, the manifest's included.

        A worker whose state has seen fewer rounds than the shared one in the folder was left out of the last: it adds
        its own file alone, which nobody needs.

        Args:
            folder: The checkpoint.
            shared: Whether this worker also writes what all share; one of them does.
            overwrite: Whether files of another whole checkpoint in the folder may be replaced.
        """
        left_out = self._was_left_out(folder)
        if not (overwrite or left_out):
            _refuse_overwriting(folder, self.fingerprint)
        folder.mkdir(parents=True, exist_ok=True)
        place = self.place
        describe = partial(Manifest, FORMAT, step=self.step, fingerprint=self.fingerprint, held=self.held)
        path = folder / worker_file(place.worker)
        write_state(path, self._below(place.worker_root), describe)
        if shared and not left_out:
            describe_shared = partial(describe, workers=list(place.workers))
            write_state(
                folder / shared_file(place.shard, place.shards), self._below(place.shared_root), describe_shared
            )
        return sum(file.stat().st_size for file in folder.glob(f"{path.stem}.*"))

    def _was_left_out(self, folder: Path) -> bool:
        """Tell whether others have saved this step after a round without this worker, which may not know of it yet."""
        try:
            standing = read_manifest(folder / shared_file(self.place.shard, self.place.shards))
        except CheckpointError:
            return False
        return (standing.step, standing.fingerprint) != (self.step, self.fingerprint) and standing.held > self.held

    def _below(self, root: str) -> State:
        return {key: value for key, value in self.state.items() if key.startswith(f"{root}/")}


def collect_part(
    model: torch.nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    sync: Synchronizer,
    extra: Mapping[str, Any] | None,
) -> Part:
    """Return this worker's part of a checkpoint; rounds in flight are waited for, but not landed."""
    state = collect(sync.replica)
    place = sync.replica.place()
    state |= collect_loop(place.worker_root, model, optimizers, extra)
    held = sync.replica.participants.held
    return Part(state, place, sync.clock, fingerprint(state, place.shared_root), held)


def restore(
    selection: Selection, model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], sync: Synchronizer
) -> dict[str, Any] | None:
    """Go on from the selected files, which were verified; return the `extra` that was saved with them."""
    folder = selection.folder
    state = read_state(folder / selection.shared) | read_state(folder / selection.mine)
    for name in selection.residuals:
        state |= read_state(folder / name, leave=belongs_to_loop)
    restoration = sync.prepare_to_load(state, worker=selection.worker)
    loop = prepare_loop(state, restoration, model, optimizers)
    loop.apply()
    restoration.apply()
    if not selection.own:  # what another worker did since the last round stays its own
        sync.replica.start_from_anchors()
    return loop.extra


def load_optimizers(folder: Path, worker: int, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Any]:
    """Give the optimizers what a worker's file holds, and return its `extra`.

    For a worker that has taken the model and all that is shared from the others.
    """
    path = folder / worker_file(worker)
    verify_file(path, read_manifest(path))
    states, extra = read_loop(read_state(path), worker, optimizers)
    for optimizer, state in zip(optimizers, states, strict=True):
        optimizer.load_state_dict(state)
    return extra


def _refuse_overwriting(folder: Path, fingerprint: str) -> None:
    """Keep a whole checkpoint; what is left of one that was not finished may go."""
    try:
        files = manifests(folder)
    except CheckpointError:
        return
    if all(manifest.fingerprint != fingerprint for manifest in files.values()):
        step = next(iter(files.values())).step
        raise CheckpointError(
            f"{folder} holds a whole checkpoint of step {step}, which a crash while overwriting it would destroy. Give "
            'every checkpoint a folder of its own, such as f"{root}/step-{sync.clock:08}".'
        )


def _age(folder: Path) -> tuple[float, str]:
    """Return the step of a checkpoint; one that says none is looked at first, so that it is warned of."""
    steps = []
    for path in folder.glob("*.json"):
        with suppress(CheckpointError):
            steps.append(read_manifest(path.with_suffix(".safetensors")).step)
    return max(steps, default=math.inf), folder.name

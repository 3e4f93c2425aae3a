"""A checkpoint is a folder: a file for each worker, and one for what they share."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from cadenza.checkpoint.files import Manifest, read_manifest, read_state, write_state
from cadenza.checkpoint.files import verify as verify_file
from cadenza.checkpoint.loop import belongs_to_loop, collect_loop, optimizers_of, prepare_loop
from cadenza.common.checksums import fingerprint
from cadenza.engine.saving import FORMAT, State, collect
from cadenza.engine.synchronizer import Synchronizer
from cadenza.errors import CheckpointError

__all__ = ["latest", "load", "save"]

_FILE = re.compile(r"(?:worker-\d+|shared(?:-\d+-of-\d+)?)\.(?:json|safetensors)(?:\.partial)?")
_SHARD = re.compile(r"shared-\d+-of-(\d+)\.json")


def save(
    folder: str | Path,
    *,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    sync: Synchronizer,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Write this worker's part of a checkpoint; every worker calls it at the same step, and none waits for another.

    Rounds in flight are waited for and written, but not landed: saving does not change what comes after.

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
    folder = Path(folder)
    state = collect(sync.replica)
    place = sync.replica.place()
    state |= collect_loop(place.worker_root, model, optimizers_of(optimizer), extra)
    mark = fingerprint(state, place.shared_root)
    _refuse_overwriting(folder, mark)
    folder.mkdir(parents=True, exist_ok=True)
    describe = partial(Manifest, FORMAT, step=sync.clock, fingerprint=mark)
    write_state(folder / _worker_file(place.worker), _below(state, place.worker_root), describe)
    if place.position == 0:
        workers = list(place.workers)
        write_state(
            folder / _shared_file(place.shard, place.shards),
            _below(state, place.shared_root),
            partial(describe, workers=workers),
        )


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
    folder = Path(folder)
    files = _files(folder)
    place = sync.replica.place()
    shared = _shared_file(place.shard, place.shards)
    if shared not in files:
        raise CheckpointError(
            f"{folder} holds a model in {_shards(folder)} shards; here it is in {place.shards}. Shard it as it was. "
            "Nothing was changed."
        )
    workers = files[shared].workers or []
    mine = _worker_file(workers[place.position % len(workers)])
    same = len(workers) == len(place.workers)
    read = [shared, mine] if same else [shared, *(_worker_file(worker) for worker in workers)]
    for name in files if verify == "all" else read:
        verify_file(folder / name, files[name])
    state: State = {}
    for name in read:
        state |= read_state(folder / name, leave=None if name in (shared, mine) else belongs_to_loop)
    restoration = sync.prepare_to_load(state)
    loop = prepare_loop(state, restoration, model, optimizers_of(optimizer))
    loop.apply()
    restoration.apply()
    return loop.extra


def latest(root: str | Path) -> Path | None:
    """Return the newest whole checkpoint among the folders in `root`, or None; warn of those that are not whole.

    Every rank that sees the same files comes to the same answer.

    >>> latest("/a/folder/that/is/not/there") is None
    True
    """
    root = Path(root)
    folders = [path for path in root.iterdir() if path.is_dir()] if root.is_dir() else []
    begun = [folder for folder in folders if any(_FILE.fullmatch(path.name) for path in folder.iterdir())]
    for folder in sorted(begun, key=_age, reverse=True):
        try:
            for name, manifest in _files(folder).items():
                verify_file(folder / name, manifest)
        except CheckpointError as error:
            warnings.warn(f"{folder} is not a whole checkpoint and is left out. {error}", stacklevel=2)
        else:
            return folder
    return None


# ---- the files of a folder -------------------------------------------------------------------------------------------


def _worker_file(worker: int) -> str:
    return f"worker-{worker:05}.safetensors"


def _shared_file(shard: int, shards: int) -> str:
    return "shared.safetensors" if shards == 1 else f"shared-{shard:05}-of-{shards:05}.safetensors"


def _files(folder: Path) -> dict[str, Manifest]:
    """Return the manifests of all files that belong to a checkpoint, by the files' names; raise if one is missing."""
    found: dict[str, Manifest] = {}
    shards = _shards(folder)
    for shard in range(shards):
        name = _shared_file(shard, shards)
        shared = found[name] = read_manifest(folder / name)
        if not shared.workers:
            raise CheckpointError(f"{folder / name} names no workers, so it is not what was written.")
        for worker in shared.workers:
            file = _worker_file(worker)
            found[file] = read_manifest(folder / file)
            if found[file].fingerprint != shared.fingerprint:
                raise CheckpointError(
                    f"{folder / file} (step {found[file].step}) and {folder / name} (step {shared.step}) were not "
                    "saved together."
                )
    return found


def _shards(folder: Path) -> int:
    """Return into how many shards the model of a checkpoint is cut."""
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    counts = [int(found.group(1)) for found in map(_SHARD.fullmatch, names) if found]
    return 1 if not counts or "shared.json" in names else counts[0]


def _refuse_overwriting(folder: Path, fingerprint: str) -> None:
    """Keep a whole checkpoint; what is left of one that was not finished may go."""
    try:
        files = _files(folder)
    except CheckpointError:
        return
    if all(manifest.fingerprint != fingerprint for manifest in files.values()):
        step = next(iter(files.values())).step
        raise CheckpointError(
            f"{folder} holds a whole checkpoint of step {step}, which a crash while overwriting it would destroy. Give "
            'every checkpoint a folder of its own, such as f"{root}/step-{sync.clock:08}".'
        )


def _below(state: State, root: str) -> State:
    return {key: value for key, value in state.items() if key.startswith(f"{root}/")}


def _age(folder: Path) -> tuple[float, str]:
    """Return the step of a checkpoint; one that says none is looked at first, so that it is warned of."""
    steps = []
    for path in folder.glob("*.json"):
        with suppress(CheckpointError):
            steps.append(read_manifest(path.with_suffix(".safetensors")).step)
    return max(steps, default=math.inf), folder.name

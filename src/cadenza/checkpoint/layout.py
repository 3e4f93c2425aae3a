"""The files of a checkpoint's folder: one for each worker, and one for what they share, or one for each shard of it."""

from __future__ import annotations

import re
from pathlib import Path

from cadenza.checkpoint.files import Manifest, read_manifest
from cadenza.errors import CheckpointError

__all__ = ["is_checkpoint_file", "manifests", "number_of_shards", "shared_file", "worker_file", "workers_of"]

_FILE = re.compile(r"(?:worker-\d+|shared(?:-\d+-of-\d+)?)\.(?:json|safetensors)(?:\.partial)?")
_WORKER = re.compile(r"worker-(\d+)\.json")
_SHARD = re.compile(r"shared-\d+-of-(\d+)\.json")


def worker_file(worker: int) -> str:
    """Return the name of a worker's file.

    >>> worker_file(3)
    'worker-00003.safetensors'
    """
    return f"worker-{worker:05}.safetensors"


def shared_file(shard: int = 0, shards: int = 1) -> str:
    """Return the name of the file with what all workers share, of one shard of the model.

    >>> shared_file(), shared_file(1, 2)
    ('shared.safetensors', 'shared-00001-of-00002.safetensors')
    """
    return "shared.safetensors" if shards == 1 else f"shared-{shard:05}-of-{shards:05}.safetensors"


def is_checkpoint_file(name: str) -> bool:
    """Tell whether a file belongs to a checkpoint, finished or not.

    >>> is_checkpoint_file("worker-00003.safetensors.partial"), is_checkpoint_file("notes.txt")
    (True, False)
    """
    return _FILE.fullmatch(name) is not None


def workers_of(folder: Path) -> list[int]:
    """Return the workers that have finished their files in a folder, ascending.

    >>> workers_of(Path("/a/folder/that/is/not/there"))
    []
    """
    found = (_WORKER.fullmatch(path.name) for path in folder.glob("worker-*.json"))
    return sorted({int(match[1]) for match in found if match})


def number_of_shards(folder: Path) -> int:
    """Return into how many shards the model of a checkpoint is cut.

    >>> number_of_shards(Path("/a/folder/that/is/not/there"))
    1
    """
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    counts = [int(found.group(1)) for found in map(_SHARD.fullmatch, names) if found]
    return 1 if not counts or "shared.json" in names else counts[0]


def manifests(folder: Path) -> dict[str, Manifest]:
    """Return the manifests of all files that belong to a checkpoint, by the files' names; raise if one is missing.

    >>> manifests(Path("/not/there"))
    Traceback (most recent call last):
      ...
    cadenza.errors.CheckpointError: /not/there/shared.safetensors is missing: it was lost, or never written to the end.
    """
    found: dict[str, Manifest] = {}
    shards = number_of_shards(folder)
    for shard in range(shards):
        name = shared_file(shard, shards)
        shared = found[name] = read_manifest(folder / name)
        if not shared.workers:
            raise CheckpointError(f"{folder / name} names no workers, so it is not what was written.")
        for worker in shared.workers:
            file = worker_file(worker)
            found[file] = read_manifest(folder / file)
            if found[file].fingerprint != shared.fingerprint:
                raise CheckpointError(
                    f"{folder / file} (step {found[file].step}) and {folder / name} (step {shared.step}) were not "
                    "saved together."
                )
    return found

"""Which files of a checkpoint a worker goes on from, and whether they are what was written.

Fixed workers go on from a whole checkpoint only: the files of all workers must be there. Elastic workers, of whom some
may have died while they saved, go on as soon as the shared file and one worker's file belong together: a worker whose
own file is missing, or was saved beside another round, takes another worker's file and the shared anchor.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, TypeAlias

from cadenza.checkpoint.files import Manifest, read_manifest, verify
from cadenza.checkpoint.layout import manifests, number_of_shards, shared_file, worker_file, workers_of
from cadenza.engine.place import Place
from cadenza.errors import CheckpointError

__all__ = ["Selection", "Selector", "Verify", "select_any_part", "select_whole"]

Verify: TypeAlias = Literal["all", "own", "nothing"]


@dataclass(frozen=True)
class Selection:
    """The files that a worker reads of a checkpoint.

    Attributes:
        folder: The checkpoint.
        shared: The file with what all workers share.
        mine: The file of the worker whose place this one takes: its own, if that is there.
        residuals: Files of other workers of which only the residuals are read, to take their mean.
        worker: The worker that `mine` is of, where workers are known by number; None where positions decide.
        own: Whether `mine` may be gone on from as it is; if not, this worker begins at the anchor.
    """

    folder: Path
    shared: str
    mine: str
    residuals: tuple[str, ...] = ()
    worker: int | None = None
    own: bool = True


class Selector(Protocol):
    """Chooses the files that a worker at some place goes on from.

    Raises:
        CheckpointError: Nobody can go on from this checkpoint.
    """

    def __call__(self, folder: Path, place: Place, *, verify_files: Verify = "all") -> Selection: ...


def select_whole(folder: Path, place: Place, *, verify_files: Verify = "all") -> Selection:
    """Choose by position: worker j of a checkpoint of N workers reads file j mod N; all files must be there.

    >>> select_whole(Path("/not/there"), Place((0,), position=0, shard=0, shards=1))
    Traceback (most recent call last):
      ...
    cadenza.errors.CheckpointError: /not/there/shared.safetensors is missing: it was lost, or never written to the end.
    """
    files = manifests(folder)
    shared = shared_file(place.shard, place.shards)
    if shared not in files:
        raise CheckpointError(
            f"{folder} holds a model in {number_of_shards(folder)} shards; here it is in {place.shards}. Shard it as "
            "it was. Nothing was changed."
        )
    workers = files[shared].workers or []
    mine = worker_file(workers[place.position % len(workers)])
    same = len(workers) == len(place.workers)
    residuals = () if same else tuple(name for name in map(worker_file, workers) if name != mine)
    names = {"all": tuple(files), "own": (shared, mine, *residuals), "nothing": ()}[verify_files]
    for name in names:
        verify(folder / name, files[name])
    return Selection(folder, shared, mine, residuals)


def select_any_part(folder: Path, place: Place, *, verify_files: Verify = "all") -> Selection:
    """Choose by number: a worker reads its own file, or another's if its own does not belong to what is shared.

    Only files that this worker reads are verified.

    >>> select_any_part(Path("/not/there"), Place((0,), position=0, shard=0, shards=1))
    Traceback (most recent call last):
      ...
    cadenza.errors.CheckpointError: /not/there/shared.safetensors is missing: it was lost, or never written to the end.
    """
    name = shared_file()
    shared = read_manifest(folder / name)
    if verify_files != "nothing":
        verify(folder / name, shared)
    problem = CheckpointError(f"{folder} has no worker's part that belongs to what all share.")
    for worker in dict.fromkeys([place.worker, *workers_of(folder)]):
        try:
            if _belongs(folder / worker_file(worker), shared, verify_files):
                return Selection(folder, name, worker_file(worker), worker=worker, own=worker == place.worker)
        except CheckpointError as error:
            problem = error
    raise problem


def _belongs(path: Path, shared: Manifest, verify_files: Verify) -> bool:
    manifest = read_manifest(path)
    if manifest.fingerprint != shared.fingerprint:
        return False
    if verify_files != "nothing":
        verify(path, manifest)
    return True

"""The checkpoints that a run's folder holds: which there are, which are whole, and putting one aside."""

from __future__ import annotations

import errno
import itertools
import os
import re
from pathlib import Path

from cadenza.errors import CheckpointError
from cadenza.training.runs import Run

__all__ = ["checkpoint_folders", "last_whole_step", "set_aside"]

_SET_ASIDE = "set-aside"
_NAME = re.compile(r"step-\d+")


def checkpoint_folders(run: Run) -> list[Path]:
    """Return the folders of all checkpoints, the oldest first.

    >>> checkpoint_folders(Run(Path("no/such/run")))
    []
    """
    if not run.checkpoints.is_dir():
        return []
    return sorted(path for path in run.checkpoints.iterdir() if _NAME.fullmatch(path.name) and path.is_dir())


def set_aside(folder: Path) -> None:
    """Put a checkpoint where it is in nobody's way; another worker may be at it too."""
    aside = folder.parent / _SET_ASIDE
    aside.mkdir(exist_ok=True)
    for number in itertools.count(1):
        name = folder.name if number == 1 else f"{folder.name}-{number}"
        try:
            os.rename(folder, aside / name)
        except FileNotFoundError:  # another one has done it
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
        else:
            return


def last_whole_step(run: Run, *, tolerant: bool) -> int | None:
    """Return the step of the newest checkpoint whose files are all there, and what was written.

    Args:
        run: The run.
        tolerant: Whether workers that were not there when it was written may be missing in it.
    """
    for folder in reversed(checkpoint_folders(run)):
        if _is_whole(folder, tolerant):
            return int(folder.name.rpartition("-")[2])
    return None


def _is_whole(folder: Path, tolerant: bool) -> bool:
    from cadenza.checkpoint.files import read_manifest, verify
    from cadenza.checkpoint.layout import manifests, shared_file, worker_file, workers_of

    def is_as_written(name: str) -> bool:
        try:
            verify(folder / name, read_manifest(folder / name))
        except CheckpointError:
            return False
        return True

    if tolerant:
        return is_as_written(shared_file()) and any(is_as_written(worker_file(one)) for one in workers_of(folder))
    try:
        return all(map(is_as_written, manifests(folder)))
    except CheckpointError:
        return False

"""The checkpoints of a run whose workers come and go: each writes its part, the leader what all share.

A checkpoint counts once the shared part and the leader's own are whole; a worker without a part in it goes on from
another's. So a worker that dies while it saves, or was not there, costs no checkpoint, and if the leader dies the
earlier one is there.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cadenza.checkpoint.files import read_manifest
from cadenza.checkpoint.parts import Found, find, load_part, save_part, take_up
from cadenza.errors import CheckpointError, UsageError
from cadenza.participants.membership import Membership
from cadenza.training.checkpoints import checkpoint_folders, set_aside
from cadenza.training.job import Job
from cadenza.training.runs import Run

__all__ = ["PartKeeper"]


class PartKeeper:
    """Saves a worker's part of checkpoints, and goes on from them."""

    def __init__(self, run: Run, job: Job, membership: Membership) -> None:
        self._run, self._job, self._membership = run, job, membership

    def save(self, *, leads: bool, extra: Mapping[str, Any]) -> int:
        """Write this worker's part of a checkpoint of this step, and delete old ones if it leads; return its size."""
        job = self._job
        size = save_part(
            self._run.checkpoint(job.sync.clock),
            job.worker,
            leads=leads,
            model=job.model,
            optimizers=job.task.optimizers,
            sync=job.sync,
            extra={**job.place(), **extra},
        )
        if leads:
            self._prune()
        return size

    def restore(self) -> tuple[dict[str, Any] | None, list[str]]:
        """Go on from the newest checkpoint that can be gone on from, the same on all workers that start together.

        Returns:
            What was saved beside it, None if there is no checkpoint; and what is to be said of those left out.
        """
        found, problems = self._newest()
        name = found.folder.name if found is not None else "none"
        chosen = self._membership.line().call(lambda store: store.compare_set("resume", "", name)).decode()
        told: list[str] = []
        if chosen == name:
            told = [f"{path} is not a whole checkpoint and is set aside. {why}" for path, why in problems.items()]
            for path in problems:
                set_aside(self._run, path)
        elif chosen != "none":
            folder = self._run.checkpoints / chosen
            if not folder.is_dir():
                raise UsageError(
                    f"The others go on from {folder}, which worker {self._job.worker} cannot see: the run must be in a "
                    "folder that all nodes share."
                )
            found = find(folder, self._job.worker)
        if chosen == "none" or found is None:
            return None, told
        job = self._job
        extra = load_part(found, worker=job.worker, model=job.model, optimizers=job.task.optimizers, sync=job.sync)
        job.set_place(extra)
        if found.worker != job.worker:
            told.append(f"Worker {job.worker} has no part in {found.folder.name}, and goes on from {found.worker}'s.")
        return extra, told

    def take_up(self) -> int:
        """Give the optimizers and the data what this worker saved last, if anything; return the step of that."""
        job = self._job
        for folder in reversed(checkpoint_folders(self._run)):
            try:
                step = read_manifest(folder / f"worker-{job.worker:05}.safetensors").step
                if step <= job.sync.clock:
                    job.set_place(take_up(folder, job.worker, job.task.optimizers))
                    return step
            except CheckpointError:
                continue
        return 0

    def _newest(self) -> tuple[Found | None, dict[Path, str]]:
        """Return the newest checkpoint that can be gone on from, and what is wrong with those that are newer."""
        problems: dict[Path, str] = {}
        for folder in reversed(checkpoint_folders(self._run)):
            try:
                return find(folder, self._job.worker), problems
            except CheckpointError as error:
                problems[folder] = str(error)
        return None, problems

    def _prune(self) -> None:
        """Delete all but the newest few checkpoints that can be gone on from, and what is older."""
        complete = []
        for folder in checkpoint_folders(self._run):
            try:
                find(folder, self._job.worker, verified=False)
            except CheckpointError:
                continue
            complete.append(folder)
        kept = complete[-self._job.config.checkpoint.keep :]
        for folder in checkpoint_folders(self._run):
            if kept and folder not in kept and folder.name < kept[-1].name:
                shutil.rmtree(folder, ignore_errors=True)

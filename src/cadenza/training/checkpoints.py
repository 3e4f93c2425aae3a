"""The checkpoints of a run: which one to go on from, which ones to keep.

Each worker writes its part, the one that leads also what all share, and it deletes old ones. A checkpoint that cannot
be gone on from, because a crash came while it was written or because it was damaged since, is set aside under
`checkpoints/set-aside`, and said to be.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from cadenza.checkpoint.files import read_manifest
from cadenza.checkpoint.folders import load_optimizers
from cadenza.checkpoint.layout import manifests, worker_file, workers_of
from cadenza.checkpoint.selection import Selection
from cadenza.errors import CadenzaError, CheckpointError, UsageError
from cadenza.training.crew import Crew
from cadenza.training.job import Job
from cadenza.training.runs import Run
from cadenza.training.saved import checkpoint_folders, set_aside

__all__ = ["Checkpoints", "Restored"]

_NONE, _DAMAGED = "none", "damaged: "


@dataclass(frozen=True)
class Restored:
    """What was saved beside the checkpoint gone on from, None if there is none; and what to say of others."""

    extra: dict[str, Any] | None
    warnings: list[str]


class Checkpoints:
    """Saves a worker's part of a run's checkpoints, and goes on from them."""

    def __init__(self, run: Run, job: Job, crew: Crew) -> None:
        self._run, self._job, self._crew = run, job, crew
        self._place = job.sync.replica.place()
        self._found: Selection | None = None
        self._problems: dict[Path, str] = {}

    def save(self, extra: Mapping[str, Any], *, leads: bool) -> int:
        """Write this worker's part of a checkpoint of this step, and delete old ones if it leads; return its size."""
        size = self._job.save(self._run.checkpoint(self._job.sync.clock), extra, shared=leads)
        if leads:
            self.prune()
        return size

    def restore(self) -> Restored:
        """Go on from the newest checkpoint that can be gone on from, the same on all workers that start together."""
        decision = self._crew.decide("resume", self._find_newest)
        if decision.answer.startswith(_DAMAGED):
            raise CadenzaError(decision.answer.removeprefix(_DAMAGED))
        warnings = self._set_problems_aside() if decision.mine else []
        if decision.answer == _NONE:
            return Restored(None, warnings)
        selection = self._select(decision.answer)
        extra = self._job.load(selection)
        if not selection.own:
            warnings.append(
                f"Worker {self._job.worker} has no part in {selection.folder.name}, and goes on from "
                f"{selection.worker}'s."
            )
        return Restored(extra, warnings)

    def take_up(self, whose: Literal["own", "peer", "nobody"]) -> int:
        """Give the optimizers what this worker or another one saved last; return the step of its place in the data.

        For a worker that joins others in the middle of a run and has the model from them. Its schedules and its place
        in the data are always its own; the optimizers' state is its own, else that of another, or the other way round.
        """
        job = self._job
        step = self._take_up_from([job.worker])
        if whose == "nobody":
            for optimizer in job.task.optimizers:
                optimizer.state.clear()
        elif whose == "peer" or not step:
            self._take_up_from(None)
        return step

    def _take_up_from(self, workers: Sequence[int] | None) -> int:
        """Take the newest file of one of some workers, or of any but this one; return its step, 0 if there is none."""
        job = self._job
        for folder in reversed(checkpoint_folders(self._run)):
            for worker in workers if workers is not None else workers_of(folder):
                if workers is None and worker == job.worker:
                    continue
                try:
                    step = read_manifest(folder / worker_file(worker)).step
                    if step <= job.sync.clock:
                        extra = load_optimizers(folder, worker, job.task.optimizers)
                        if worker == job.worker:
                            job.set_place(extra)
                        return step
                except CheckpointError:
                    continue
        return 0

    def prune(self) -> None:
        """Delete all but the newest few checkpoints that are complete; one that is being written is newer and stays."""
        folders = checkpoint_folders(self._run)
        kept = [folder for folder in folders if self._is_complete(folder)][-self._job.config.checkpoint.keep :]
        for folder in folders:
            if kept and folder not in kept and folder.name < kept[-1].name:
                shutil.rmtree(folder, ignore_errors=True)

    # ---- choosing --------------------------------------------------------------------------------------------------

    def _find_newest(self) -> str:
        """Return the name of the newest checkpoint that can be gone on from, and remember what is wrong with others."""
        for folder in reversed(checkpoint_folders(self._run)):
            try:
                self._found = self._crew.select(folder, self._place, verify_files="all")
            except CheckpointError as error:
                self._problems[folder] = str(error)
            else:
                return folder.name
        if any(map(_was_finished, self._problems)):
            return f"{_DAMAGED}{self._nothing_left()}"
        return _NONE

    def _nothing_left(self) -> str:
        newest, why = next(iter(self._problems.items()))
        count = len(self._problems)
        which = newest.name if count == 1 else f"all {count} checkpoints, up to {newest.name},"
        return (
            f"There is nothing to go on from: {which} cannot be read. {why} Nothing was changed. `cadenza train "
            f"--resume {self._run.folder} --from-scratch` sets them aside and begins again at step 0."
        )

    def _is_complete(self, folder: Path) -> bool:
        """Say whether the files are there that are needed; what they hold is not read again."""
        try:
            self._crew.select(folder, self._place, verify_files="nothing")
        except CheckpointError:
            return False
        return True

    def _select(self, name: str) -> Selection:
        """Return this worker's files of the checkpoint that was decided on."""
        folder = self._run.checkpoints / name
        if self._found is not None and self._found.folder == folder:
            return self._found
        if not folder.is_dir():
            raise UsageError(
                f"The others go on from {folder}, which worker {self._job.worker} cannot see: the run must be in a "
                "folder that all nodes share."
            )
        return self._crew.select(folder, self._place, verify_files="own")

    def _set_problems_aside(self) -> list[str]:
        """Put checkpoints that cannot be gone on from where they are in nobody's way; return what to say of them."""
        for folder in self._problems:
            set_aside(folder)
        return [f"{folder} is not a whole checkpoint and is set aside. {why}" for folder, why in self._problems.items()]


def _was_finished(folder: Path) -> bool:
    """Say whether a checkpoint was once whole, as far as its manifests tell: one that a crash cut short was not."""
    try:
        manifests(folder)
    except CheckpointError:
        return False
    return True

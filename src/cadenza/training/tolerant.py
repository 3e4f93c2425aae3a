"""The loop of one worker under `skip_round` and `shrink`: others may end, come late and come back at any moment.

Nothing here is a collective and nobody is waited for, except in rounds: held-out losses are put together in the store,
checkpoints are parts that are complete without those who were not there, and all stop at one step if they can.
"""

from __future__ import annotations

import logging
import time
import warnings
from contextlib import ExitStack
from dataclasses import replace

from cadenza.errors import CadenzaError
from cadenza.participants.membership import Membership, join
from cadenza.training.config import Config
from cadenza.training.evaluation import share_of_loss
from cadenza.training.job import Job
from cadenza.training.metrics import MetricsWriter
from cadenza.training.obituaries import NOTHING, last_words
from cadenza.training.parts import PartKeeper
from cadenza.training.randomness import seed_everything, seed_of
from cadenza.training.recording import Ear, Recorder, open_board, summary, write_start
from cadenza.training.runs import Run, write_model
from cadenza.training.shares import HeldOut
from cadenza.training.stepping import Stepper, is_due
from cadenza.training.stopping import Stopper
from cadenza.training.words import LineWords

__all__ = ["run_tolerant_worker"]

_logger = logging.getLogger("cadenza")

_SUMMARY_S = 10.0  # for the leader to write what came of the run; then the next one does


def run_tolerant_worker(run: Run, config: Config) -> str:
    """Train as one worker of a run whose workers come and go; return "finished", "interrupted" or "left"."""
    membership = join(lease_s=config.faults.lease_s, wait_s=config.faults.first_s)
    path = run.metrics_of(membership.worker)
    recorder = Recorder(MetricsWriter(path), recent=config.steps // 20)
    elapsed = max((last_words(other).elapsed for other in run.metrics.glob("*.jsonl")), default=0.0)
    recorder.go_on_from(replace(last_words(path), elapsed=elapsed))  # unless it turns out that all begin together
    with ExitStack() as leaving:
        leaving.callback(recorder.close)
        leaving.callback(membership.close)
        ear = leaving.enter_context(Ear(_logger))
        try:
            job = Job(config, recorder.observe_round, membership)
            leaving.callback(job.sync.close)
            return _TolerantLoop(run, job, recorder, membership, ear).train()
        except BaseException as error:
            ear.tell(recorder, recorder.last_step)
            text = str(error) if isinstance(error, CadenzaError) else f"{type(error).__name__}: {error}"
            recorder.writer.write("end", recorder.last_step, status="failed", error=text)
            raise


class _TolerantLoop:
    """A worker's way through its steps; the clock may jump ahead, to the step of the others."""

    def __init__(self, run: Run, job: Job, recorder: Recorder, membership: Membership, ear: Ear) -> None:
        self.run, self.job, self.recorder, self.membership, self.ear = run, job, recorder, membership, ear
        self.config, self.task, self.sync = job.config, job.task, job.sync
        self.stepper = Stepper(job, recorder)
        self.words = LineWords(membership, lambda: self.sync.members)
        alone = self.config.launch.nnodes == "1"
        self.stopper = Stopper(self.words, worker=job.worker, workers=job.workers, leaves=not alone)
        self.held_out = HeldOut(membership.line(), job.worker, patience_s=self.config.faults.grace_s)
        self.parts = PartKeeper(run, job, membership)
        self.saved_at = 0

    @property
    def leads(self) -> bool:
        """Whether this worker is the first of those that are there."""
        there = set(self.sync.members) - self.membership.roll.silent()
        return not self.sync.behind and self.job.worker == min(there, default=-1)

    def train(self) -> str:
        """Take all steps that are left; return how it ended."""
        joined = self.sync.clock > 0
        if joined:
            self._follow_the_others()
        else:
            self._restore()
        self.saved_at = self.recorder.last_step = self.sync.clock
        with self.stopper.watching():
            if not joined:
                self.recorder.start_counting()
            write_start(self.job, self.recorder, resumed=self.sync.clock > 0 and not joined)
            if joined:
                text = f"Worker {self.job.worker} joined, with the others' state of step {self.sync.clock}."
                self.recorder.event(self.sync.clock, text)
            if self.leads:
                self._tidy_up(joined)
            self.job.model.train()
            finished = self._take_steps()
            if finished or self._is_where_others_stop():
                self._save()
            return self._finish() if finished else self._interrupt()

    # ---- the beginning ---------------------------------------------------------------------------------------------

    def _restore(self) -> None:
        """Go on from the checkpoint on which those who start together agree, if there is one."""
        extra, told = self.parts.restore()
        self.recorder.go_on_from(NOTHING)
        if extra is not None:
            self.recorder.load_state_dict(extra["recorder"])
        for text in told:
            _logger.warning("%s", text)

    def _follow_the_others(self) -> None:
        """Bring to the others' step what does not come from them: optimizer, schedules, place in the data."""
        step = self.parts.take_up()
        seed_everything(seed_of(self.config.seed, "worker", self.job.worker, self.sync.clock))
        for _ in range(self.sync.clock - step):
            next(self.job.stream)
        self._step_schedules(self.sync.clock - step)

    def _step_schedules(self, steps: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch's, if no optimizer step came before
            for _ in range(steps):
                for scheduler in self.task.schedulers:
                    scheduler.step()

    def _tidy_up(self, joined: bool) -> None:
        if not joined:
            self.run.summary_file.unlink(missing_ok=True)  # of an end that was not the last
        if self.config.log.tensorboard:
            open_board(self.run, self.recorder, self.sync.clock)

    # ---- steps -----------------------------------------------------------------------------------------------------

    def _take_steps(self) -> bool:
        """Step up to the last step, or to the one at which all agree to stop; return whether it was the last."""
        while self.sync.clock < self.config.steps:
            step = self.sync.clock + 1
            if not self.stopper.may_begin(step):
                return False
            self.stepper.take(step)
            self._step_schedules(self.sync.clock - step)  # the clock has jumped if this worker was behind
            self._tell()
            if is_due(self.sync.clock, self.config.evaluate.every) and self.sync.clock < self.config.steps:
                self._evaluate()
            if is_due(self.sync.clock, self.config.checkpoint.every):
                self._save()
        return True

    def _tell(self, *, wait: bool = False) -> None:
        """Write down what has come to be known: losses of evaluations, and what the log says."""
        for step, loss in self.held_out.collect(wait=wait):
            self.recorder.evaluation(step, loss, write=True)
        self.ear.tell(self.recorder, self.sync.clock)

    # ---- what comes after some steps -------------------------------------------------------------------------------

    def _evaluate(self) -> None:
        """Judge this worker's share of the held-out data by what was agreed on; the leader adds the shares up."""
        members = self.sync.members
        if self.task.evaluate is None or self.sync.behind or self.job.worker not in members:
            return
        with self.sync.averaged():
            share = self._share(members)
        self.held_out.post(self.sync.clock, members, *share)

    def _share(self, members: tuple[int, ...]) -> tuple[float, float]:
        source = f"evaluate(model, worker, workers) of the task {self.config.task}"
        position = members.index(self.job.worker)
        return share_of_loss(self.task, worker=position, workers=len(members), source=source)

    def _save(self) -> None:
        """Write this worker's part of a checkpoint of the step that it stands at, unless that is there."""
        step = self.sync.clock
        if step == self.saved_at or self.sync.behind:
            return
        self.saved_at = step
        self.recorder.writer.flush()  # a run that goes on from here does not take these steps again
        try:
            size = self.parts.save(leads=self.leads, extra={"recorder": self.recorder.state_dict()})
        except OSError as error:  # a full disk, or a folder that others have deleted by now: the next one may do better
            self.recorder.event(step, f"The checkpoint could not be written: {error}.", level="warning")
            return
        path = str(self.run.checkpoint(step).relative_to(self.run.folder))
        self.recorder.writer.write("checkpoint", step, path=path, bytes=size)

    # ---- the end ---------------------------------------------------------------------------------------------------

    def _finish(self) -> str:
        self.sync.finish()
        members = self.sync.members
        if self.task.evaluate is not None and self.job.worker in members:
            self.held_out.post(self.sync.clock, members, *self._share(members))
        leads = not self.sync.behind and self.job.worker == min(members, default=-1)
        self._tell(wait=leads)
        if leads or not self._is_told_by_the_leader():
            write_model(self.run, self.task.model)
            self._write_summary("finished")
        return self._end("finished")

    def _is_told_by_the_leader(self) -> bool:
        """Wait until the leader has written what came of the run; it may have died with its last step done."""
        deadline = time.monotonic() + _SUMMARY_S
        while not self.run.summary_file.exists():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)
        return True

    def _is_where_others_stop(self) -> bool:
        """Say whether what is saved here will belong to what others save, or is enough by itself."""
        return self.leads if self.stopper.left else self.sync.clock == self.stopper.target

    def _interrupt(self) -> str:
        status = "left" if self.stopper.left else "interrupted"
        leads = self.leads
        self.sync.close()
        if self.stopper.left:
            text = f"Worker {self.job.worker} was told to leave, after step {self.sync.clock}."
            self.recorder.event(self.sync.clock, text)
        elif leads:
            self.recorder.event(self.sync.clock, f"Interrupted: all workers stopped after step {self.sync.clock}.")
            self._write_summary(status)
        return self._end(status)

    def _write_summary(self, status: str) -> None:
        recorder, workers = self.recorder, len(self.sync.members)
        told = summary(
            self.job,
            recorder,
            status,
            workers=workers,
            losses=sum(recorder.losses),
            count=len(recorder.losses),
            samples=workers * recorder.samples,
        )
        failed = {"faults": self.config.faults.policy, "failed_rounds": recorder.failed_rounds}
        self.run.write_summary({**told, **failed})

    def _end(self, status: str) -> str:
        self.ear.tell(self.recorder, self.sync.clock)
        self.recorder.writer.write("end", self.sync.clock, status=status, error=None)
        return status

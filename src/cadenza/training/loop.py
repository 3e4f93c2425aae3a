"""The loop of one worker: `run_worker(folder)` trains a run from wherever it stands to its end, or until it is stopped.

Every worker of a run calls it, under torchrun, under `cadenza train` or in a process group that is there already. If
the folder holds a checkpoint to go on from, the run does; fixed workers do so to the last bit as if they had never
stopped (on CPU).
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, suppress
from functools import partial
from pathlib import Path

import torch

from cadenza.errors import CadenzaError, UsageError
from cadenza.training.best_model import BestModel
from cadenza.training.boards import open_boards
from cadenza.training.checkpoints import Checkpoints
from cadenza.training.config import Config
from cadenza.training.crew import Crew
from cadenza.training.elastic_crew import elastic_crew
from cadenza.training.evaluation import HeldOut
from cadenza.training.exit_records import NO_RECORD
from cadenza.training.fixed_crew import fixed_crew
from cadenza.training.job import Job
from cadenza.training.metrics import MetricsWriter
from cadenza.training.randomness import seed_everything, seed_of
from cadenza.training.recording import LogEvents, Recorder, summary, write_start
from cadenza.training.runs import Run, open_run, write_model
from cadenza.training.stepping import Stepper, is_due, step_schedules
from cadenza.training.stop_agreement import StopAgreement
from cadenza.training.stopping import Stopper
from cadenza.training.task import Moment

__all__ = ["run_worker"]

_logger = logging.getLogger("cadenza")


def run_worker(folder: str | Path) -> str:
    """Train as one worker of a run; return "finished", "interrupted" or, if it was told to leave the others, "left".

    What goes wrong is written to the run's metrics, and raised. A process that no launcher started is a run's only
    worker.

    >>> import tempfile
    >>> from cadenza.training.runs import create
    >>> tiny = {"layers": 1, "width": 16, "heads": 2, "context": 16, "batch": 1, "held_out_windows": 4}
    >>> config = Config(steps=2, options=tiny).with_(**{"log.tensorboard": False})
    >>> run = create(Path(tempfile.mkdtemp()) / "first", config)
    >>> run_worker(run.folder), run.summary()["steps"]
    ('finished', 2)
    """
    run = open_run(folder)
    config = run.config()
    torch.set_num_threads(config.launch.threads)
    with _crew_of(config) as crew, ExitStack() as leaving:
        recorder = Recorder(MetricsWriter(run.metrics_of(crew.worker)), recent=config.steps // 20)
        leaving.callback(recorder.close)
        recorder.go_on_from(crew.last_record(run))  # unless it turns out that all begin together
        log = leaving.enter_context(LogEvents(_logger))
        try:
            recorder.phase("building the task")
            job = Job(config, recorder.observe_round, crew)
            leaving.callback(job.sync.close)
            return _Loop(run, job, crew, recorder, log).train()
        except BaseException as error:
            log.write(recorder, recorder.last_step)
            text = crew.explain(error)
            recorder.writer.write("end", recorder.last_step, status="failed", error=text)
            if crew.worker == 0 and not config.faults.tolerant:
                with suppress(OSError):
                    run.write_summary({"status": "failed", "error": text})
            raise


def _log(recorder: Recorder, step: int, /, **values: float) -> None:
    recorder.values(step, {name: float(value) for name, value in values.items()})


def _crew_of(config: Config) -> AbstractContextManager[Crew]:
    return elastic_crew(config) if config.faults.tolerant else fixed_crew(config)


class _Loop:
    """A worker's way through its steps, and what comes after some of them.

    A step is: batch, loss, backward, optimizer, schedule, `sync.step()`. Then, if its number asks for them, come an
    evaluation of the workers' average and a checkpoint. The clock may jump ahead, to the step of the others, if this
    worker had fallen behind.
    """

    def __init__(self, run: Run, job: Job, crew: Crew, recorder: Recorder, log: LogEvents) -> None:
        self.run, self.job, self.crew, self.recorder, self.log = run, job, crew, recorder, log
        self.config, self.task, self.sync = job.config, job.task, job.sync
        self.stepper = Stepper(job, recorder)
        self.checkpoints = Checkpoints(run, job, crew)
        source = f"evaluate(model, worker, workers) of the task {self.config.task}"
        self.held_out = HeldOut(job, crew.shares(source), source=source, best=self._best_model())
        agreement = StopAgreement(
            crew.connect(), crew.connection, expected=self._present, all_must_answer=not self.config.faults.tolerant
        )
        self.stopper = Stopper(agreement, worker=job.worker, leaves_on_sigterm=crew.leaves_on_sigterm)
        self.saved_at = 0
        self.failed_saves = 0  # in a row
        self.draws = False

    @property
    def leads(self) -> bool:
        """Whether this worker is the first of those that are there; while the store is away, of those that were."""
        return not self._is_apart and self.job.worker == min(self._present(), default=-1)

    @property
    def _is_apart(self) -> bool:
        """Whether the others may have gone on without this worker."""
        return self.sync.behind and self.crew.connected

    def _present(self) -> set[int]:
        """Return those who held the last round and are still there."""
        return set(self.sync.members) - self.crew.silent()

    def train(self) -> str:
        """Take all steps that are left; return how it ended."""
        joined = self.sync.clock > 0
        if joined:
            self._follow_the_others()
        else:
            self._restore()
        self.saved_at = self.recorder.last_step = self.sync.clock
        self.log.write(self.recorder, self.sync.clock)
        if self.leads:
            self._prepare_folder(joined)
        self._keep_drawing()
        with self.stopper.watching():
            self.crew.gather()  # from here on all are watching: none can begin a step while another does not watch yet
            self._write_start(joined)
            self.job.model.train()
            self._tell("start", self.sync.clock, {})
            finished = self._take_steps()
            if finished or self._is_where_others_stop():
                self._save()
            return self._finish() if finished else self._interrupt()

    def _tell(self, kind: str, step: int, figures: Mapping[str, float]) -> None:
        """Tell the task's callbacks that something has happened."""
        job = self.job
        for callback in self.task.callbacks:
            log = partial(_log, self.recorder, step)
            callback(Moment(kind, step, job.worker, job.workers, self.task.model, figures, log))

    # ---- the beginning ---------------------------------------------------------------------------------------------

    def _best_model(self) -> BestModel | None:
        metric = self.config.checkpoint.keep_best
        if metric and self.task.evaluate is None:
            raise UsageError(f'checkpoint.keep_best = "{metric}": the task {self.config.task} has no evaluate().')
        return BestModel(self.run, metric, self.task.higher_is_better, warn=_logger.warning) if metric else None

    def _restore(self) -> None:
        """Go on from the checkpoint on which all that start together agree, if there is one."""
        self.recorder.phase("looking for a checkpoint")
        restored = self.checkpoints.restore()
        self.recorder.go_on_from(NO_RECORD)
        if restored.extra is not None:
            self.recorder.load_state_dict(restored.extra["recorder"])
        for text in restored.warnings:
            _logger.warning("%s", text)

    def _follow_the_others(self) -> None:
        """Bring to the others' step what does not come from them: optimizer, schedules, place in the data."""
        step = self.checkpoints.take_up(self.config.faults.optimizer_from)
        seed_everything(seed_of(self.config.seed, "worker", self.job.worker, self.sync.clock))
        for _ in range((self.sync.clock - step) * self.task.accumulate):
            next(self.job.stream)
        self._step_schedules(self.sync.clock - step)

    def _prepare_folder(self, joined: bool) -> None:
        """Write down where the workers are."""
        if hosts := self.crew.hosts():
            self.run.write_environment({**self.run.environment(), "hosts": hosts})
        if not joined:
            self.run.summary_file.unlink(missing_ok=True)  # of an end that was not the last
            self.run.forget_best(kept=self.sync.clock > 0)

    def _keep_drawing(self) -> None:
        """Draw the loggers' curves while this worker leads."""
        if self.draws == self.leads:
            return
        self.draws, step = not self.draws, self.sync.clock
        if self.draws:
            warn = partial(self.recorder.event, step, level="warning")
            self.recorder.draw_with(lambda after: open_boards(self.run, after, warn), step)
        else:
            self.recorder.stop_drawing()

    def _write_start(self, joined: bool) -> None:
        step = self.sync.clock
        if not joined:
            self.recorder.start_counting()
        write_start(self.job, self.recorder, resumed=step > 0 and not joined)
        if joined:
            self.recorder.event(step, f"Worker {self.job.worker} joined, with the others' state of step {step}.")

    # ---- steps -----------------------------------------------------------------------------------------------------

    def _take_steps(self) -> bool:
        """Step up to the last step, or to the one at which all agree to stop; return whether it was the last."""
        while self.sync.clock < self.config.steps:
            step = self.sync.clock + 1
            if not self.stopper.may_begin(step):
                return False
            figures = self.stepper.take(step)
            self._step_schedules(self.sync.clock - step)
            self._tell("step", self.sync.clock, figures)
            if is_due(self.sync.clock, self.config.evaluate.every) and self.sync.clock < self.config.steps:
                self.held_out.measure()
            self._keep_drawing()
            self._write_news()
            if is_due(self.sync.clock, self.config.checkpoint.every):
                self._save()
        return True

    def _step_schedules(self, steps: int) -> None:
        """Step the learning rate's schedules for steps that the others took without this worker."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch's, if no optimizer step came before
            step_schedules(self.job, steps)

    def _write_news(self, *, wait: bool = False) -> None:
        """Write down what has come to be known: losses of evaluations, and what was logged."""
        for found in self.held_out.collect(wait=wait):
            self.recorder.evaluation(found)
            self._tell("evaluation", found.step, found.metrics)
        self.log.write(self.recorder, self.sync.clock)

    def _save(self) -> None:
        """Write this worker's part of a checkpoint of the step that it stands at, unless that is there."""
        step = self.sync.clock
        if step == self.saved_at or self._is_apart:
            return
        self.saved_at = step
        self.recorder.writer.flush()  # a run that goes on from here does not take these steps again
        try:
            size = self.checkpoints.save({"recorder": self.recorder.state_dict()}, leads=self.leads)
        except OSError as error:  # a full disk, or a folder that others have deleted by now: the next one may do better
            self._survive(step, error)
            return
        self.failed_saves = 0
        path = str(self.run.checkpoint(step).relative_to(self.run.folder))
        self.recorder.writer.write("checkpoint", step, path=path, bytes=size)
        self._tell("checkpoint", step, {"bytes": size})

    def _survive(self, step: int, error: OSError) -> None:
        """Tell of a checkpoint that could not be written; fixed workers, which could not go on from it, stop at two."""
        self.failed_saves += 1
        text = f"The checkpoint of step {step} could not be written: {error.strerror} ({error.filename})."
        if self.failed_saves > 1 and not self.config.faults.tolerant:
            raise CadenzaError(f"{text} Nor could the one before it: make room, then resume.") from error
        self.recorder.event(step, text, level="warning")

    # ---- the end ---------------------------------------------------------------------------------------------------

    def _finish(self) -> str:
        self.sync.finish()
        self.held_out.measure(averaged=False)  # all have the same now
        first = not self.sync.behind and self.job.worker == min(self.sync.members, default=-1)
        self._write_news(wait=first)
        writes = first or self.crew.takes_over(self.run.summary_file.exists)
        if writes:
            write_model(self.run.model_file, self.task.model)
        self._tell("end", self.sync.clock, {})
        return self._end("finished", writes=writes)

    def _is_where_others_stop(self) -> bool:
        """Say whether what is saved here will belong to what others save, or is enough by itself."""
        return self.leads if self.stopper.left else self.sync.clock == self.stopper.target

    def _interrupt(self) -> str:
        leads, left, step = self.leads, self.stopper.left, self.sync.clock
        self.sync.close()  # a round in flight is in the checkpoint
        if left:
            self.recorder.event(step, f"Worker {self.job.worker} was told to leave, after step {step}.")
        elif leads:
            self.recorder.event(step, f"Interrupted: all workers stopped after step {step}.")
        return self._end("left" if left else "interrupted", writes=leads and not left)

    def _end(self, status: str, *, writes: bool) -> str:
        """Write how it ended."""
        totals = self.crew.add_up(self.recorder.to_add_up(), workers=len(self.sync.members))
        if writes:
            self.checkpoints.prune()  # by now all have written their parts, if they are fixed workers
            self.run.forget_best(kept=True)
            self.run.write_summary(summary(self.job, self.recorder, status, totals))
        self.log.write(self.recorder, self.sync.clock)
        self.recorder.writer.write("end", self.sync.clock, status=status, error=None)
        return status

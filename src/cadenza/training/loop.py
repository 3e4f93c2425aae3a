"""The loop of one worker: `run_worker(folder)` trains a run from wherever it stands to its end, or until it is stopped.

Every worker of a run calls it, under torchrun or in a process group that is there already. If the folder holds a whole
checkpoint, the run goes on from it, to the last bit as if it had never stopped (on CPU).
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path

import torch
import torch.distributed as dist

from cadenza.common.process_groups import resolve, store_of
from cadenza.errors import CadenzaError
from cadenza.training.checkpoints import agree_on_checkpoint, prune
from cadenza.training.config import Config
from cadenza.training.evaluation import held_out_loss, sum_over_workers
from cadenza.training.job import Job
from cadenza.training.metrics import MetricsWriter
from cadenza.training.recording import Recorder, open_board, summary, write_start
from cadenza.training.runs import Run, open_run, write_model
from cadenza.training.stepping import Stepper, is_due
from cadenza.training.stopping import Stopper
from cadenza.training.tolerant import run_tolerant_worker

__all__ = ["run_worker"]

_logger = logging.getLogger("cadenza")


def run_worker(folder: str | Path) -> str:
    """Train as one worker of a run; return "finished" or "interrupted".

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
    if config.faults.tolerant:
        return run_tolerant_worker(run, config)
    with process_group(config), ExitStack() as leaving:
        worker = dist.get_rank()
        store = dist.PrefixStore("cadenza/train", store_of(resolve(None)))
        recorder = Recorder(MetricsWriter(run.metrics_of(worker)), recent=config.steps // 20)
        leaving.callback(recorder.close)
        try:
            job = Job(config, recorder.observe_round)
            leaving.callback(job.sync.close)
            return _Loop(run, job, recorder, store).train()
        except BaseException as error:
            _write_failure(run, recorder, _first_failure(store, worker, error), worker)
            raise


@contextmanager
def process_group(config: Config) -> Iterator[None]:
    """Be in a process group inside the block: the one that is there, the launcher's, or one of this process alone."""
    if dist.is_initialized():
        yield
        return
    backend: str = config.launch.backend
    if backend == "nccl" or (backend == "auto" and torch.cuda.is_available() and dist.is_nccl_available()):
        backend = "cpu:gloo,cuda:nccl"
    elif backend == "auto":
        backend = "gloo"
    try:
        if "RANK" in os.environ:
            dist.init_process_group(backend)
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    except (RuntimeError, ValueError) as error:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise CadenzaError(f"The workers could not come together at {where} by {backend}: {error}") from error
    try:
        yield
    finally:
        dist.destroy_process_group()


class _Loop:
    """A worker's way through its steps, and what comes after some of them.

    A step is: batch, loss, backward, optimizer, schedule, `sync.step()`. Then, if its number asks for them, come an
    evaluation of the workers' average and a checkpoint.
    """

    def __init__(self, run: Run, job: Job, recorder: Recorder, store: dist.Store) -> None:
        self.run, self.job, self.recorder, self.store = run, job, recorder, store
        self.config, self.task, self.sync = job.config, job.task, job.sync
        self.leads = job.worker == 0
        self.stepper = Stepper(job, recorder)
        self.stopper = Stopper(store, worker=job.worker, workers=job.workers)
        self.saved_at = 0

    def train(self) -> str:
        """Take all steps that are left; return how it ended."""
        self.store.set(f"host/{self.job.worker}", socket.gethostname())
        self._restore()
        if self.leads:
            self._tidy_up()
        with self.stopper.watching():
            dist.barrier()  # from here on all are watching: none can begin a step while another would not hear
            self.recorder.start_counting()
            self._write_start()
            self.job.model.train()
            finished = self._take_steps()
            self._save()
            return self._finish() if finished else self._interrupt()

    # ---- the beginning ---------------------------------------------------------------------------------------------

    def _restore(self) -> None:
        """Go on from the newest whole checkpoint, if there is one."""
        choice = agree_on_checkpoint(self.run, self.store, worker=self.job.worker)
        if choice.folder is not None:
            self.recorder.load_state_dict(self.job.load(choice.folder)["recorder"])
        for text in choice.warnings:
            _logger.warning("%s", text)
            self.recorder.event(self.sync.clock, text, level="warning")
        self.saved_at = self.recorder.last_step = self.sync.clock

    def _tidy_up(self) -> None:
        """Write down where the workers are, and open TensorBoard's file."""
        hosts = [self.store.get(f"host/{worker}").decode() for worker in range(self.job.workers)]
        self.run.write_environment({**self.run.environment(), "hosts": hosts})
        self.run.summary_file.unlink(missing_ok=True)  # of an end that was not the last
        if self.config.log.tensorboard:
            open_board(self.run, self.recorder, self.sync.clock)

    def _write_start(self) -> None:
        write_start(self.job, self.recorder, resumed=self.sync.clock > 0)

    # ---- steps -----------------------------------------------------------------------------------------------------

    def _take_steps(self) -> bool:
        """Step up to the last step, or to the one at which all agree to stop; return whether it was the last."""
        for step in range(self.sync.clock + 1, self.config.steps + 1):
            if not self.stopper.may_begin(step):
                return False
            self.stepper.take(step)
            if is_due(step, self.config.evaluate.every) and step < self.config.steps:
                self._evaluate()
            if is_due(step, self.config.checkpoint.every):
                self._save()
        return True

    # ---- what comes after some steps -------------------------------------------------------------------------------

    def _evaluate(self, *, averaged: bool = True) -> None:
        """Measure the held-out loss of the workers' average; training goes on as if nothing had been."""
        if self.task.evaluate is None:
            return
        source = f"evaluate(model, worker, workers) of the task {self.config.task}"
        with self.sync.averaged() if averaged and not self.job.is_ddp else nullcontext():
            loss = held_out_loss(self.task, worker=self.job.worker, workers=self.job.workers, source=source)
        self.recorder.evaluation(self.sync.clock, loss, write=self.leads)

    def _save(self) -> None:
        """Write this worker's part of a checkpoint of the step that it stands at, unless that is there."""
        step = self.sync.clock
        if step == self.saved_at:
            return
        folder = self.run.checkpoint(step)
        self.recorder.writer.flush()  # a run that goes on from here does not take these steps again
        size = self.job.save(folder, {"recorder": self.recorder.state_dict()})
        self.saved_at = step
        self.recorder.writer.write("checkpoint", step, path=str(folder.relative_to(self.run.folder)), bytes=size)
        if self.leads:
            prune(self.run, self.config.checkpoint.keep)

    # ---- the end ---------------------------------------------------------------------------------------------------

    def _finish(self) -> str:
        self.sync.finish()
        self._evaluate(averaged=False)  # all have the same now
        if self.leads:
            write_model(self.run, self.task.model)
        return self._end("finished")

    def _interrupt(self) -> str:
        self.sync.close()  # a round in flight is in the checkpoint
        if self.leads:
            self.recorder.event(self.sync.clock, f"Interrupted: all workers stopped after step {self.sync.clock}.")
        return self._end("interrupted")

    def _end(self, status: str) -> str:
        """Write how it ended, once all workers have come to this point."""
        recorder, step = self.recorder, self.sync.clock
        losses, count, samples = sum_over_workers(sum(recorder.losses), len(recorder.losses), recorder.samples)
        if self.leads:
            prune(self.run, self.config.checkpoint.keep)
            told = summary(
                self.job, recorder, status, workers=self.job.workers, losses=losses, count=count, samples=samples
            )
            self.run.write_summary(told)
        recorder.writer.write("end", step, status=status, error=None)
        return status


def _first_failure(store: dist.Store, worker: int, error: BaseException) -> str:
    """Return what is to be said of an error: if another worker's came first, that this one only followed."""
    text = str(error) if isinstance(error, CadenzaError) else f"{type(error).__name__}: {error}"
    try:
        first = store.compare_set("failed", "", str(worker)).decode()
    except RuntimeError:  # the store's host has ended
        return text
    return text if first == str(worker) else f"Stopped, because worker {first} failed. ({text})"


def _write_failure(run: Run, recorder: Recorder, text: str, worker: int) -> None:
    recorder.writer.write("end", recorder.last_step, status="failed", error=text)
    if worker == 0:
        run.write_summary({"status": "failed", "error": text})

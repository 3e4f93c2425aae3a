"""What a worker writes down while it trains: its lines of metrics, loggers' curves, and at the end the summary."""

from __future__ import annotations

import json
import logging
import re
import socket
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Self

import torch

from cadenza import RoundReport, observers
from cadenza.training.boards import Board
from cadenza.training.exit_records import LastRecord
from cadenza.training.held_out_shares import Evaluation
from cadenza.training.job import Job
from cadenza.training.metrics import MetricsWriter, Stopwatch

__all__ = ["LogEvents", "Recorder", "summary", "write_start"]

_DRAW_EVERY = 10  # steps between points of the loggers' curves of the loss
_NOTICED_S = 10.0  # after so long it is known that the worker which drew the curves is gone


class Recorder:
    """Counts what a worker has done and writes lines about it; the counts go on after a resume.

    Args:
        writer: Where the lines go.
        recent: Over how many of the last steps the training loss is averaged.
    """

    def __init__(self, writer: MetricsWriter, *, recent: int = 1) -> None:
        self.writer = writer
        self.boards: list[Board] = []
        self.last_step = 0
        self.samples = 0
        self.bytes_sent = 0
        self.stall_s = 0.0
        self.rounds = 0
        self.failed_rounds = 0
        self.held_out: float | None = None
        self.metrics: dict[str, float] = {}
        self.losses: deque[float] = deque(maxlen=max(1, recent))
        self._carried = 0.0  # seconds of training before a resume
        self._marks: dict[int, float] = {}  # when the last steps ended
        self._points: deque[tuple[float, int, Mapping[str, float]]] = deque()  # of the curves, with their times

    @property
    def elapsed(self) -> float:
        return self.writer.stopwatch.elapsed

    def start_counting(self) -> None:
        """Count the seconds of training from here, on from those before a resume."""
        self.writer.stopwatch = Stopwatch(self._carried)

    def mark(self, step: int, *, delay: int) -> None:
        """Remember when a step's own work was done: a round that lands `delay` steps later began then."""
        self._marks[step] = self.elapsed
        self._marks.pop(step - delay - 1, None)

    def observe_round(self, report: RoundReport) -> None:
        """Write down a round; an observer of the synchronizer."""
        landed = self.elapsed
        self.bytes_sent += report.bytes_sent
        self.stall_s += report.stall_s
        if report.kind == "failed":
            self._observe_failure(report)
            return
        self.rounds += 1
        late = report.delay > 0
        launched = self._marks.get(report.step, landed) if late else landed - report.stall_s
        figures = json.loads(report.to_json())
        step = figures.pop("step")
        del figures["kind"]
        self.writer.write("round", step, **figures, launched=round(launched, 6), landed=round(landed, 6))
        if report.decision:
            self.event(report.step, f"Decided: {report.decision}")
        observers.notify([board.observe_round for board in self.boards], report)

    def _observe_failure(self, report: RoundReport) -> None:
        """Write down a round that failed and changed nothing."""
        self.failed_rounds += 1
        self.writer.write(
            "failed",
            report.step,
            fragment=report.fragment,
            reason=report.reason,
            absent=list(report.absent),
            stall_s=round(report.stall_s, 6),
        )

    def step(
        self,
        step: int,
        *,
        loss: float,
        samples: int,
        lr: float,
        next_sync: int | None,
        values: Mapping[str, float] | None = None,
    ) -> None:
        """Write down a step, and what the task logs with it."""
        self.last_step = step
        self.samples += samples
        self.losses.append(loss)
        self.writer.write(
            "step",
            step,
            loss=loss,
            samples=self.samples,
            bytes_sent=self.bytes_sent,
            stall_s=round(self.stall_s, 6),
            lr=lr,
            next_sync=next_sync,
            **({"values": values} if values else {}),
        )
        if step % _DRAW_EVERY == 0:
            self._draw(step, {"loss": loss, "lr": lr, **(values or {})})

    def values(self, step: int, values: Mapping[str, float]) -> None:
        """Write down numbers of the task's own."""
        self.writer.write("values", step, values=dict(values))
        self._draw(step, values)

    def evaluation(self, found: Evaluation) -> None:
        """Remember held-out metrics; one worker writes them down for all."""
        self.metrics = dict(found.metrics)
        loss = self.held_out = self.metrics["loss"]
        if found.write:
            others = {name: value for name, value in found.metrics.items() if name != "loss"}
            self.writer.write("evaluation", found.step, loss=loss, **({"metrics": others} if others else {}))
            drawn = {"held_out": loss, **{f"held_out_{name}": value for name, value in others.items()}}
            self._draw(found.step, drawn)

    def _draw(self, step: int, figures: Mapping[str, float]) -> None:
        """Add points to the loggers' curves; one that fails is left from then on."""
        self._points.append((self.elapsed, step, figures))
        while self._points[0][0] < self.elapsed - _NOTICED_S:
            self._points.popleft()
        for board in list(self.boards):
            try:
                board.draw(step, figures)
            except Exception as error:  # a logger's own, such as a network that is gone
                self.boards.remove(board)
                self.event(step, f"{type(board).__name__} has failed and is left: {error}", level="warning")

    def draw_with(self, open_boards: Callable[[int], list[Board]], step: int) -> None:
        """Draw the curves from here on, with what may be missing since the worker that drew them was last seen.

        `open_boards` is told after which step it draws, `step` is where this worker stands.
        """
        points = list(self._points)
        self._points.clear()
        self.boards = open_boards(min([step, *(point[1] - 1 for point in points)]))
        for _, at, figures in points:
            self._draw(at, figures)

    def stop_drawing(self) -> None:
        """Leave the curves to another worker."""
        for board in self.boards:
            try:
                board.close()
            except Exception as error:  # a logger's own, such as a full disk
                self.event(self.last_step, f"{type(board).__name__} could not be closed: {error}", level="warning")
        self.boards = []

    def phase(self, text: str) -> None:
        """Write down what this worker does before it takes steps."""
        self.writer.write("phase", self.last_step, text=text)

    def event(self, step: int, text: str, *, level: str = "info") -> None:
        """Write down something out of the ordinary."""
        self.writer.write("event", step, text=text, level=level)

    def to_add_up(self) -> list[float]:
        """Return what a summary gives for all workers: the last losses' sum and number, and the samples."""
        return [sum(self.losses), len(self.losses), self.samples]

    def state_dict(self) -> dict[str, Any]:
        """Return the counts, for a checkpoint."""
        return {
            "elapsed": self.elapsed,
            "samples": self.samples,
            "bytes_sent": self.bytes_sent,
            "stall_s": self.stall_s,
            "rounds": self.rounds,
            "failed_rounds": self.failed_rounds,
            "held_out": self.held_out,
            "metrics": dict(self.metrics),
            "losses": torch.tensor(list(self.losses), dtype=torch.float64),
            "marks": dict(self._marks),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on counting from what a checkpoint holds."""
        self._carried = state["elapsed"]
        self.start_counting()
        self.samples, self.bytes_sent, self.stall_s = state["samples"], state["bytes_sent"], state["stall_s"]
        self.rounds, self.held_out = state["rounds"], state["held_out"]
        self.failed_rounds, self.metrics = state.get("failed_rounds", 0), dict(state.get("metrics", {}))
        self.losses.extend(state["losses"].tolist())
        self._marks = dict(state["marks"])

    def go_on_from(self, record: LastRecord) -> None:
        """Go on counting where this worker's earlier process ended."""
        self._carried = record.elapsed
        self.start_counting()
        counts = record.counts
        self.samples, self.bytes_sent = counts.get("samples", 0), counts.get("bytes_sent", 0)
        self.stall_s = counts.get("stall_s", 0.0)

    def close(self) -> None:
        """Write what waits, and close the files."""
        self.stop_drawing()
        self.writer.close()


class LogEvents(logging.Handler):
    """Takes the warnings of a log, from any thread, to standard error and, as events, to a worker's metrics."""

    def __init__(self, logger: logging.Logger) -> None:
        super().__init__(logging.WARNING)
        self._logger = logger
        self._waiting: deque[tuple[str, str]] = deque()

    def emit(self, record: logging.LogRecord) -> None:
        self._waiting.append((record.getMessage(), "error" if record.levelno >= logging.ERROR else "warning"))
        with suppress(OSError):  # of a full disk, which must not end the training
            print(self.format(record), file=sys.stderr, flush=True)

    def write(self, recorder: Recorder, step: int) -> None:
        """Write down what was logged; a text that begins with its step is filed under that."""
        while self._waiting:
            text, level = self._waiting.popleft()
            named = _STEP.match(text)
            if named is not None:
                recorder.event(int(named[1]), _sentence(text[named.end() :]), level=level)
            else:
                recorder.event(step, text, level=level)

    def __enter__(self) -> Self:
        self._logger.addHandler(self)
        return self

    def __exit__(self, *exception: object) -> None:
        self._logger.removeHandler(self)


_STEP = re.compile(r"Step (\d+): ")


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def write_start(job: Job, recorder: Recorder, *, resumed: bool) -> None:
    """Write down what begins here."""
    recorder.writer.write(
        "start",
        job.sync.clock,
        worker=job.worker,
        workers=job.workers,
        host=socket.gethostname(),
        strategy=job.config.strategy.name,
        parameters=job.parameters,
        gradient_bytes=job.gradient_bytes,
        steps=job.config.steps,
        unit=job.task.unit,
        period=None if job.is_ddp else job.sync.strategy.period,
        higher_is_better=sorted(job.task.higher_is_better),
        resumed=resumed,
    )


def summary(job: Job, recorder: Recorder, status: str, totals: Sequence[float]) -> dict[str, Any]:
    """Return what came of a run; the totals over all workers are those of `recorder.to_add_up()`."""
    losses, count, samples = totals
    step, faults = job.sync.clock, job.config.faults
    result: dict[str, Any] = {
        "status": status,
        "strategy": job.config.strategy.name,
        "codec": None if job.is_ddp else job.sync.strategy.levels[-1].codec.name,
        "workers": len(job.sync.members),
        "steps": step,
        "seconds": recorder.elapsed,
        "held_out": recorder.held_out,
        "training_loss": losses / count if count else None,
        "bytes_sent": recorder.bytes_sent,
        "ddp_bytes": job.gradient_bytes * step,
        "stall_s": None if job.is_ddp else recorder.stall_s,  # DDP waits inside backward(), where nobody measures it
        "rounds": recorder.rounds,
        "parameters": job.parameters,
        "samples_per_s": samples / max(recorder.elapsed, 1e-9),
    }
    if len(recorder.metrics) > 1:
        result["metrics"] = recorder.metrics
    if faults.tolerant:
        result |= {"faults": faults.policy, "failed_rounds": recorder.failed_rounds}
    return result

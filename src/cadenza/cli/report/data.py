"""What a report tells of a run, taken from the run's folder.

Everything is computed from the lines that the workers wrote, so that a run without a summary (still going, or killed)
is told of in the same way as one that ended.
"""

from __future__ import annotations

import math
import tomllib
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

from cadenza.cli.report.spans import lives
from cadenza.training.runs import open_run, read_metrics

__all__ = ["Curve", "Event", "LevelFigures", "Round", "RunData", "WorkerData", "read_runs"]

Line = Mapping[str, Any]

_GONE = ("lost", "left")
_OF_STEPS = {"elapsed", "loss", "samples"}  # without which a step cannot be drawn


@dataclass(frozen=True)
class Curve:
    """Losses, each with the step, the time and the bytes sent by then.

    >>> Curve([1, 2], [0.1, 0.2], [0, 64], [5.5, 5.4]).finite_ends()
    (5.5, 5.4)
    """

    steps: Sequence[int]
    seconds: Sequence[float]
    bytes_sent: Sequence[int]
    losses: Sequence[float]

    def pick(self, indices: Iterable[int]) -> Curve:
        """Return the curve of these points alone."""
        chosen = list(indices)
        return Curve(*([column[index] for index in chosen] for column in self._columns()))

    def finite_ends(self) -> tuple[float, float] | None:
        """Return the first and the last loss that is a number, or None if there is none."""
        finite = [loss for loss in self.losses if math.isfinite(loss)]
        return (finite[0], finite[-1]) if finite else None

    def _columns(self) -> tuple[Sequence[Any], ...]:
        return self.steps, self.seconds, self.bytes_sent, self.losses


@dataclass(frozen=True)
class Round:
    """One round as one worker saw it; `launched` and `landed` are seconds of training."""

    step: int
    level: int
    level_name: str
    fragment: int
    bytes_sent: int
    encoded_bytes: int
    raw_bytes: int
    stall_s: float
    wire_s: float
    drift: float | None
    codec: str
    codec_error: float | None
    launched: float
    landed: float

    @classmethod
    def of(cls, line: Line) -> Round:
        """Return the round that a line tells of."""
        stall_s, wire_s = _number(line.get("stall_s"), 0.0), _number(line.get("wire_s"), 0.0)
        landed = _number(line.get("landed"), _number(line.get("elapsed"), 0.0))
        return cls(
            step=int(line["step"]),
            level=int(line.get("level", 0)),
            level_name=str(line.get("level_name", "world")),
            fragment=int(line.get("fragment", 0)),
            bytes_sent=int(line.get("bytes_sent", 0)),
            encoded_bytes=int(line.get("encoded_bytes", 0)),
            raw_bytes=int(line.get("raw_bytes", 0)),
            stall_s=stall_s,
            wire_s=wire_s,
            drift=None if line.get("drift") is None else _number(line["drift"]),
            codec=str(line.get("codec", "")),
            codec_error=None if line.get("codec_error") is None else _number(line["codec_error"]),
            launched=_number(line.get("launched"), landed - max(stall_s, wire_s)),
            landed=landed,
        )


@dataclass(frozen=True)
class Event:
    """Something worth telling: `kind` is that of its line, `level` is "info", "warning" or "error"."""

    kind: str
    time: float
    seconds: float
    step: int
    worker: int
    level: str
    text: str


@dataclass(frozen=True)
class LevelFigures:
    """All rounds of one level on one worker, or the bytes that no round reported (`rounds` is None)."""

    name: str
    rounds: int | None
    bytes_sent: int
    encoded_bytes: int = 0
    raw_bytes: int = 0
    stall_s: float = 0.0
    wire_s: float = 0.0
    codec: str = ""
    codec_error: float | None = None


class WorkerData:
    """One worker's lines, by their kinds."""

    def __init__(self, number: int, lines: Sequence[Line], status: str) -> None:
        self.number = number
        self.status = "unfinished" if status == "running" else status
        self.starts = [line for line in lines if line["kind"] == "start"]
        self.steps = [line for line in lines if line["kind"] == "step" and line.keys() >= _OF_STEPS]
        self.rounds = [Round.of(line) for line in lines if line["kind"] == "round"]
        self.evaluations = [line for line in lines if line["kind"] == "evaluation"]
        self.checkpoints = [line for line in lines if line["kind"] == "checkpoint"]
        self.failures = [line for line in lines if line["kind"] == "failed"]
        self.logged = [line for line in lines if line["kind"] in ("step", "values") and line.get("values")]
        self.others = [line for line in lines if line["kind"] in ("event", "end")]
        self.alive = lives((line["kind"], _number(line.get("elapsed"), 0.0)) for line in lines)
        self.end_s = max((_number(line.get("elapsed"), 0.0) for line in lines), default=0.0)

    @property
    def gone(self) -> bool:
        """Whether it ended before the others, which went on without it."""
        return self.status in _GONE

    @property
    def host(self) -> str:
        return str(self.starts[-1].get("host", "")) if self.starts else ""

    @property
    def last_step(self) -> int:
        return int(self.steps[-1]["step"]) if self.steps else 0

    @property
    def samples(self) -> int:
        return int(self._latest("samples"))

    @property
    def bytes_sent(self) -> int:
        return max(int(self._latest("bytes_sent")), sum(round_.bytes_sent for round_ in self.rounds))

    @property
    def stall_s(self) -> float:
        return max(self._latest("stall_s"), sum(round_.stall_s for round_ in self.rounds))

    def _latest(self, name: str) -> float:
        """Return the last value of a figure that grows with the steps; a round after the last step is not in it."""
        return _number(self.steps[-1].get(name), 0.0) if self.steps else 0.0

    @cached_property
    def curve(self) -> Curve:
        """Return the loss of this worker's own batches."""
        return Curve(
            [int(line["step"]) for line in self.steps],
            [_number(line.get("elapsed"), 0.0) for line in self.steps],
            [int(line.get("bytes_sent", 0)) for line in self.steps],
            [_number(line.get("loss")) for line in self.steps],
        )


class RunData:
    """One run: its workers, and what is said of it as a whole.

    Bytes, rounds and times of the whole are those of the first worker there is, `reference`, most often worker 0. One
    that the others went on without is not taken for it.
    """

    def __init__(self, name: str, workers: Sequence[WorkerData], config: str, environment: Mapping[str, Any]) -> None:
        self.name = name
        self.workers = workers
        self.config = config
        self.environment = environment
        stayed = [worker for worker in workers if not worker.gone]
        self.reference = next(iter([*stayed, *workers]), None) or WorkerData(0, [], "running")
        self._start: Line = self.reference.starts[-1] if self.reference.starts else {}

    @property
    def strategy(self) -> str:
        return str(self._start.get("strategy", "")) or str(self.settings.get("name", ""))

    @property
    def codec(self) -> str:
        return str(self.settings.get("codec", "")) or next((round.codec for round in self.reference.rounds), "")

    @property
    def unit(self) -> str:
        return str(self._start.get("unit", "samples"))

    @property
    def worker_count(self) -> int:
        return int(self._start.get("workers", len(self.workers)))

    @property
    def parameters(self) -> int | None:
        return self._start.get("parameters")

    @property
    def planned_steps(self) -> int:
        return int(self._start.get("steps", self.steps))

    @property
    def steps(self) -> int:
        return self.reference.last_step

    @property
    def seconds(self) -> float:
        return self.reference.end_s

    @property
    def bytes_sent(self) -> int:
        return self.reference.bytes_sent

    @property
    def ddp_bytes(self) -> int:
        """Return what DDP would have sent from this worker for the same steps."""
        return int(self._start.get("gradient_bytes", 0)) * self.steps

    @property
    def stall_s(self) -> float | None:
        """Return how long the reference worker stood still; DDP waits inside backward(), where nobody measures it."""
        return None if self.strategy == "ddp" else self.reference.stall_s

    @property
    def samples_per_s(self) -> float | None:
        """Return the samples of all workers in a second of training."""
        seconds = self.reference.curve.seconds
        samples = sum(worker.samples for worker in self.workers)
        return samples / seconds[-1] if seconds and seconds[-1] > 0 else None

    @property
    def began(self) -> float | None:
        return self.reference.starts[0].get("time") if self.reference.starts else None

    @property
    def status(self) -> str:
        """Return "finished", "interrupted" or "failed" as the workers wrote it, or "unfinished" if they did not."""
        given = {worker.status for worker in self.workers if not worker.gone}
        given = given or {"failed" if self.workers else "unfinished"}
        return next((status for status in ("failed", "unfinished", "interrupted") if status in given), given.pop())

    @cached_property
    def training(self) -> Curve:
        """Return the training loss, the mean of all workers' own at each step."""
        own = self.reference.curve
        others = [dict(zip(worker.curve.steps, worker.curve.losses, strict=True)) for worker in self.workers[1:]]
        means = []
        for step, loss in zip(own.steps, own.losses, strict=True):
            losses = [loss, *(other[step] for other in others if step in other)]
            means.append(sum(losses) / len(losses))
        return Curve(own.steps, own.seconds, own.bytes_sent, means)

    @cached_property
    def held_out(self) -> Curve:
        """Return the held-out loss of the workers' average."""
        # One worker writes for all; where workers come and go, another may go on.
        by_step = {int(line["step"]): line for worker in self.workers for line in worker.evaluations}
        lines = [by_step[step] for step in sorted(by_step)]
        own = self.reference.curve
        steps = [int(line["step"]) for line in lines]
        sent = [own.bytes_sent[index - 1] if (index := bisect_right(own.steps, step)) else 0 for step in steps]
        seconds = [_number(line.get("elapsed"), 0.0) for line in lines]
        return Curve(steps, seconds, sent, [_number(line.get("loss")) for line in lines])

    @property
    def training_loss(self) -> float | None:
        """Return the mean training loss of the last twentieth of the steps."""
        losses = self.training.losses[-max(1, len(self.training.losses) // 20) :]
        return sum(losses) / len(losses) if losses else None

    @property
    def levels(self) -> list[LevelFigures]:
        """Return the reference worker's bytes by level, and last those that no round reported."""
        by_level: dict[int, list[Round]] = {}
        for round_ in self.reference.rounds:
            by_level.setdefault(round_.level, []).append(round_)
        figures = [_level(rounds) for _, rounds in sorted(by_level.items())]
        outside = self.bytes_sent - sum(level.bytes_sent for level in figures)
        return [*figures, LevelFigures("gradients, outside rounds", None, outside)] if outside > 0 else figures

    @cached_property
    def events(self) -> list[Event]:
        """Return what happened, in order; what several workers wrote alike is told once."""
        events: dict[tuple[str, int], Event] = {}
        for worker in self.workers:
            for line in [*worker.starts, *worker.others]:
                event = _event(worker.number, line)
                if event is not None:
                    events.setdefault((event.text, event.step), event)
            for event in _failures(worker):
                events.setdefault((event.text, event.step), event)
        told = {event.step for event in events.values() if event.text.startswith("Interrupted:")}
        kept = [event for event in events.values() if event.text != "Interrupted" or event.step not in told]
        return sorted(kept, key=lambda event: (event.time, event.worker))

    def reaching(self, loss: float) -> tuple[int, float, int] | None:
        """Return step, seconds and bytes at the first evaluation that came down to a loss, or None."""
        curve = self.held_out
        for step, seconds, sent, value in zip(curve.steps, curve.seconds, curve.bytes_sent, curve.losses, strict=True):
            if value <= loss:
                return step, seconds, sent
        return None

    @cached_property
    def settings(self) -> Mapping[str, Any]:
        try:
            strategy = tomllib.loads(self.config).get("strategy", {})
        except (ValueError, RecursionError):
            return {}
        return strategy if isinstance(strategy, dict) else {}


def read_runs(folders: Sequence[Path]) -> list[RunData]:
    """Return what the folders tell of their runs; raise `UsageError` if one is not a run.

    A run is called by its folder's name, or by its path where two names are alike.
    """
    names = [folder.resolve().name for folder in folders]
    alike = {name for name in names if names.count(name) > 1}
    return [
        _read_run(folder, str(folder) if name in alike else name) for folder, name in zip(folders, names, strict=True)
    ]


def _read_run(folder: Path, name: str) -> RunData:
    run = open_run(folder)
    metrics = read_metrics(folder)
    workers = [WorkerData(number, metrics.lines[number], metrics.status(number)) for number in metrics.workers]
    return RunData(name, workers, run.config_file.read_text(errors="replace"), run.environment())


def _event(worker: int, line: Line) -> Event | None:
    kind, step = line["kind"], int(line["step"])
    level, text = str(line.get("level", "info")), str(line.get("text", ""))
    if kind == "start":
        if not line.get("resumed"):
            return None
        text = "Resumed"
    elif kind == "end":
        if line["status"] == "finished":
            return None
        level = "error" if line["status"] == "failed" else "warning"
        text = str(line["status"]).capitalize() + (f": {line['error']}" if line.get("error") else "")
    return Event(kind, _number(line.get("time"), 0.0), _number(line.get("elapsed"), 0.0), step, worker, level, text)


def _failures(worker: WorkerData) -> Iterator[Event]:
    """Yield the rounds that failed; those that follow each other for one reason are told together."""
    for reason, group in groupby(worker.failures, key=lambda line: str(line.get("reason", ""))):
        lines = list(group)
        first, last = lines[0], lines[-1]
        text = f"The round failed, and nothing was changed: {reason}"
        if len(lines) > 1:
            text = f"{len(lines)} rounds failed, up to step {last['step']}, and nothing was changed: {reason}"
        seconds = _number(first.get("elapsed"), 0.0)
        time = _number(first.get("time"), 0.0)
        yield Event("failed", time, seconds, int(first["step"]), worker.number, "warning", text)


def _level(rounds: Sequence[Round]) -> LevelFigures:
    errors = [round_.codec_error for round_ in rounds if round_.codec_error is not None]
    return LevelFigures(
        name=rounds[0].level_name,
        rounds=len(rounds),
        bytes_sent=sum(round_.bytes_sent for round_ in rounds),
        encoded_bytes=sum(round_.encoded_bytes for round_ in rounds),
        raw_bytes=sum(round_.raw_bytes for round_ in rounds),
        stall_s=sum(round_.stall_s for round_ in rounds),
        wire_s=sum(round_.wire_s for round_ in rounds),
        codec=rounds[0].codec,
        codec_error=sum(errors) / len(errors) if errors else None,
    )


def _number(value: Any, missing: float = math.nan) -> float:
    """Return a figure of a line, where NaN and infinities are the words "nan", "inf" and "-inf"."""
    return missing if value is None else float(value)

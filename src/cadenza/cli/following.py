"""What a run's metrics say so far, read as they are written: the display costs the workers nothing.

Each file is read on from where the last reading ended. Of the step lines only the newest counts, so the others are not
even parsed, and a run of a thousand steps a second is as cheap to follow as one of one.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from cadenza.training.metric_lines import read_line
from cadenza.training.metrics import metrics_files

__all__ = ["Follower", "Progress", "WorkerProgress"]

_STEP = b'{"kind": "step"'
_VALUES = b'{"kind": "values"'  # of the task's own, which only the report shows
_LONGEST_LINE = 1 << 20
_NEEDED = {  # what is shown of a line; one without it is left out
    "start": {"host", "gradient_bytes", "strategy", "unit", "steps", "workers", "parameters"},
    "step": {"loss", "samples", "bytes_sent", "stall_s", "next_sync"},
    "phase": {"text"},
    "round": {"drift"},
    "evaluation": {"loss"},
    "checkpoint": {"bytes"},
    "end": {"status", "time"},
}
_MOST_LOSSES = 400  # of the curve that is shown
_RATE_WINDOW_S = 15.0  # how far back the speed that is shown looks


@dataclass
class WorkerProgress:
    """How far one worker is."""

    worker: int
    host: str = ""
    step: int = 0
    elapsed: float = 0.0
    loss: float | None = None
    samples: int = 0
    bytes_sent: int = 0
    stall_s: float = 0.0
    next_sync: int | None = None
    gradient_bytes: float = 0.0
    status: str = "starting"
    phase: str = "starting"
    error: str | None = None
    ended: float = 0.0
    first_step: int = 0
    first_elapsed: float = 0.0
    recent: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=64))

    @property
    def gone(self) -> bool:
        """Whether the others go on without it."""
        return self.status in ("lost", "left", "dead", "restarting")

    @property
    def only_followed(self) -> bool:
        """Whether it failed because another worker had."""
        return self.error is not None and self.error.startswith("Stopped, because worker")

    @property
    def samples_per_s(self) -> float | None:
        """Samples a second, over the last seconds."""
        if self.gone or len(self.recent) < 2 or self.recent[-1][0] <= self.recent[0][0]:
            return None
        (then, before), (now, samples) = self.recent[0], self.recent[-1]
        return (samples - before) / (now - then)

    def take(self, line: dict[str, Any]) -> None:
        """Take in a line of this worker's metrics."""
        self.elapsed = line.get("elapsed", self.elapsed)
        match line["kind"]:
            case "start":
                self.host, self.status, self.error = line["host"], "training", None
                self.step = self.first_step = line["step"]
                self.first_elapsed, self.gradient_bytes = self.elapsed, line["gradient_bytes"]
                self.recent.clear()
            case "event" if "status" in line:
                self.status = line["status"]
            case "phase":
                self.status, self.phase = "restarting" if self.gone else "starting", line["text"]
            case "step":
                self.step, self.loss, self.samples = line["step"], float(line["loss"]), line["samples"]
                self.bytes_sent, self.stall_s, self.next_sync = line["bytes_sent"], line["stall_s"], line["next_sync"]
                self.recent.append((self.elapsed, self.samples))
                while len(self.recent) > 2 and self.recent[0][0] < self.elapsed - _RATE_WINDOW_S:
                    self.recent.popleft()
            case "end":
                self.status, self.error, self.ended = line["status"], line.get("error"), line["time"]


@dataclass
class Progress:
    """How far a run is, all its workers together."""

    strategy: str = ""
    unit: str = "samples"
    steps: int = 0
    expected: int = 0
    parameters: int = 0
    drift: float | None = None
    rounds: int = 0
    evaluation: tuple[int, float] | None = None
    evaluated: list[float] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    seen_step: int = 0
    checkpoint: tuple[int, int] | None = None
    workers: dict[int, WorkerProgress] = field(default_factory=dict)

    @property
    def starting(self) -> str:
        """What those do that have not come to their first step; nothing once all have."""
        phases = [worker.phase for worker in self.workers.values() if worker.status == "starting"]
        told = [f"{count} {phase}" for phase, count in Counter(phases).items()]
        return ", ".join(told)

    @property
    def step(self) -> int:
        """The step that every worker has done that the others did not go on without."""
        return min((worker.step for worker in self._present), default=0)

    @property
    def first(self) -> int:
        """The worker that speaks for all."""
        return min((worker.worker for worker in self._present), default=0)

    @property
    def _present(self) -> list[WorkerProgress]:
        present = [worker for worker in self.workers.values() if not worker.gone]
        return present or list(self.workers.values())

    @property
    def elapsed(self) -> float:
        return max((worker.elapsed for worker in self.workers.values()), default=0.0)

    @property
    def loss(self) -> float | None:
        losses = [worker.loss for worker in self._present if worker.loss is not None]
        return fmean(losses) if losses else None

    @property
    def samples_per_s(self) -> float | None:
        """What all workers do together."""
        rates = [worker.samples_per_s for worker in self._present]
        known = [rate for rate in rates if rate is not None]
        return sum(known) if known else None

    @property
    def bytes_sent(self) -> float:
        """What a worker has sent, on average."""
        return fmean(worker.bytes_sent for worker in self.workers.values()) if self.workers else 0.0

    @property
    def ddp_bytes(self) -> float:
        """What a worker would have sent under DDP."""
        return fmean(w.gradient_bytes * w.step for w in self.workers.values()) if self.workers else 0.0

    @property
    def stall_s(self) -> float | None:
        """How long a worker has stood still, on average; DDP waits inside backward(), where nobody measures it."""
        if self.strategy == "ddp":
            return None
        return fmean(worker.stall_s for worker in self.workers.values()) if self.workers else 0.0

    @property
    def seconds_left(self) -> float | None:
        """How long the slowest worker will still need at the speed it has had so far."""
        estimates = [
            (self.steps - worker.step) * (worker.elapsed - worker.first_elapsed) / (worker.step - worker.first_step)
            for worker in self._present
            if worker.step > worker.first_step
        ]
        return max(estimates) if estimates else None

    def remember(self) -> None:
        """Keep the loss for the curve of all of them; a long run is remembered by every second, fourth, … of them."""
        if self.loss is not None and math.isfinite(self.loss) and self.step > self.seen_step:
            self.seen_step = self.step
            self.losses.append(self.loss)
            if len(self.losses) > _MOST_LOSSES:
                del self.losses[::2]

    def take(self, worker: int, line: dict[str, Any]) -> None:
        """Take in a line of a worker's metrics."""
        self.workers.setdefault(worker, WorkerProgress(worker)).take(line)
        match line["kind"]:
            case "start":
                self.strategy, self.unit, self.steps = line["strategy"], line["unit"], line["steps"]
                self.expected, self.parameters = line["workers"], line["parameters"]
            case "round" if line["drift"] is not None:
                self.drift = float(line["drift"])
            case "evaluation":
                self.evaluation = line["step"], float(line["loss"])
                self.evaluated.append(float(line["loss"]))
                self.metrics = {name: float(value) for name, value in line.get("metrics", {}).items()}
            case "checkpoint":
                self.checkpoint = line["step"], line["bytes"]


class Follower:
    """Reads what is added to the metrics of a run, from now on or from their beginning.

    >>> import json, tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> follower = Follower(folder)
    >>> start = {"kind": "start", "step": 0, "host": "a", "gradient_bytes": 8, "strategy": "diloco", "unit": "tokens"}
    >>> start |= {"steps": 10, "workers": 1, "parameters": 2, "elapsed": 0.0}
    >>> _ = (folder / "worker-00000.jsonl").write_text(json.dumps(start) + chr(10))
    >>> [line["kind"] for worker, line in follower.read()], follower.progress.steps
    (['start'], 10)
    """

    def __init__(self, folder: Path, *, from_now: bool = False) -> None:
        self.progress = Progress()
        self._folder = folder
        self._places: dict[Path, int] = {path: _last_line(path) for path in self._files().values()} if from_now else {}

    def _files(self) -> dict[int, Path]:
        return metrics_files(self._folder)

    def read(self) -> list[tuple[int, dict[str, Any]]]:
        """Take in what is new, and return the lines that are not steps, with the worker that wrote them."""
        news = []
        for worker, path in self._files().items():
            for line in self._new_lines(path):
                self.progress.take(worker, line)
                if line["kind"] != "step":
                    news.append((worker, line))
        self.progress.remember()
        return news

    def _new_lines(self, path: Path) -> Iterator[dict[str, Any]]:
        with path.open("rb") as file:
            file.seek(self._places.get(path, 0))
            added = file.read()
        whole = added[: added.rfind(b"\n") + 1]  # the rest is still being written
        self._places[path] = self._places.get(path, 0) + len(whole)
        lines = [line for line in whole.splitlines() if not line.startswith(_VALUES)]
        for number, line in enumerate(lines):
            last_step = number + 1 == len(lines) or not lines[number + 1].startswith(_STEP)
            if not line.startswith(_STEP) or last_step:
                told = read_line(line)
                if told is not None and _NEEDED.get(told["kind"], set()) <= told.keys():
                    yield told


def _last_line(path: Path) -> int:
    """Return where the next whole line will begin: a worker that resumes cuts off what a crash left of one."""
    size = path.stat().st_size
    with path.open("rb") as file:
        file.seek(max(0, size - _LONGEST_LINE))
        end = file.read()
    return size - (len(end) - end.rfind(b"\n") - 1)

"""What a run tells while it trains: lines of JSON, one file a worker, only ever appended to.

Every line has its `kind`, `time` (seconds since 1970), `elapsed` (seconds of training, carried over a resume) and
`step`. A worker that is resumed goes on in its file: lines of steps that it takes again are then *stale*, and readers
drop them.

>>> import tempfile
>>> folder = Path(tempfile.mkdtemp())
>>> with MetricsWriter(folder / "worker-00000.jsonl") as writer:
...     writer.write("start", 0, worker=0, resumed=False)
...     writer.write("step", 1, loss=2.5)
...     writer.write("step", 2, loss=2.0)
>>> with MetricsWriter(folder / "worker-00000.jsonl") as writer:
...     writer.write("start", 1, worker=0, resumed=True)
...     writer.write("step", 2, loss=2.0)
>>> [(line["step"], line["loss"]) for line in read_lines(folder).of("step")]
[(1, 2.5), (2, 2.0)]
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self, TypeAlias

from cadenza.training.metric_lines import read_line

__all__ = [
    "NO_ROOM",
    "Line",
    "Metrics",
    "MetricsWriter",
    "Stopwatch",
    "metrics_file",
    "metrics_files",
    "plain",
    "read_lines",
]

Line: TypeAlias = dict[str, Any]

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FILE = re.compile(r"worker-(\d+)\.jsonl")
_OFTEN = ("step", "values")
_FLUSH_S = 0.25  # how long lines of these kinds may wait for others before they are written


class Stopwatch:
    """Counts the seconds of training, on from those before a resume.

    >>> Stopwatch(carried=60.0).elapsed >= 60
    True
    """

    def __init__(self, carried: float = 0.0) -> None:
        self._began = time.perf_counter() - carried

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self._began


def metrics_file(worker: int) -> str:
    """Return the name of a worker's file.

    >>> metrics_file(3)
    'worker-00003.jsonl'
    """
    return f"worker-{worker:05}.jsonl"


def metrics_files(folder: Path) -> dict[int, Path]:
    """Return the workers' files in a folder, by worker; what somebody else has put beside them is none.

    >>> metrics_files(Path("/a/folder/that/is/not/there"))
    {}
    """
    found = ((_FILE.fullmatch(path.name), path) for path in sorted(folder.glob("worker-*.jsonl")))
    return {int(match[1]): path for match, path in found if match}


class MetricsWriter:
    """Appends lines to a worker's file: those that come often together a few times a second, all others at once.

    What a crash left of a last line is cut off first.
    """

    def __init__(self, path: Path, stopwatch: Stopwatch | None = None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        _cut_torn_line(path)
        self.stopwatch = stopwatch or Stopwatch()
        self._file: BinaryIO = open(path, "ab", buffering=0)  # noqa: SIM115 - closed by close()
        self._waiting: list[str] = []
        self._rest = b""
        self._flushed = 0.0

    def write(self, kind: str, step: int, **figures: Any) -> None:
        """Append a line; infinity and NaN, which JSON does not have, become the texts "inf", "-inf" and "nan"."""
        now = self.stopwatch.elapsed
        line = {"kind": kind, "time": round(time.time(), 3), "elapsed": round(now, 6), "step": step, **figures}
        try:
            text = json.dumps(line, allow_nan=False)
        except ValueError:
            text = json.dumps(plain(line), allow_nan=False)
        self._waiting.append(text)
        if kind not in _OFTEN or now - self._flushed >= _FLUSH_S:
            self.flush()

    def flush(self) -> None:
        """Write what waits; where the disk is full it goes on waiting, and training goes on."""
        if self._waiting:
            self._rest += ("\n".join(self._waiting) + "\n").encode()
            self._waiting.clear()
        try:
            while self._rest:
                self._rest = self._rest[self._file.write(self._rest) :]
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
        self._flushed = self.stopwatch.elapsed

    def close(self) -> None:
        """Write what waits, if there is room, and close the file."""
        if not self._file.closed:
            self.flush()
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


@dataclass(frozen=True)
class Metrics:
    """The lines of a run, by worker, in the order in which they were written, without those that are stale.

    >>> metrics = Metrics({0: [{"kind": "start", "step": 0}, {"kind": "end", "step": 9, "status": "finished"}]})
    >>> metrics.status(0)
    'finished'
    """

    lines: Mapping[int, Sequence[Line]]

    @property
    def workers(self) -> list[int]:
        """The workers that have written something."""
        return sorted(self.lines)

    def of(self, kind: str, worker: int | None = None) -> list[Line]:
        """Return the lines of a kind, of one worker or of all, one worker after the other."""
        chosen = self.workers if worker is None else [worker]
        return [line for one in chosen for line in self.lines.get(one, ()) if line["kind"] == kind]

    def start(self, worker: int = 0) -> Line | None:
        """Return the line with which a worker began, the last time that it did."""
        return next(iter(reversed(self.of("start", worker))), None)

    def status(self, worker: int = 0) -> str:
        """Return "finished", "interrupted" or "failed" as a worker's last line says, or "running".

        One that was killed could not say so, and counts as running.
        """
        for line in reversed(self.lines.get(worker, ())):
            if line["kind"] == "end":
                return str(line["status"])
            if line["kind"] == "start":
                break
        return "running"


def read_lines(folder: Path) -> Metrics:
    """Return the lines of all workers' files in a folder, without stale ones and a last one that a crash tore."""
    return Metrics({worker: _without_stale(_parsed(path)) for worker, path in metrics_files(folder).items()})


def _parsed(path: Path) -> Iterator[Line]:
    for raw in path.read_bytes().splitlines():
        if (line := read_line(raw)) is not None:
            yield line


def _without_stale(lines: Iterator[Line]) -> list[Line]:
    """Return the lines that no later start has overtaken; events are history, and stay."""
    kept: list[Line] = []
    for line in lines:
        if line["kind"] == "phase":  # of a beginning, for those who watch it
            continue
        if line["kind"] == "start":
            kept = [old for old in kept if old["kind"] == "event" or _known_at(old) <= line["step"]]
        kept.append(line)
    return kept


def _known_at(line: Line) -> int:
    """Return the step at which a line was written: rounds are named by the step of their launch."""
    return int(line["step"]) + int(line.get("delay", 0) if line["kind"] == "round" else 0)


def _cut_torn_line(path: Path) -> None:
    if not path.is_file():
        return
    with open(path, "r+b") as file:
        whole = position = file.seek(0, os.SEEK_END)
        while position > 0:
            start = max(position - 65536, 0)
            file.seek(start)
            end = file.read(position - start).rfind(b"\n")
            if end >= 0:
                position = start + end + 1
                break
            position = start
        if position != whole:
            file.truncate(position)


def plain(value: Any) -> Any:
    """Return nested values with infinity and NaN, which JSON does not have, as texts.

    >>> plain({"loss": float("inf")})
    {'loss': 'inf'}
    """
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value

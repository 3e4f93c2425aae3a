"""What a worker's metrics say of its end: the last record it wrote, and what others add once it does not run any more.

>>> import tempfile
>>> path = Path(tempfile.mkdtemp()) / "worker-00001.jsonl"
>>> with MetricsWriter(path) as writer:
...     writer.write("step", 7, loss=2.5, samples=28, bytes_sent=0, stall_s=0.0)
>>> write_event(path, "Worker 1 was ended by SIGKILL.")
>>> last_record(path).step
7
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cadenza.training.metric_lines import read_line
from cadenza.training.metrics import MetricsWriter, Stopwatch

__all__ = ["NO_RECORD", "LastRecord", "last_record", "write_end", "write_event"]

_ENOUGH = 1 << 20  # bytes; a line is far shorter


@dataclass(frozen=True)
class LastRecord:
    """Where a worker stood when it last wrote something.

    Attributes:
        step: The last step it wrote of.
        elapsed: The seconds of training until now: time goes on while a worker is dead.
        counts: The figures of its last step; empty if it took none.
        error: What it said went wrong, if it came to that.
    """

    step: int
    elapsed: float
    counts: dict[str, Any]
    error: str = ""


NO_RECORD = LastRecord(0, 0.0, {})


def last_record(path: Path) -> LastRecord:
    """Return what the end of a worker's file tells."""
    last: dict[str, Any] | None = None
    error = ""
    for line in _backwards(path):
        if last is None or (line["kind"] == "end" and last["kind"] == "event"):
            error = str(line.get("error") or "")
        last = last or line
        if line["kind"] == "step":
            return LastRecord(line["step"], _elapsed(last), line, error)
    return LastRecord(last["step"], _elapsed(last), {}, error) if last else NO_RECORD


def write_event(path: Path, text: str, *, level: str = "warning", **more: Any) -> None:
    """Write down what happened to a worker."""
    _write(path, "event", text=text, level=level, **more)


def write_end(path: Path, status: str, error: str) -> None:
    """Write down that a worker will not come back."""
    _write(path, "end", status=status, error=error)


def _write(path: Path, kind: str, **figures: Any) -> None:
    known = last_record(path)
    with MetricsWriter(path, Stopwatch(known.elapsed)) as writer:
        writer.write(kind, known.step, **figures)


def _elapsed(line: dict[str, Any]) -> float:
    return float(line["elapsed"] + max(0.0, time.time() - line["time"]))


def _backwards(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines at the end of a file, the last one first."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _ENOUGH))
        lines = file.read().splitlines()
    for raw in reversed(lines):
        line = read_line(raw)  # None if it is torn, damaged, or cut by the beginning of what was read
        if line is not None and {"time", "elapsed"} <= line.keys():
            yield line

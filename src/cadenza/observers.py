"""Who is told about rounds: an observer is any callable that takes a `RoundReport`.

>>> reports = []
>>> notify([reports.append, log()], RoundReport.example(step=16))
>>> reports[0].step
16
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeAlias

from cadenza.reports import RoundReport

__all__ = ["Jsonl", "Observer", "TensorBoard", "jsonl", "log", "notify", "read_jsonl", "tensorboard"]

Observer: TypeAlias = Callable[[RoundReport], object]

_logger = logging.getLogger("cadenza")

# How every report begins, and more than the longest has: one of 10,000 participants has 200 KB.
_OPENING = b'{"step": '
_LONGEST_LINE = 1 << 24

# Observers that have raised: one that fails fails every round, and one message about it is enough.
_failed: list[Observer] = []


def notify(observers: Iterable[Observer], report: RoundReport) -> None:
    """Tell every observer; one that raises is logged the first time and never disturbs the training or the others.

    >>> steps = []
    >>> notify([lambda report: steps.append(report.step)], RoundReport.example(step=16))
    >>> steps
    [16]
    """
    for observer in observers:
        try:
            observer(report)
        except Exception:
            if not any(known == observer for known in _failed):
                _failed.append(observer)
                _logger.exception(
                    "The observer %r raised at step %d. Training goes on and it is told of later rounds too, but its "
                    "errors are not logged again.",
                    observer,
                    report.step,
                )


def log(logger: logging.Logger | None = None, level: int = logging.INFO) -> Observer:
    """Return an observer that writes a line a round to a logger, by default "cadenza".

    >>> import sys
    >>> logger = logging.Logger("example")
    >>> logger.addHandler(logging.StreamHandler(sys.stdout))
    >>> log(logger)(RoundReport.example(drift=0.02))
    step 500: level world, fragment all, 3.00 MB sent in 0.250 s, stalled 0.010 s, drift 0.02, fp32, 4 workers
    """
    target = _logger if logger is None else logger

    def write(report: RoundReport) -> None:
        if target.isEnabledFor(level):
            target.log(level, "%s", _line(report))

    return write


class Jsonl:
    """An observer that appends a line of JSON a round to a file; made by `jsonl`.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, Jsonl(Path(folder) / "rounds.jsonl") as observer:
    ...     observer(RoundReport.example(step=16))
    ...     observer.path.name
    'rounds.jsonl'
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file: BinaryIO | None = _open_mended(self.path)

    def __call__(self, report: RoundReport) -> None:
        if self._file is None:
            self._file = _open_mended(self.path)
        line = report.to_json().encode() + b"\n"
        try:
            written = self._file.write(line)  # unbuffered: one write a line, so nothing is left behind in a crash
            if written != len(line):
                raise OSError(f"Only {written} of {len(line)} bytes of a report could be written to {self.path}.")
        except OSError:
            self.close()  # the next report opens the file anew and cuts off what was half written
            raise

    def close(self) -> None:
        """Close the file; a later report would open it again."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> Jsonl:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def jsonl(path: str | os.PathLike[str]) -> Jsonl:
    """Return an observer that appends a line of JSON a round to `path`, whose folders it makes; one file a rank.

    What a crash left of a last line is cut off before the first report, so a resumed run goes on in the same file.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with jsonl(f"{folder}/runs/rank0.jsonl") as observer:
    ...         observer(RoundReport.example(step=16))
    ...     read_jsonl(f"{folder}/runs/rank0.jsonl")
    [RoundReport(step=16, ...)]
    """
    return Jsonl(path)


def read_jsonl(path: str | os.PathLike[str]) -> list[RoundReport]:
    """Return the reports in a file that `jsonl` wrote, without a last line that a crash tore.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "rounds.jsonl")
    ...     with jsonl(path) as observer:
    ...         observer(RoundReport.example(step=16))
    ...     with open(path, "a") as file:
    ...         _ = file.write('{"step": 32, "lev')
    ...     [report.step for report in read_jsonl(path)]
    [16]
    """
    lines = Path(path).read_bytes().split(b"\n")
    if _is_torn(lines[-1]):
        lines.pop()
    reports = []
    for number, line in enumerate(lines, start=1):
        try:
            reports.append(RoundReport.from_json(line.decode()))
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"Line {number} of {os.fspath(path)} is not a report that cadenza.observers.jsonl wrote ({error}). "
                "Give the path of one of its files, or take that line out."
            ) from error
    return reports


class _Writer(Protocol):
    def add_scalar(self, tag: str, scalar_value: float, global_step: int, /) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """An observer that draws a round's figures as curves over the steps; made by `tensorboard`.

    >>> class Paper:
    ...     def add_scalar(self, tag, value, step):
    ...         print(tag, value, step)
    >>> TensorBoard(Paper())(RoundReport.example(drift=0.02))
    cadenza/world/all/bytes_sent 3000064 500
    cadenza/world/all/encoded_bytes 2000000 500
    cadenza/world/all/stall_s 0.01 500
    cadenza/world/all/wire_s 0.25 500
    cadenza/world/all/participants 4 500
    cadenza/world/all/drift 0.02 500
    """

    def __init__(self, writer_or_path: Any) -> None:
        self._owned = isinstance(writer_or_path, str | os.PathLike)
        self._writer: _Writer = _writer_at(writer_or_path) if self._owned else writer_or_path
        if not callable(getattr(self._writer, "add_scalar", None)):
            raise TypeError(
                f"tensorboard() takes a folder or a SummaryWriter (something with add_scalar); got {writer_or_path!r}."
            )

    def __call__(self, report: RoundReport) -> None:
        prefix = f"cadenza/{report.level_name or report.level}/{report.fragment_name or report.fragment}"
        for name, value in _curves(report).items():
            self._writer.add_scalar(f"{prefix}/{name}", value, report.step)

    def close(self) -> None:
        """Close the writer if it was made here; one that was given belongs to its giver."""
        if self._owned:
            self._writer.close()


def tensorboard(writer_or_path: Any) -> TensorBoard:
    """Return an observer that writes to TensorBoard: into a folder, or by a SummaryWriter of yours.

    A folder needs the tensorboard package: `pip install 'cadenza[tensorboard]'`.

    >>> class Writer:
    ...     def add_scalar(self, tag, value, step):
    ...         pass
    >>> tensorboard(Writer())(RoundReport.example(step=16))
    """
    return TensorBoard(writer_or_path)


def _writer_at(path: str | os.PathLike[str]) -> _Writer:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError(
            f"Writing TensorBoard files to {os.fspath(path)!r} needs the tensorboard package, which is not installed; "
            "install it with: pip install 'cadenza[tensorboard]'. Without it, use cadenza.observers.jsonl."
        ) from error
    writer: _Writer = SummaryWriter(os.fspath(path))
    return writer


def _curves(report: RoundReport) -> dict[str, float]:
    curves: dict[str, float | None] = {
        "bytes_sent": report.bytes_sent,
        "encoded_bytes": report.encoded_bytes,
        "stall_s": report.stall_s,
        "wire_s": report.wire_s,
        "participants": len(report.participants),
        "drift": report.drift,
        "codec_error": report.codec_error,
    }
    return {name: value for name, value in curves.items() if value is not None}


def _line(report: RoundReport) -> str:
    """Say in one line what a person who watches the run wants to know of a round."""
    if report.kind == "failed":
        return f"step {report.step}: the round of {report.fragment_name} failed, nothing was changed: {report.reason}"
    parts = [
        f"level {report.level_name or report.level}",
        f"fragment {report.fragment_name or report.fragment}",
        f"{report.bytes_sent / 1e6:.2f} MB sent in {report.wire_s:.3f} s",
        f"stalled {report.stall_s:.3f} s",
    ]
    if report.drift is not None:
        parts.append(f"drift {report.drift:.3g}")
    if report.codec:
        error = "" if report.codec_error is None else f" with error {report.codec_error:.3g}"
        parts.append(report.codec + error)
    if report.participants:
        parts.append(f"{len(report.participants)} workers")
    return f"step {report.step}: " + ", ".join(parts)


def _open_mended(path: Path) -> BinaryIO:
    """Open a file of lines for appending, without a last line that a crash tore."""
    if path.is_file():
        _mend(path)
    return open(path, "ab", buffering=0)


def _mend(path: Path) -> None:
    with open(path, "r+b") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - _LONGEST_LINE, 0))
        last = file.read().rpartition(b"\n")[2]
        if last and _is_torn(last):
            file.truncate(size - len(last))
        elif last:  # a whole report without its end, or something that is not ours to delete
            file.write(b"\n")


def _is_torn(last: bytes) -> bool:
    """Say whether what follows the last line's end is nothing, or the beginning of a report."""
    if last[: len(_OPENING)] != _OPENING[: len(last)]:
        return False
    try:
        json.loads(last)
    except ValueError:  # of JSON or of UTF-8
        return True
    return False

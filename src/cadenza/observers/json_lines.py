"""Reports as lines of JSON in a file, which a crash cannot spoil."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import BinaryIO

from cadenza.reports import RoundReport

__all__ = ["Jsonl", "jsonl", "read_jsonl"]

# How every report begins, and more than the longest has: one of 10,000 participants has 200 KB.
_OPENING = b'{"step": '
_LONGEST_LINE = 1 << 24


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

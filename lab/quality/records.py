"""The runs that are done, a line each in a file that only grows; and which are being done now, by whom."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from lab.quality.training import Setting

__all__ = ["FOLDER", "Records"]

FOLDER = Path(__file__).resolve().parent.parent / "results" / "quality"


class Records:
    """The runs in a folder, by the keys of their settings; kill -9 loses the run that was being done, and no other."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self._folder = folder
        self._path = folder / "runs.jsonl"
        self._read = 0
        self.runs: dict[str, dict[str, Any]] = {}
        self.refresh()

    def refresh(self) -> None:
        """Read what others have added; a line that was cut off by a kill counts as none."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._read)
            for line in file:
                if line.endswith(b"\n"):
                    self._read += len(line)
                    with suppress(json.JSONDecodeError):
                        entry = json.loads(line)
                        self.runs[entry["key"]] = entry

    def get(self, setting: Setting) -> dict[str, Any] | None:
        """Return what a run gave, if it is done."""
        return self.runs.get(setting.key)

    def add(self, setting: Setting, result: dict[str, Any]) -> None:
        """Write down a run."""
        line = json.dumps({"key": setting.key, **result}).encode() + b"\n"
        self._folder.mkdir(parents=True, exist_ok=True)
        with self._path.open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if file.tell() and not self._path.read_bytes().endswith(b"\n"):
                file.write(b"\n")
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
        self.refresh()

    @contextmanager
    def claimed(self, setting: Setting) -> Iterator[bool]:
        """Say whether this process may do a run now; a claim ends with its process, however that ends."""
        claims = self._folder / "claims"
        claims.mkdir(parents=True, exist_ok=True)
        with (claims / hashlib.blake2b(setting.key.encode(), digest_size=8).hexdigest()).open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                yield True

"""Who trains a run: a lock in its folder names host, process and since when, so that nobody else writes into it.

The lock is the kernel's, on `owner.json`. It is held by the process that made it and by those it hands the lock's file
to, and ends with the last of them: what a crash leaves behind is a file that nobody holds. The nodes of one launch
share it.

>>> import tempfile
>>> folder = Path(tempfile.mkdtemp())
>>> with owning(folder) as lock:
...     lock.owner.host == socket.gethostname()
True
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from cadenza.errors import UsageError

__all__ = ["Lock", "Owner", "owning"]

_FILE = "owner.json"
_SETTLING_S = 2.0  # for another node, which has just made the lock, to share it
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}


@dataclass(frozen=True)
class Owner:
    """A process that trains a run; `job` is what the nodes of one launch have in common, empty for one node."""

    host: str
    process: int
    since: float
    job: str = ""

    def __str__(self) -> str:
        since = datetime.fromtimestamp(self.since, UTC)
        return f"process {self.process} on {self.host}, since {since:%Y-%m-%d %H:%M:%S} UTC"


@dataclass(frozen=True)
class Lock:
    """A run that is owned.

    Attributes:
        owner: This process.
        before: An owner that ended without saying so, if there was one.
        file: What to hand on to processes that write into the run's folder, which then hold the lock as well; nothing
            where the file system has no locks.
    """

    owner: Owner
    before: Owner | None
    file: int | None


@contextmanager
def owning(folder: Path, *, job: str = "") -> Iterator[Lock]:
    """Own a run inside the block.

    Args:
        folder: The run's folder.
        job: What the nodes of one launch have in common, if there are several.

    Raises:
        UsageError: Somebody else does.
    """
    owner = Owner(socket.gethostname(), os.getpid(), round(time.time(), 3), job)
    file = os.open(folder / _FILE, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        locked = _lock(file, folder, job)
        before = _read(folder / _FILE)
        if locked != "joined":
            os.pwrite(file, json.dumps(asdict(owner)).encode().ljust(os.fstat(file).st_size), 0)
            if locked == "alone" and job:
                fcntl.flock(file, fcntl.LOCK_SH)
        yield Lock(owner, None if locked == "joined" else before, file if locked != "unlocked" else None)
    finally:
        if _read(folder / _FILE) == owner:
            os.ftruncate(file, 0)
        os.close(file)


def _lock(file: int, folder: Path, job: str) -> str:
    """Return "alone", "joined" to other nodes of the same launch, or "unlocked" where there are no locks."""
    deadline = time.monotonic() + (_SETTLING_S if job else 0.0)
    while True:
        if (done := _try(file, fcntl.LOCK_EX)) is not False:
            return "unlocked" if done is None else "alone"
        if job and _try(file, fcntl.LOCK_SH):
            owner = _read(folder / _FILE)
            if owner is not None and owner.job == job:
                return "joined"
        if time.monotonic() >= deadline:
            raise UsageError(
                f"{folder} is being trained by {_read(folder / _FILE) or 'another process'}. Two at once would damage "
                "its record: wait for that one to end, or stop it."
            )
        time.sleep(0.1)


def _try(file: int, kind: int) -> bool | None:
    """Say whether the lock was given; None where there are none."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return None
        raise
    return True


def _read(path: Path) -> Owner | None:
    try:
        return Owner(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None

"""What a worker that joins is told, by arguments or by its environment; whatever cannot be meant is refused."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from operator import index

from cadenza.errors import NotInitializedError, UsageError
from cadenza.participants.sites import as_site

__all__ = [
    "accepts_rollback",
    "from_environment",
    "job_name",
    "lease",
    "site_of",
    "wait",
    "worker_number",
    "workers_count",
]

_ACCEPT_ROLLBACK = "CADENZA_ACCEPT_ROLLBACK"
_YES, _NO = ("1", "true", "yes"), ("0", "false", "no", "")
_MOST_WORKERS = 1 << 16  # to start together: the first round looks for each of them


def from_environment(argument: str, *names: str) -> str:
    """Return the first of some environment variables that is set, or raise if none is."""
    found = next((os.environ[name] for name in names if name in os.environ), None)
    if found is None:
        raise NotInitializedError(
            f"Under skip_round and shrink, workers meet in a store that outlives them, and {argument} is not known: "
            f"set {' or '.join(names)}, or pass membership=cadenza.join({argument}=…) to attach()."
        )
    return found


def job_name(given: str | None = None) -> str:
    """Return the name of the job that was given, or else that of ``CADENZA_JOB``, or else "job".

    >>> job_name("run 7")
    'run 7'
    """
    job = given or os.environ.get("CADENZA_JOB", "job")
    try:
        job.encode()
    except (UnicodeEncodeError, AttributeError):
        raise UsageError(
            f"The name of a job is a text that UTF-8 can write; got {job!r}: set CADENZA_JOB, or job=… of join()."
        ) from None
    return job


def worker_number(given: int | str) -> int:
    """Return a worker's number.

    >>> worker_number("3")
    3
    """
    return _whole("worker", given, 0)


def workers_count(given: int | str) -> int:
    """Return how many workers start together.

    >>> workers_count("99999999999")
    Traceback (most recent call last):
    ValueError: workers is how many start together, at most 65536; got '99999999999'. Set CADENZA_WORKERS (or \
WORLD_SIZE), or workers=… of join(), to that number; others may join later.
    """
    count = _whole("workers", given, 1)
    if count > _MOST_WORKERS:
        raise ValueError(
            f"workers is how many start together, at most {_MOST_WORKERS}; got {given!r}. Set CADENZA_WORKERS (or "
            "WORLD_SIZE), or workers=… of join(), to that number; others may join later."
        )
    return count


def accepts_rollback(given: bool | None = None) -> bool:
    """Return whether an older state may be gone on from, as given or else as ``CADENZA_ACCEPT_ROLLBACK`` says.

    >>> accepts_rollback(True)
    True
    """
    if given is not None:
        return given
    word = os.environ.get(_ACCEPT_ROLLBACK, "")
    if word.strip().lower() not in _YES + _NO:
        raise UsageError(
            f'{_ACCEPT_ROLLBACK} is "1", "true" or "yes" to go on from an older state where nobody is left who has '
            f'seen the last rounds, or "0", "false", "no" or nothing to wait for them; got {word!r}.'
        )
    return word.strip().lower() in _YES


def site_of(given: str | Sequence[str] | None) -> str:
    """Return where a worker is, as given or else as ``CADENZA_SITE`` says; nothing if neither does."""
    site = os.environ.get("CADENZA_SITE") if given is None else given
    return as_site(site) if site else ""


def lease(seconds: float) -> float:
    """Return the seconds after which a worker without a beat counts as gone.

    >>> lease(0)
    Traceback (most recent call last):
    ValueError: lease_s is a positive number of seconds; got 0.
    """
    if not math.isfinite(seconds) or seconds <= 0:
        raise ValueError(f"lease_s is a positive number of seconds; got {seconds!r}.")
    return seconds


def wait(seconds: float) -> float:
    """Return the seconds for which a store is waited for."""
    if not seconds >= 0:
        raise ValueError(f"wait_s is a number of seconds, not below 0; got {seconds!r}.")
    return seconds


def _whole(name: str, value: int | str, least: int) -> int:
    try:
        number = int(value) if isinstance(value, str) else index(value)
    except (ValueError, TypeError):
        number = least - 1
    if number < least or isinstance(value, bool):
        raise ValueError(f"{name} is a whole number of at least {least}; got {value!r}.")
    return number

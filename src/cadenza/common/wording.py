"""How messages name things, the same everywhere."""

from __future__ import annotations

from collections.abc import Collection

__all__ = ["count_workers", "name_workers"]


def name_workers(workers: Collection[int]) -> str:
    """Name workers in a sentence.

    >>> name_workers({2, 0}), name_workers([3]), name_workers([])
    ('workers 0, 2', 'worker 3', 'no worker')
    """
    if not workers:
        return "no worker"
    return ("worker " if len(workers) == 1 else "workers ") + ", ".join(map(str, sorted(workers)))


def count_workers(count: int) -> str:
    """Say how many workers there are.

    >>> count_workers(1), count_workers(4)
    ('1 worker', '4 workers')
    """
    return f"{count} worker" + ("" if count == 1 else "s")

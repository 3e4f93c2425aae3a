"""How messages name things, the same everywhere."""

from __future__ import annotations

from collections.abc import Collection

__all__ = ["name_workers"]


def name_workers(workers: Collection[int]) -> str:
    """Name workers in a sentence.

    >>> name_workers({2, 0}), name_workers([3]), name_workers([])
    ('workers 0, 2', 'worker 3', 'no worker')
    """
    if not workers:
        return "no worker"
    return ("worker " if len(workers) == 1 else "workers ") + ", ".join(map(str, sorted(workers)))

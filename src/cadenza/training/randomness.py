"""Random numbers of a run: the same model on every worker, other numbers on each, and none spent by the onlookers.

>>> seed_everything(1)
>>> before = torch.rand(1)
>>> seed_everything(1)
>>> with undisturbed():
...     _ = torch.rand(7)
>>> bool(torch.rand(1) == before)
True
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from cadenza.checkpoint.loop import random_state, set_random_state

__all__ = ["seed_everything", "seed_of", "undisturbed"]


def seed_of(*parts: object) -> int:
    """Return a seed that depends on all the parts, and differs widely where they differ a little.

    >>> seed_of(1, "worker", 0) == seed_of(1, "worker", 0), seed_of(1, "worker", 0) == seed_of(1, "worker", 1)
    (True, False)
    """
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")


def seed_everything(seed: int) -> None:
    """Seed Python's, torch's and, if it is loaded, NumPy's random numbers."""
    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Let whatever is drawn inside the block leave no trace."""
    kept = random_state()
    try:
        yield
    finally:
        set_random_state(kept)

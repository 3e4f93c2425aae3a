"""Contributions that would harm everyone: not finite, or far larger than the others'. All members judge alike.

>>> headers = [Header(0, b"", True, norm2=norm2) for norm2 in (1.0, 1.2, 1e9)]
>>> [header.weight for header in judge(headers, explosion=10.0)]
[1.0, 1.0, 0.0]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from cadenza.engine.header import Header

__all__ = ["judge"]

_FEWEST = 3  # contributions; of two nobody can say which one is wrong


def judge(headers: Sequence[Header], *, explosion: float | None) -> list[Header]:
    """Return the headers, those of contributions that count for nothing with weight 0 and the mark `poisoned`."""
    norms = [header.norm2 for header in headers if header.weight > 0 and not header.poisoned]
    if explosion is None or len(norms) < _FEWEST:
        return list(headers)
    limit = explosion**2 * median(norms)
    return [
        replace(header, weight=0.0, poisoned=True) if header.weight > 0 and header.norm2 > limit > 0 else header
        for header in headers
    ]

"""Lists of workers, and of what they count, as short texts; whatever is read from a store is checked."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["in_ranges", "numbers_of", "shares_of", "whole_numbers"]

_MOST = 1_000_000  # workers in a list


def in_ranges(numbers: Sequence[int]) -> str:
    """Return ascending numbers as a short text.

    >>> in_ranges((0, 1, 2, 3, 7, 9, 10))
    '0-3 7 9-10'
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], number]
        else:
            runs.append([number])
    return " ".join("-".join(map(str, run)) for run in runs)


def numbers_of(text: str) -> tuple[int, ...]:
    """Return the numbers of which `in_ranges` made a text."""
    found: list[int] = []
    for run in text.split():
        first, _, last = run.partition("-")
        if not (first.isdecimal() and (last or first).isdecimal()) or int(last or first) - int(first) > _MOST:
            raise ValueError(f"these are no ranges of whole numbers: {text[:100]!r}")
        found += range(int(first), int(last or first) + 1)
    if len(found) > _MOST:
        raise ValueError(f"these are too many workers: {text[:100]!r}")
    return tuple(found)


def whole_numbers(values: Sequence[object]) -> tuple[int, ...]:
    """Return whole numbers from 0, or raise."""
    found = tuple(value for value in values if type(value) is int and value >= 0)
    if len(found) != len(values):
        raise ValueError(f"these are no whole numbers from 0: {values!r}")
    return found


def shares_of(values: Sequence[object]) -> tuple[float, ...]:
    """Return finite numbers from 0 that can be added up, or raise."""
    found = tuple(float(value) for value in values if type(value) in (int, float))  # type: ignore[arg-type]
    if len(found) != len(values) or not all(value >= 0 for value in found) or not math.isfinite(sum(found)):
        raise ValueError(f"these are no weights: {values!r}")
    return found

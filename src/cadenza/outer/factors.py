"""Options that outer updates share: a factor on the outer learning rate that changes over rounds, and clipping."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TypeAlias

from cadenza.common.checks import as_number, as_positive
from cadenza.common.milestones import Milestones

__all__ = ["PROBED_ROUNDS", "Factor", "checked_clip", "checked_factor", "factor_after"]

Factor: TypeAlias = Callable[[int], float]

# Two functions are taken for the same if they have one name and give one factor at each of these rounds.
PROBED_ROUNDS = {"probe": (0, *(10**power for power in range(6)))}


def factor_after(schedule: Factor | None, rounds: int) -> float:
    """Return the factor on the outer learning rate, checked: a function may give anything.

    >>> factor_after(lambda rounds: 0.5, 3), factor_after(None, 3)
    (0.5, 1.0)
    """
    if schedule is None:
        return 1.0
    factor = as_number(f"The factor that schedule= gives after {rounds} rounds", schedule(rounds))
    if not 0 <= factor < math.inf:
        raise ValueError(
            f"The schedule of the outer lr gives {factor} after {rounds} rounds; it must give a factor of at least 0."
        )
    return factor


def checked_factor(schedule: Factor | Mapping[int, float] | None) -> Factor | None:
    """Return a schedule of the outer lr as a function, checked; milestones become one.

    >>> checked_factor({0: 0.1, 10: 1.0})(9)
    0.1
    """
    if isinstance(schedule, Mapping):
        return _milestones(schedule)
    if schedule is not None and not callable(schedule):
        raise TypeError(
            "schedule= takes a function of the number of rounds or milestones {first round: factor}; "
            f"got {schedule!r}. A factor that stays the same belongs into lr."
        )
    factor_after(schedule, 0)
    return schedule


def _milestones(factors: Mapping[int, float]) -> Milestones[float]:
    for rounds, factor in factors.items():
        _check_milestone(rounds)
        if not 0 <= as_number(f"the factor from round {rounds}", factor) < math.inf:
            raise ValueError(f"The factor from round {rounds} must be a number of at least 0; got {factor!r}.")
    points = sorted((rounds, float(factor)) for rounds, factor in factors.items())
    return Milestones(tuple(points), before=1.0)


def _check_milestone(rounds: object) -> None:
    if isinstance(rounds, bool) or not isinstance(rounds, int):
        raise TypeError(f"A milestone of schedule= is a whole number of rounds (int); got {rounds!r}.")
    if rounds < 0:
        raise ValueError(f"A milestone of schedule= is a number of rounds, counted from 0; got {rounds}.")


def checked_clip(clip: float | None) -> float | None:
    """Return the norm to which deltas are clipped, checked; None for no clipping.

    >>> checked_clip(1)
    1.0
    """
    return None if clip is None else as_positive("clip", clip)

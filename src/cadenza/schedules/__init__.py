"""WHEN a round runs: pure functions of the local step and a small state that can be written as JSON.

The step `n` counts local steps since the end of the warm-up, from 1. A schedule keeps nothing to itself: its `State`
travels with the run, so a run that is stopped and resumed meets at the same steps. A schedule may depend only on `n`
and on the drift or on measured times, which are the same numbers on all ranks; so all ranks decide alike without asking
each other.

>>> schedule = every(4)
>>> state = schedule.start()
>>> [n for n in range(1, 13) if schedule.is_due(n, state)]
[4, 8, 12]

There is no torch in here, so that a planner can use schedules without it.
"""

from cadenza.schedules.adaptive import Adaptive, adaptive
from cadenza.schedules.auto import Auto, TimedSchedule, auto, enough_steps
from cadenza.schedules.base import Schedule, State
from cadenza.schedules.changing import Changing, changing
from cadenza.schedules.every import Every, every
from cadenza.schedules.levels import gap_after, largest_due, smallest_gap, staggered_levels
from cadenza.schedules.own_periods import OwnPeriods, StateSchedule, moments

__all__ = [
    "Adaptive",
    "Auto",
    "Changing",
    "Every",
    "OwnPeriods",
    "Schedule",
    "State",
    "StateSchedule",
    "TimedSchedule",
    "adaptive",
    "auto",
    "changing",
    "enough_steps",
    "every",
    "gap_after",
    "largest_due",
    "moments",
    "smallest_gap",
    "staggered_levels",
]

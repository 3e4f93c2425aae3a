"""WHAT IF a worker is gone, late or wrong: raise, skip the round, or go on with those who are left.

A policy only says what is wanted; `cadenza.membership` finds out who is there, and the synchronizer does it. Under
`skip_round` and `shrink` a round that fails changes nothing on any worker.

>>> shrink(min_workers=2).enough(here={0, 2}, last={0, 1, 2})
True
>>> shrink().enough(here={2}, last={0, 1, 2})  # a minority never goes on by itself
False
"""

from cadenza.faults.base import FaultPolicy
from cadenza.faults.raise_error import RaiseError, raise_error
from cadenza.faults.settings import Patience, Poison
from cadenza.faults.shrink import Shrink, for_inner_level, shrink, to_wait_for_all
from cadenza.faults.skip_round import SkipRound, skip_round

__all__ = [
    "FaultPolicy",
    "Patience",
    "Poison",
    "RaiseError",
    "Shrink",
    "SkipRound",
    "for_inner_level",
    "raise_error",
    "shrink",
    "skip_round",
    "to_wait_for_all",
]

"""A strategy is seven choices, all of them in one place and checked together.

When, with whom, what, how much each worker counts, how it is written, what becomes of the mean, and what if it fails.
`LevelPlan` holds those that can differ from level to level, `Strategy` the levels and the rest. Both only say what is
wanted: a `Synchronizer` does it. Every piece may be a user's own that fulfils its protocol.

>>> import cadenza
>>> inner = LevelPlan(cadenza.every(16), groups="host")
>>> outer = LevelPlan(cadenza.every(64), codec=cadenza.codecs.int8(), outer=cadenza.nesterov())
>>> Strategy(levels=(inner, outer)).period
16
"""

from cadenza.strategy.level_plan import Groups, LevelPlan, as_codec, as_schedule
from cadenza.strategy.options import Buffers, CommonOptions, OptimizerState, StrategyOptions, Weight
from cadenza.strategy.strategy import Strategy, check_is_strategy

__all__ = [
    "Buffers",
    "CommonOptions",
    "Groups",
    "LevelPlan",
    "OptimizerState",
    "Strategy",
    "StrategyOptions",
    "Weight",
    "as_codec",
    "as_schedule",
    "check_is_strategy",
]

"""The options of a strategy, by name and type, for presets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypedDict

from cadenza.faults import FaultPolicy
from cadenza.fragments import Fragmentation
from cadenza.schedules import StateSchedule
from cadenza.weighting import Weighting

__all__ = ["Buffers", "CommonOptions", "OptimizerState", "StrategyOptions", "Weight"]

Buffers = bool | Literal["statistics"]
OptimizerState = Literal["leave", "average", "reset"] | StateSchedule
Weight = Literal["uniform", "samples"] | Callable[[], float] | Weighting


class CommonOptions(TypedDict, total=False):
    """The options of a `Strategy` that no preset has an argument of its own for.

    >>> from cadenza.strategy import LevelPlan, Strategy
    >>> options: CommonOptions = {"weight": "samples"}
    >>> Strategy(levels=(LevelPlan(8),), **options).weight
    'samples'
    """

    buffers: Buffers
    optimizer_state: OptimizerState
    weight: Weight
    balanced: bool
    offload: bool
    measure_drift: bool
    faults: FaultPolicy
    average_gradients: bool


class StrategyOptions(CommonOptions, total=False):
    """All options of a `Strategy` beside its levels; presets take them by name.

    >>> from cadenza import local_sgd
    >>> options: StrategyOptions = {"delay": 2, "weight": "samples"}
    >>> local_sgd(8, **options).delay
    2
    """

    fragments: Fragmentation
    warmup_steps: int
    delay: int
    alpha: float
    keep_progress: bool

"""A strategy is seven choices, all of them in one place and checked together.

When, with whom, what, how much each worker counts, how it is written, what becomes of the mean, and what if it fails.
`LevelPlan` holds those that can differ from level to level, `Strategy` the levels and the rest. Both only say what is
wanted: a `Synchronizer` does it.

>>> import cadenza
>>> inner = LevelPlan(cadenza.every(16), groups="host")
>>> outer = LevelPlan(cadenza.every(64), codec=cadenza.codecs.int8(), outer=cadenza.nesterov())
>>> Strategy(levels=(inner, outer)).period
16
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, SupportsIndex

from cadenza.codecs import Codec, fp32
from cadenza.common.checks import check_not_negative
from cadenza.common.identity import identity
from cadenza.faults import FaultPolicy, raise_error
from cadenza.fragments import Fragmentation, Whole
from cadenza.outer import Outer, mean
from cadenza.schedules import Every, Schedule, every, smallest_gap
from cadenza.topology import Level
from cadenza.weighting import Weighting, by_function, samples, uniform

__all__ = ["Groups", "LevelPlan", "Strategy", "as_schedule"]

Groups = Literal["all", "host"] | int | tuple[tuple[int, ...], ...]


def as_schedule(period: Any) -> Schedule:
    """Return a schedule as it is, and `every(n)` for a whole number of steps of whatever library."""
    if isinstance(period, SupportsIndex) and not isinstance(period, bool):
        return every(operator.index(period))
    schedule: Schedule = period
    return schedule


@dataclass(frozen=True)
class LevelPlan:
    """The choices of one level.

    Args:
        schedule: When; a number means that many steps.
        groups: With whom: "all", the ranks of one "host", a number for runs of that many ranks, or explicit groups.
        codec: How differences are written on the wire.
        outer: What becomes of the mean.
        name: What the level is called in reports; "level 0" and so on without one.
        keep_anchor: Send differences from an anchor also where a plain mean would not need one.

    >>> LevelPlan(8).schedule
    Every(period=8, offset=0)
    """

    schedule: Schedule
    groups: Groups = "all"
    codec: Codec = field(default_factory=fp32)
    outer: Outer = field(default_factory=mean)
    name: str = field(default="", metadata={"local": "it only stands in reports"})
    keep_anchor: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "schedule", as_schedule(self.schedule))
        for value, wanted in ((self.schedule, "is_due"), (self.codec, "encoded_bytes"), (self.outer, "needs_inner_lr")):
            if not hasattr(value, wanted):
                raise TypeError(
                    f"{value!r} cannot be a part of a level: a schedule (cadenza.every(…)), a codec "
                    "(cadenza.codecs.int8()) and an outer update (cadenza.nesterov()) are required."
                )
        sized = isinstance(self.groups, int) and not isinstance(self.groups, bool) and self.groups >= 1
        if not sized and not isinstance(self.groups, tuple) and self.groups not in ("all", "host"):
            raise ValueError(
                f'groups is "all", "host", a number of ranks or a tuple of tuples of ranks; got {self.groups!r}.'
            )
        if isinstance(self.groups, tuple):
            if not all(isinstance(group, tuple) for group in self.groups):
                raise ValueError(f"Explicit groups are a tuple of tuples of ranks; got {self.groups!r}.")
            Level(self.groups)  # refuses empty and overlapping groups

    @property
    def anchored(self) -> bool:
        """Whether the level keeps an anchor, and sends differences from it."""
        return self.keep_anchor or not self.outer.plain or not self.codec.exact


@dataclass(frozen=True)
class Strategy:
    """Everything that ranks must agree on before they train together.

    Args:
        levels: From the innermost, which meets most often, to the outermost.
        fragments: What travels together; several fragments take turns.
        warmup_steps: For how many steps gradients are averaged instead.
        delay: How many steps training goes on between the launch of a round and its landing.
        alpha: How much of the local value is kept when the outer update's result lands (0: none).
        buffers: Whether floating-point buffers are averaged, and counters taken from the maximum.
        optimizer_state: Whether the inner optimizer's state is left, averaged or reset when a round lands.
        weight: How much a worker counts: all alike, by the samples given to `step`, what a function says, or a piece of
            `cadenza.weighting`.
        balanced: Give faster workers more local steps in a period, and weigh their differences accordingly.
        offload: Keep anchors and outer state in CPU memory, and do the rounds there.
        measure_drift: Measure how far the workers had moved apart, at the price of one more pass over the values.
        faults: What happens if a worker is gone, late or wrong: `raise_error()`, `skip_round()` or `shrink()`.

    >>> import cadenza
    >>> Strategy(levels=(LevelPlan(500, outer=cadenza.nesterov()),), delay=5).delay
    5
    """

    levels: tuple[LevelPlan, ...]
    fragments: Fragmentation = field(default_factory=Whole)
    warmup_steps: int = 0
    delay: int = 0
    alpha: float = 0.0
    buffers: bool = False
    optimizer_state: Literal["leave", "average", "reset"] = "leave"
    weight: Literal["uniform", "samples"] | Callable[[], float] | Weighting = "uniform"
    balanced: bool = False
    offload: bool = field(default=False, metadata={"local": "where a worker keeps its anchors changes no value"})
    measure_drift: bool = True
    faults: FaultPolicy = field(default_factory=raise_error)

    def __post_init__(self) -> None:
        if isinstance(self.levels, LevelPlan) or not all(isinstance(level, LevelPlan) for level in self.levels):
            raise TypeError(f"levels is a tuple of LevelPlan: Strategy(levels=(LevelPlan(16),)); got {self.levels!r}.")
        levels = tuple(self.levels)
        if not levels:
            raise ValueError("A strategy needs at least one level: Strategy(levels=(LevelPlan(16),)).")
        if not hasattr(self.faults, "tolerant"):
            raise TypeError(f"faults is raise_error(), skip_round(…) or shrink(…); got {self.faults!r}.")
        # Unequal numbers of steps can only be made up for in differences; who comes back needs an anchor to come to.
        if self.balanced or self.faults.tolerant:
            levels = tuple(replace(level, keep_anchor=True) for level in levels)
        object.__setattr__(self, "levels", levels)
        if isinstance(self.fragments, type | str) or not hasattr(self.fragments, "split"):
            raise TypeError(f"fragments is whole(), by_layers(…) or by_bytes(…); got {self.fragments!r}.")
        for name in ("warmup_steps", "delay"):
            check_not_negative(name, getattr(self, name))
        self._check_choices()
        self._check_levels()
        self._check_delay()
        self._check_faults()

    @property
    def period(self) -> int:
        """The steps between two rounds of the innermost level, at least."""
        return self.levels[0].schedule.shortest_gap

    @property
    def weighting(self) -> Weighting:
        """How the members of a round are weighed, as a piece; the fault policy may wrap it."""
        if isinstance(self.weight, str):
            return samples() if self.weight == "samples" else uniform()
        if callable(self.weight):
            return by_function(self.weight)
        return self.weight

    @property
    def identity(self) -> list[str]:
        """The lines that ranks compare before they train together; see `cadenza.common.identity`."""
        return identity(self)

    @property
    def measures_drift(self) -> bool:
        """Whether rounds measure drift, because it was asked for or because a schedule depends on it."""
        return self.measure_drift or any(level.schedule.uses_drift for level in self.levels)

    def _check_choices(self) -> None:
        if isinstance(self.alpha, bool) or not isinstance(self.alpha, int | float):
            raise TypeError(f"alpha is a number; got {self.alpha!r}.")
        if not 0 <= self.alpha < 1:
            raise ValueError(f"alpha is the share of the local value that is kept, below 1; got {self.alpha}.")
        if self.optimizer_state not in ("leave", "average", "reset"):
            raise ValueError(f'optimizer_state is "leave", "average" or "reset"; got {self.optimizer_state!r}.')
        if not (callable(self.weight) or hasattr(self.weight, "weigh") or self.weight in ("uniform", "samples")):
            raise ValueError(
                f'weight is "uniform", "samples", a function without arguments or a piece of cadenza.weighting; got '
                f"{self.weight!r}."
            )
        if self.alpha and all(level.outer.plain for level in self.levels):
            raise ValueError(
                "alpha mixes the local value with an outer update's result, and no level has one: a plain mean keeps "
                "the local progress by itself. Leave alpha at 0, or choose an outer update such as nesterov()."
            )

    def _check_levels(self) -> None:
        for inner, outer in zip(self.levels, self.levels[1:], strict=False):
            if inner.schedule.shortest_gap > outer.schedule.shortest_gap:
                raise ValueError(
                    f"Levels go from the innermost, which meets most often, to the outermost; but {inner.schedule!r} "
                    f"comes before {outer.schedule!r}. Swap them, or change their periods."
                )
        if any(level.schedule.uses_drift for level in self.levels[:-1]):
            raise ValueError(
                "Only the outermost level can follow the drift: that of an inner level is another number in every "
                "group, and their periods would differ."
            )
        simple = len(self.levels) == 1 and not self.delay and isinstance(self.fragments, Whole)
        if self.balanced and not (simple and isinstance(self.levels[0].schedule, Every)):
            raise ValueError(
                "balanced works with one level that meets every(n) steps, whole and without delay: other workers' "
                "steps are not this one's, so nothing else can be counted alike."
            )

    def _check_delay(self) -> None:
        if not self.delay:
            return
        gap = smallest_gap([level.schedule for level in self.levels])
        if self.delay >= gap:
            raise ValueError(
                f"A round must land before the next one of its fragment is launched: delay {self.delay} is not shorter "
                f"than the {gap} steps between them. Choose a delay below {gap}, or longer periods."
            )
        if self.buffers or self.optimizer_state == "average":
            raise ValueError(
                "Buffers and optimizer state cannot land late: an average of variances from another step can turn "
                'negative. Use delay=0, or buffers=False and optimizer_state="leave".'
            )

    def _check_faults(self) -> None:
        """Refuse what cannot be done by a group whose members come and go."""
        if not self.faults.tolerant:
            return
        reasons = {
            "several levels": (
                len(self.levels) > 1 or self.levels[0].groups != "all",
                "their groups would have to be cut anew whenever a worker comes or goes",
            ),
            "a warm-up": (
                self.warmup_steps > 0,
                "gradients are averaged in every step there, and one missing worker would stop all others",
            ),
            "balanced": (self.balanced, "the workers' clocks differ, so nobody could tell who is late"),
            "averaged buffers or optimizer state": (
                self.buffers or self.optimizer_state == "average",
                "they are averaged in place, and a failed round must change nothing",
            ),
        }
        for what, (asked, why) in reasons.items():
            if asked:
                raise ValueError(
                    f"{self.faults.name} cannot be combined with {what}: {why}. Leave it out, or "
                    "use faults=raise_error()."
                )

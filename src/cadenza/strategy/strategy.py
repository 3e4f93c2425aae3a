"""What ranks must agree on before they train together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from cadenza.common.checks import check_not_negative
from cadenza.common.identity import identity
from cadenza.common.protocols import check_piece
from cadenza.faults import FaultPolicy, raise_error
from cadenza.fragments import Fragmentation, Whole
from cadenza.schedules import Auto, Schedule, StateSchedule, gap_after, staggered_levels
from cadenza.strategy.level_plan import LevelPlan
from cadenza.strategy.options import Buffers, OptimizerState, Weight
from cadenza.weighting import Weighting, by_function, needs_anchor, outliers, samples, uniform

__all__ = ["Strategy", "check_is_strategy"]


@dataclass(frozen=True)
class Strategy:
    """Everything that ranks must agree on before they train together.

    Args:
        levels: From the innermost, which meets most often, to the outermost.
        fragments: What travels together; several fragments take turns.
        warmup_steps: For how many steps gradients are averaged instead.
        delay: How many steps training goes on between the launch of a round and its landing, at levels that do not say.
        alpha: How much of the local value is kept when the outer update's result lands (0: none).
        keep_progress: What was learned between launch and landing is added to an outer update's result, as it always is
            to a plain mean; otherwise, without an alpha, it is lost.
        buffers: Which buffers are averaged, with counters taken from the maximum: by default the running statistics
            of BatchNorm and its like; all that are floating-point (True), where rounds do not land late; or none
            (False).
        optimizer_state: Whether the inner optimizer's state is left, averaged or reset when a round lands; or
            `cadenza.schedules.moments(…)`, which averages its entries at steps of their own.
        weight: How much a worker counts: all alike, by the samples given to `step`, what a function says, or a piece of
            `cadenza.weighting`.
        balanced: Give faster workers more local steps in a period, and weigh their differences accordingly.
        offload: Keep anchors and outer state in CPU memory, and do the rounds there.
        measure_drift: Measure how far the workers had moved apart, at the price of one more pass over the values.
        faults: What happens if a worker is gone, late or wrong: `raise_error()`, `skip_round()` or `shrink()`.
        average_gradients: Gradients are averaged in every step, by DDP or by `sync.average_gradients()`, not only in
            the warm-up: all workers stay one replica, and rounds only take the outer step.

    >>> import cadenza
    >>> Strategy(levels=(LevelPlan(500, outer=cadenza.nesterov()),), delay=5).delay
    5
    """

    levels: tuple[LevelPlan, ...]
    fragments: Fragmentation = field(default_factory=Whole)
    warmup_steps: int = 0
    delay: int = 0
    alpha: float = 0.0
    keep_progress: bool = False
    buffers: Buffers = "statistics"
    optimizer_state: OptimizerState = "leave"
    weight: Weight = "uniform"
    balanced: bool = False
    offload: bool = field(default=False, metadata={"local": "where a worker keeps its anchors changes no value"})
    measure_drift: bool = True
    faults: FaultPolicy = field(default_factory=raise_error)
    average_gradients: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.levels, LevelPlan) or not all(isinstance(level, LevelPlan) for level in self.levels):
            raise TypeError(f"levels is a tuple of LevelPlan: Strategy(levels=(LevelPlan(16),)); got {self.levels!r}.")
        levels = tuple(self.levels)
        if not levels:
            raise ValueError("A strategy needs at least one level: Strategy(levels=(LevelPlan(16),)).")
        check_piece(self.faults, FaultPolicy, what="faults", such_as="cadenza.shrink()")
        check_piece(self.fragments, Fragmentation, what="fragments", such_as="cadenza.by_layers(3)")
        # Unequal numbers of steps can only be made up for in differences; who comes back needs an anchor to come to.
        if self.balanced or self.faults.tolerant or needs_anchor(self.weight):
            levels = tuple(replace(level, keep_anchor=True) for level in levels)
        object.__setattr__(self, "levels", levels)
        for name in ("warmup_steps", "delay"):
            check_not_negative(name, getattr(self, name))
        self._make_room_for_delays()
        self._check_choices()
        self._check_levels()
        self._check_regrouping()
        self._check_delays(self._schedules)
        self._check_late_landing()
        self._check_faults()

    @property
    def period(self) -> int:
        """The steps between two rounds of the innermost level, at least."""
        return self.levels[0].schedule.shortest_gap

    @property
    def weighting(self) -> Weighting:
        """How the members of a round are weighed, as a piece; where training goes on after a fault, without poison.

        >>> import cadenza
        >>> cadenza.diloco(weight="samples", faults=cadenza.shrink()).weighting
        Outliers(of=Samples(), explosion=10.0, leave_out=True)
        """
        poison = self.faults.poison
        if poison is None:
            return self._weighting
        return outliers(self._weighting, explosion=poison.explosion, leave_out=poison.leave_out)

    @property
    def _weighting(self) -> Weighting:
        if isinstance(self.weight, str):
            return samples() if self.weight == "samples" else uniform()
        return self.weight if isinstance(self.weight, Weighting) else by_function(self.weight)

    @property
    def identity(self) -> list[str]:
        """The lines that ranks compare before they train together; see `cadenza.common.identity`."""
        return identity(self)

    @property
    def measures_drift(self) -> bool:
        """Whether rounds measure drift, because it was asked for or because a schedule depends on it."""
        return self.measure_drift or any(level.schedule.uses_drift for level in self.levels)

    def delay_of(self, level: int) -> int:
        """Return how many steps a level's rounds take from launch to landing.

        >>> Strategy(levels=(LevelPlan(4), LevelPlan(16, delay=4))).delay_of(1)
        4
        """
        own = self.levels[level].delay
        return self.delay if own is None else own

    def restarts(self, level: int) -> bool:
        """Say whether parameters go back to the anchor at a launch, and the outer step is taken at the landing.

        It is so where a round lands when the next one is launched: no progress may be lost between the two.

        >>> import cadenza
        >>> cadenza.diloco(period=8, delay=8).restarts(0), cadenza.diloco(period=8, delay=7).restarts(0)
        (True, False)
        """
        delay = self.delay_of(level)
        return delay > 0 and not self.levels[level].outer.plain and delay == gap_after(self._schedules, level)

    def schedules_of(self, fragment: int, count: int) -> tuple[Schedule, ...]:
        """Return the schedules of one fragment of `count`, from the innermost level; refuse what cannot take turns.

        >>> Strategy(levels=(LevelPlan(8),)).schedules_of(0, 2)
        (Every(period=8, offset=4),)
        """
        if count == 1:
            return self._schedules
        schedules = staggered_levels(self._schedules, fragment, count)
        self._check_delays(schedules)
        return schedules

    @property
    def _schedules(self) -> tuple[Schedule, ...]:
        return tuple(level.schedule for level in self.levels)

    @property
    def _late(self) -> bool:
        return any(self.delay_of(level) for level in range(len(self.levels)))

    def _make_room_for_delays(self) -> None:
        """Let periods that are chosen on the way be longer than the delays, which are given."""
        levels = tuple(
            replace(plan, schedule=plan.schedule.at_least(self.delay_of(level) + 1))
            if isinstance(plan.schedule, Auto)
            else plan
            for level, plan in enumerate(self.levels)
        )
        object.__setattr__(self, "levels", levels)

    def _check_choices(self) -> None:
        for name in ("keep_progress", "balanced", "offload", "measure_drift", "average_gradients"):
            if not isinstance(value := getattr(self, name), bool):
                raise TypeError(f"{name} is True or False; got {value!r}.")
        if isinstance(self.alpha, bool) or not isinstance(self.alpha, int | float):
            raise TypeError(f"alpha is a number; got {self.alpha!r}.")
        if not 0 <= self.alpha < 1:
            raise ValueError(f"alpha is the share of the local value that is kept, below 1; got {self.alpha}.")
        if not isinstance(self.optimizer_state, str) and callable(getattr(self.optimizer_state, "due", None)):
            check_piece(self.optimizer_state, StateSchedule, what="optimizer_state", such_as="moments(exp_avg=64)")
        elif self.optimizer_state not in ("leave", "average", "reset"):
            raise ValueError(
                'optimizer_state is "leave", "average", "reset" or cadenza.schedules.moments(…); '
                f"got {self.optimizer_state!r}."
            )
        if self.buffers not in (True, False, "statistics"):
            raise ValueError(
                'buffers is "statistics" (the running statistics of BatchNorm and its like), True (all of '
                f"floating-point) or False (none); got {self.buffers!r}."
            )
        if hasattr(self.weight, "weigh"):
            check_piece(self.weight, Weighting, what="weight", such_as="cadenza.weighting.samples()")
        elif not callable(self.weight) and self.weight not in ("uniform", "samples"):
            raise ValueError(
                'weight is "uniform", "samples", a function without arguments or a piece of cadenza.weighting; got '
                f"{self.weight!r}."
            )
        if self.alpha and self.keep_progress:
            raise ValueError(
                "alpha keeps a share of the local value when a result lands late, keep_progress what was learned since "
                f"the launch: choose one of them; got alpha={self.alpha} and keep_progress=True."
            )
        if self.alpha and any(self.restarts(level) for level in range(len(self.levels))):
            raise ValueError(
                "alpha mixes the local value with a result that lands late, but a delay as long as the period keeps "
                "all local progress by itself. Leave alpha at 0, or choose a shorter delay."
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
        following = [level for level in self.levels if level.follows]
        if any(level is not self.levels[-1] or level.outer.diverges for level in following):
            raise ValueError(
                "Only the outermost level can follow the drift or measured times, and only with one anchor for all: "
                "otherwise they are other numbers in every group or worker, and their periods would differ. Use "
                "every(16), for instance."
            )
        simple = len(self.levels) == 1 and not self._late and self.fragments.single and not self.average_gradients
        simple = simple and isinstance(self.optimizer_state, str)
        cycle = self.levels[0].schedule.cycle
        if self.balanced and not (simple and cycle is not None and cycle[1] == 0):
            raise ValueError(
                "balanced works with one level that meets every(n) steps, whole, without delay, average_gradients and "
                "moments: other workers' steps are not this one's, so nothing else can be counted alike."
            )

    def _check_regrouping(self) -> None:
        """Refuse groups that change from round to round where something relies on their staying."""
        for plan in self.levels:
            if plan.regroups and (reason := self._why_not_regroup(plan)):
                raise ValueError(f"The groups of {plan.groups!r} change from round to round: {reason}")

    def _why_not_regroup(self, plan: LevelPlan) -> str | None:
        if len(self.levels) > 1:
            return "they need not nest in those of other levels. Use one level, or groups that stay."
        if plan.follows:
            return "each group has a drift of its own, and times, so periods would differ. Use every(16)."
        if self.balanced:
            return "balanced needs to know the speeds of one group. Use groups that stay, or balanced=False."
        if plan.anchored and not plan.outer.diverges:
            return (
                "workers come to have different anchors, which only an outer update that says so (diverges) can use. "
                "Use the plain mean with an exact codec, or another outer update."
            )
        return None

    def _check_delays(self, schedules: Sequence[Schedule]) -> None:
        for level in range(len(self.levels)):
            delay, gap = self.delay_of(level), gap_after(schedules, level)
            if delay > gap:
                raise ValueError(
                    f"A round must land before the next one of its fragment is launched: delay {delay} is longer than "
                    f"the {gap} steps between them. Choose a delay of at most {gap}, or longer periods."
                )

    def _check_late_landing(self) -> None:
        if self._late and (self.buffers is True or self.optimizer_state not in ("leave", "reset")):
            raise ValueError(
                "Buffers and optimizer state cannot land late: an average of variances from another step can turn "
                'negative. Use delay=0, or optimizer_state="leave" and buffers="statistics", which are averaged as '
                "they are when a round lands."
            )

    def _check_faults(self) -> None:
        """Refuse what cannot be done by a group whose members come and go."""
        if not self.faults.tolerant:
            return
        reasons = {
            "groups of fixed ranks": (
                self.levels[-1].groups != "all" or any(p.groups not in ("host", "site") for p in self.levels[:-1]),
                'workers that come and go are not numbered in a row, so levels are for one "site" or "host" each '
                '(cadenza.join(site=…)), and the outermost for "all"',
            ),
            "anchors that differ": (any(p.outer.diverges for p in self.levels), "who comes takes one that all share"),
            "average_gradients": (
                self.average_gradients,
                "who comes takes the anchor, and between two rounds the one replica has moved on from it; a warm-up, "
                "in which the anchor goes along, does average gradients",
            ),
            "balanced": (
                self.balanced,
                "a round is known by its step, and each worker would come to it at another one, so nobody could tell "
                'who is late; weight="samples" lets those count more who do more',
            ),
            "moments at periods of their own": (
                not isinstance(self.optimizer_state, str),
                'they would need rounds of their own; optimizer_state="average" averages all of them in every round',
            ),
        }
        for what, (asked, why) in reasons.items():
            if asked:
                raise ValueError(
                    f"{self.faults.name} cannot be combined with {what}: {why}. Leave it out, or "
                    "use faults=raise_error()."
                )


def check_is_strategy(given: object) -> None:
    """Raise if what was given is no strategy.

    >>> check_is_strategy("diloco")
    Traceback (most recent call last):
      ...
    TypeError: A cadenza.Strategy is required, for instance cadenza.diloco(); got str.
    """
    if not isinstance(given, Strategy):
        raise TypeError(f"A cadenza.Strategy is required, for instance cadenza.diloco(); got {type(given).__name__}.")

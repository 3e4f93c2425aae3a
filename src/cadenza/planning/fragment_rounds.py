"""When a fragment's rounds are due, by the strategy's own schedules, and what they cost at each level."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cadenza.planning.inputs import Cluster, Model, Work
from cadenza.planning.rounds import Costs, costs_of, fragment_sizes
from cadenza.schedules import largest_due

if TYPE_CHECKING:
    from cadenza.schedules import Schedule, State
    from cadenza.strategy import Strategy

__all__ = ["FAR", "FragmentRounds", "rounds_of"]

FAR = 10**9  # steps; a period that is longer never ends


@dataclass
class FragmentRounds:
    """One fragment's schedules, their states, and what its rounds cost at each level.

    >>> from cadenza.schedules import every
    >>> rounds = FragmentRounds((every(4), every(8)), [])
    >>> rounds.next, rounds.due(4), rounds.due(8)
    (4, 0, 1)
    """

    schedules: tuple[Schedule, ...]
    costs: list[Costs]
    states: list[State] = field(init=False)

    def __post_init__(self) -> None:
        self.states = [schedule.start() for schedule in self.schedules]

    @property
    def next(self) -> int:
        """The step of the next round."""
        return int(min(state["next"] for state in self.states))

    def due(self, n: int) -> int | None:
        """Return the level whose round runs after step `n`, if one does."""
        return largest_due(self._due(n))

    def count(self, n: int) -> None:
        """Note the rounds that were due after step `n`."""
        for i, was_due in enumerate(self._due(n)):
            if was_due:
                self.states[i] = self.schedules[i].after_round(n, self.states[i], None)

    def _due(self, n: int) -> list[bool]:
        return [schedule.is_due(n, state) for schedule, state in zip(self.schedules, self.states, strict=True)]


def rounds_of(strategy: Strategy, cluster: Cluster, model: Model, work: Work) -> list[FragmentRounds]:
    """Return those of every fragment."""
    sizes, levels = fragment_sizes(strategy, model), range(len(strategy.levels))
    return [
        FragmentRounds(
            strategy.schedules_of(i, len(sizes)),
            [costs_of(strategy, level, size, cluster, model, work) for level in levels],
        )
        for i, size in enumerate(sizes)
    ]

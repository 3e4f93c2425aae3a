"""What every schedule promises; there is no torch in this room, so that a planner can use schedules without it."""

from __future__ import annotations

from typing import Protocol, TypeAlias

__all__ = ["NextRound", "Schedule", "State", "first_turn", "refuse_staggering_twice"]

State: TypeAlias = dict[str, int | float]


class Schedule(Protocol):
    """What a schedule gives: whether a round is due, and the state after one.

    Call `after_round` for every round that was due, also for one that was skipped or that a larger level took over.

    >>> from cadenza.schedules import every
    >>> def due_steps(schedule: Schedule, steps: int) -> list[int]:
    ...     state, due = schedule.start(), []
    ...     for n in range(1, steps + 1):
    ...         if schedule.is_due(n, state):
    ...             due.append(n)
    ...             state = schedule.after_round(n, state, drift=None)
    ...     return due
    >>> due_steps(every(5).staggered(0, 2), 15)
    [2, 7, 12]
    """

    def start(self) -> State:
        """Return the state before the first step; its "next" is the step of the next round."""

    def is_due(self, n: int, state: State) -> bool:
        """Say whether a round runs after local step `n`."""

    def after_round(self, n: int, state: State, drift: float | None) -> State:
        """Return the state after a round at step `n`; `drift` is None where it was not measured."""

    @property
    def shortest_gap(self) -> int:
        """Return a lower bound of the steps between two rounds; a delay is at most as long."""

    @property
    def cycle(self) -> tuple[int, int] | None:
        """Return (period, offset) if a round runs exactly when n % period == offset and n ≥ 1; None otherwise."""

    @property
    def uses_drift(self) -> bool:
        """Say whether `after_round` wants to know the drift."""

    def staggered(self, index: int, count: int) -> Schedule:
        """Return the schedule of fragment `index` of `count`, so that the fragments take turns."""


class NextRound:
    """Half of a schedule whose gaps change: a round runs once the step is there that its state names.

    What is made of it has a field `minimum`, the fewest steps between two rounds.
    """

    minimum: int

    def is_due(self, n: int, state: State) -> bool:
        return n >= state["next"]

    @property
    def shortest_gap(self) -> int:
        return self.minimum

    @property
    def cycle(self) -> None:
        return None


def first_turn(index: int, count: int, period: int) -> int:
    """Return the step, from 1 to `period`, at which fragment `index` of `count` has its first turn.

    >>> [first_turn(index, 3, 100) for index in range(3)]
    [33, 66, 100]
    """
    if not 0 <= index < count:
        raise ValueError(f"There is no fragment {index} of {count}; the index goes from 0 to {count - 1}.")
    if count > period:
        raise ValueError(
            f"{count} fragments cannot take turns within a period of {period} steps; "
            f"use at most {period} fragments or a period of at least {count}."
        )
    return (index + 1) * period // count


def refuse_staggering_twice(staggered: bool) -> None:
    """Refuse to stagger a schedule that is a fragment's already.

    >>> refuse_staggering_twice(False)
    """
    if staggered:
        raise ValueError("This schedule is a fragment's already; stagger the one that it was made from.")

"""The contract of schedules."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from itertools import pairwise

from cadenza.schedules import Schedule, State
from cadenza.testing.contracts.promises import Contract

__all__ = ["check_schedule"]


def check_schedule(schedule: Schedule, *, steps: int = 400, longest_gap: int | None = None) -> None:
    """Raise AssertionError if a schedule breaks a promise of `cadenza.schedules.Schedule` within some steps.

    Args:
        schedule: The schedule of a whole model, not of a fragment.
        steps: How far to look; more than a few periods.
        longest_gap: The most steps that may pass between two rounds; None: anything up to `steps`.

    >>> from cadenza.schedules import adaptive
    >>> check_schedule(adaptive(16, target_drift=0.01, minimum=4, maximum=64), longest_gap=64)
    """
    contract = Contract(schedule, Schedule)
    contract.is_whole()
    _check_run(contract, schedule, steps, longest_gap)
    _check_cycle(contract, schedule, steps)
    _check_turns(contract, schedule)
    for count in _counts(schedule):
        for index in range(count):
            turn = schedule.staggered(index, count)
            _check_run(Contract(turn, Schedule), turn, steps, longest_gap)
            _check_cycle(Contract(turn, Schedule), turn, steps)


def _check_run(contract: Contract, schedule: Schedule, steps: int, longest_gap: int | None) -> None:
    _check_purity(contract, schedule)
    _check_drift(contract, schedule)
    _check_next(contract, schedule, steps)
    _check_gaps(contract, schedule, steps, steps if longest_gap is None else longest_gap)
    _check_resuming(contract, schedule, steps)
    _check_missing(contract, schedule, steps, steps if longest_gap is None else longest_gap)


def _check_purity(contract: Contract, schedule: Schedule) -> None:
    state = schedule.start()
    before = deepcopy(state)
    for n in (1, 2, 7, 100):
        contract.holds(
            schedule.is_due(n, state) == schedule.is_due(n, state), "is_due gives one answer to one question"
        )
        twice = [schedule.after_round(n, state, 0.02) for _ in range(2)]
        contract.holds(twice[0] == twice[1], "after_round gives one answer to one question")
    contract.holds(state == before, "is_due and after_round leave the state that they are given alone")
    contract.holds(schedule.start() == before, "start gives the same state every time")


def _check_drift(contract: Contract, schedule: Schedule) -> None:
    if schedule.uses_drift:
        return
    state = schedule.start()
    unmeasured = schedule.after_round(20, state, None)
    for drift in (0.0, 1e-9, 1e9, float("inf"), float("nan")):
        same = schedule.after_round(20, state, drift) == unmeasured
        contract.holds(same, f"without uses_drift the drift changes nothing; {drift} did")


def _check_next(contract: Contract, schedule: Schedule, steps: int) -> None:
    for n, state, due in _run(schedule, steps):
        contract.holds(
            due == (n == state["next"]), f'the state\'s "next" is the step of the next round; not at step {n}'
        )


def _check_gaps(contract: Contract, schedule: Schedule, steps: int, longest: int) -> None:
    rounds = _due_steps(schedule, schedule.start(), 1, steps)
    contract.holds(schedule.shortest_gap >= 1, f"shortest_gap is at least 1; it is {schedule.shortest_gap}")
    contract.holds(bool(rounds) and rounds[0] <= longest, f"the first round comes within {longest} steps")
    for earlier, later in pairwise([*rounds, steps + 1]):
        contract.holds(later - earlier <= longest, f"no gap exceeds {longest} steps; after step {earlier} one does")
    for earlier, later in pairwise(rounds):
        text = f"no gap is below shortest_gap ({schedule.shortest_gap}); from step {earlier} to {later} one is"
        contract.holds(later - earlier >= schedule.shortest_gap, text)


def _check_resuming(contract: Contract, schedule: Schedule, steps: int) -> None:
    never_stopped = _due_steps(schedule, schedule.start(), 1, steps)
    for n, state, due in _run(schedule, steps):
        if n % 13 == 0:
            after = schedule.after_round(n, state, _drift_at(n)) if due else state
            saved = contract.through_json(after)
            resumed = _due_steps(deepcopy(schedule), saved, n + 1, steps)
            same = resumed == [step for step in never_stopped if step > n]
            contract.holds(same, f"a run resumed from its state in JSON meets at the same steps; not from step {n}")


def _check_missing(contract: Contract, schedule: Schedule, steps: int, longest: int) -> None:
    missed = int(schedule.start()["next"]) + 1
    last = max(steps, missed + longest)
    rounds = [missed, *_due_steps(schedule, schedule.start(), missed, last), last + 1]
    steady = all(later - earlier <= longest for earlier, later in pairwise(rounds))
    contract.holds(steady, "a round that was missed is caught up or left out, but does not stop the later ones")


def _check_cycle(contract: Contract, schedule: Schedule, steps: int) -> None:
    if schedule.cycle is None:
        return
    period, offset = schedule.cycle
    contract.holds(0 <= offset < period, f"the offset of a cycle is from 0 to below its period; got {schedule.cycle}")
    for n, _, due in _run(schedule, steps):
        expected = n % period == offset
        contract.holds(
            due == expected, f"with the cycle {schedule.cycle} a round runs at n % {period} == {offset}: {n}"
        )


def _check_turns(contract: Contract, schedule: Schedule) -> None:
    period = int(schedule.start()["next"])
    for count in _counts(schedule):
        firsts = [int(schedule.staggered(index, count).start()["next"]) for index in range(count)]
        apart = len(set(firsts)) == count and all(1 <= first <= period for first in firsts)
        contract.holds(apart, f"{count} fragments take turns within the first period; they begin at steps {firsts}")
    for index, count in ((0, period + 1), (-1, 1), (1, 1)):
        fits = _refuses(schedule, index, count) or schedule.staggered(index, count).shortest_gap >= count > index >= 0
        contract.holds(
            fits, f"staggered({index}, {count}) is refused with a ValueError or makes room: the period is {period}"
        )


def _counts(schedule: Schedule) -> list[int]:
    period = int(schedule.start()["next"])
    return sorted({min(count, period) for count in (1, 2, 3, 7)})


def _refuses(schedule: Schedule, index: int, count: int) -> bool:
    try:
        schedule.staggered(index, count)
    except ValueError:
        return True
    return False


def _run(schedule: Schedule, steps: int) -> Iterator[tuple[int, State, bool]]:
    """Give each step, the state before it, and whether a round is due."""
    state = schedule.start()
    for n in range(1, steps + 1):
        due = schedule.is_due(n, state)
        yield n, state, due
        state = schedule.after_round(n, state, _drift_at(n)) if due else state


def _due_steps(schedule: Schedule, state: State, first: int, last: int) -> list[int]:
    due = []
    for n in range(first, last + 1):
        if schedule.is_due(n, state):
            due.append(n)
            state = schedule.after_round(n, state, _drift_at(n))
    return due


def _drift_at(n: int) -> float | None:
    """Return a drift that wanders over three orders of magnitude; sometimes none was measured."""
    return None if n % 5 == 0 else 0.001 * 1000.0 ** ((n * 37 % 101) / 100)

"""What every schedule promises. A new one is added to SCHEDULES below, and is held to all of it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from itertools import pairwise

import pytest

from cadenza.common.identity import identity
from cadenza.schedules import (
    Schedule,
    State,
    TimedSchedule,
    adaptive,
    auto,
    changing,
    every,
    smallest_gap,
    staggered_levels,
)
from cadenza.testing import check_schedule

STEPS = 400


@dataclass(frozen=True)
class Case:
    """A schedule, and the most steps that may pass between two of its rounds."""

    schedule: Schedule
    longest_gap: int


def growing(n: int) -> int:
    return 12 + n // 50


# The period of a changing schedule stays for two rounds at least, so that turns within it can be told from a change.
SCHEDULES = {
    "every step": Case(every(1), 1),
    "every 7": Case(every(7), 7),
    "every 100": Case(every(100), 100),
    "auto": Case(auto(), 4),
    "milestones, longer": Case(changing({1: 8, 100: 30, 200: 50}), 50),
    "milestones, shorter": Case(changing({0: 40, 150: 10}), 40),
    "a function": Case(changing(growing, minimum=12), growing(STEPS)),
    "adaptive": Case(adaptive(16, target_drift=0.01, minimum=4, maximum=60), 60),
    "adaptive, gentle": Case(adaptive(10, target_drift=0.5, minimum=5, maximum=11, factor=1.05), 11),
}


def staggered_cases() -> Iterator[tuple[str, Case]]:
    for name, case in SCHEDULES.items():
        yield name, case
        if case.schedule.start()["next"] >= 3:
            yield f"{name}, fragment 1 of 3", Case(case.schedule.staggered(0, 3), case.longest_gap)


ALL = [pytest.param(case, id=name) for name, case in staggered_cases()]
WHOLE = [pytest.param(case.schedule, id=name) for name, case in SCHEDULES.items()]


def drift_at(n: int) -> float | None:
    """Return a drift that wanders over three orders of magnitude; sometimes none was measured."""
    dice = random.Random(n)
    return None if dice.random() < 0.2 else 0.001 * 1000 ** dice.random()


def due_steps(schedule: Schedule, state: State, first: int = 1, last: int = STEPS) -> list[int]:
    due = []
    for n in range(first, last + 1):
        if schedule.is_due(n, state):
            due.append(n)
            state = schedule.after_round(n, state, drift_at(n))
    return due


@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in SCHEDULES.items()])
def test_keeps_its_contract(case: Case) -> None:
    check_schedule(case.schedule, steps=STEPS, longest_gap=case.longest_gap)


@pytest.mark.parametrize("case", ALL)
def test_the_same_question_has_the_same_answer_and_changes_nothing(case: Case) -> None:
    schedule, state = case.schedule, case.schedule.start()
    before = deepcopy(state)
    for n in (1, 2, 7, 100):
        assert schedule.is_due(n, state) == schedule.is_due(n, state)
        assert schedule.after_round(n, state, 0.02) == schedule.after_round(n, state, 0.02)
    assert state == before
    assert schedule.start() == before
    assert hash(schedule) == hash(deepcopy(schedule))
    assert deepcopy(schedule) == schedule


@pytest.mark.parametrize("case", ALL)
def test_a_schedule_that_does_not_use_drift_ignores_it(case: Case) -> None:
    schedule, state = case.schedule, case.schedule.start()
    unmeasured = schedule.after_round(20, state, None)
    outcomes = [schedule.after_round(20, state, drift) for drift in (0.0, 1e-9, 1e9, float("inf"), float("nan"))]
    assert any(outcome != unmeasured for outcome in outcomes) == schedule.uses_drift


@pytest.mark.parametrize("count", [1, 2, 3, 7])
@pytest.mark.parametrize("schedule", WHOLE)
def test_fragments_take_turns_once_a_period_and_spread_evenly(schedule: Schedule, count: int) -> None:
    period = int(schedule.start()["next"])
    count = min(count, period)
    turns = [schedule.staggered(index, count) for index in range(count)]
    firsts = [int(turn.start()["next"]) for turn in turns]
    distances = [later - earlier for earlier, later in pairwise([0, *firsts])]
    assert firsts[-1] == period
    assert set(distances) <= {period // count, -(-period // count)}
    for turn, first in zip(turns, firsts, strict=True):
        assert turn.after_round(first, turn.start(), None)["next"] == first + period


@pytest.mark.parametrize("schedule", WHOLE)
def test_turns_that_cannot_be_are_refused(schedule: Schedule) -> None:
    period = int(schedule.start()["next"])
    if isinstance(schedule, TimedSchedule):  # its periods are its own to choose, so it makes room
        assert schedule.staggered(0, period + 1).shortest_gap == period + 1
    else:
        words = rf"{period + 1} fragments .* period of {period} steps; use at most {period}"
        with pytest.raises(ValueError, match=words):
            schedule.staggered(0, period + 1)
    for index in (-1, 1):
        with pytest.raises(ValueError, match=f"no fragment {index} of 1"):
            schedule.staggered(index, 1)


def test_identities_tell_schedules_apart_and_are_the_same_in_every_process() -> None:
    descriptions = ["; ".join(identity(case.schedule)) for _, case in staggered_cases()]
    assert len(set(descriptions)) == len(descriptions)
    assert descriptions == ["; ".join(identity(case.schedule)) for _, case in staggered_cases()]
    assert not any("0x" in description for description in descriptions)


@pytest.mark.parametrize("outer", [case.schedule for case in SCHEDULES.values()], ids=list(SCHEDULES))
@pytest.mark.parametrize("inner", [case.schedule for case in SCHEDULES.values()], ids=list(SCHEDULES))
def test_rounds_of_two_levels_are_no_nearer_than_the_smallest_gap(inner: Schedule, outer: Schedule) -> None:
    count = min(3, int(inner.start()["next"]), int(outer.start()["next"]))
    for index in range(count):
        levels = staggered_levels([inner, outer], index, count)
        steps = sorted({n for level in levels for n in due_steps(level, level.start())})
        assert min(later - earlier for earlier, later in pairwise(steps)) >= smallest_gap(levels)

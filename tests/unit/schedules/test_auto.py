"""Periods that follow measured times: what is decided, when, and that it is kept."""

from __future__ import annotations

import pytest

from cadenza.schedules import State, auto, enough_steps
from cadenza.schedules.auto import Auto


def told(schedule: Auto, *times: tuple[float, float], state: State | None = None) -> State:
    state = schedule.start() if state is None else state
    for step_s, stall_s in times:
        state = schedule.learn(state, step_s, stall_s)
    return state


@pytest.mark.parametrize(("step_s", "stall_s", "target"), [(0.2, 0.4, 0.95), (1.0, 0.01, 0.99), (0.03, 7.0, 0.8)])
def test_the_period_is_the_smallest_that_reaches_the_target(step_s: float, stall_s: float, target: float) -> None:
    period = enough_steps(step_s, stall_s, target)
    assert period * step_s / (period * step_s + stall_s) >= target - 1e-12
    assert period == 1 or (period - 1) * step_s / ((period - 1) * step_s + stall_s) < target


def test_the_first_measurement_is_left_out_and_the_second_decides() -> None:
    schedule = auto()
    assert told(schedule, (0.1, 9.0))["period"] == 4
    assert told(schedule, (0.1, 9.0), (0.1, 0.2))["period"] == 38


def test_noise_changes_nothing_and_one_slow_round_neither() -> None:
    schedule = auto()
    state = told(schedule, (0.1, 9.0), (0.1, 0.2))
    for stall_s in (0.25, 0.16, 0.28, 0.5, 0.2, 0.15, 0.05, 0.2):
        state = told(schedule, (0.1, stall_s), state=state)
        assert state["period"] == 38
    state = told(schedule, (0.1, 0.5), (0.1, 0.2), state=state)
    assert state["period"] == 38


def test_a_link_that_stays_slower_gets_a_longer_period_and_a_faster_one_a_shorter() -> None:
    schedule = auto()
    state = told(schedule, *[(0.1, 0.2)] * 2)
    slower = told(schedule, *[(0.1, 2.0)] * 2, state=state)
    assert slower["period"] == 380
    faster = told(schedule, *[(0.1, 0.2)] * 2, state=slower)
    assert faster["period"] == 38


def test_bounds_hold_and_delays_and_fragments_make_room() -> None:
    assert told(auto(maximum=50), *[(0.001, 9.0)] * 2)["period"] == 50
    assert told(auto(minimum=3), *[(9.0, 0.001)] * 2)["period"] == 3
    turn = auto().staggered(1, 8)
    assert (turn.initial, turn.minimum, turn.start()["next"]) == (8, 8, 2)
    assert told(turn, *[(0.1, 0.05)] * 2)["period"] == enough_steps(0.1, 8 * 0.05, 0.95)


def test_a_decision_is_explained_with_its_numbers() -> None:
    schedule = auto()
    before = told(schedule, (0.1, 9.0))
    after = told(schedule, (0.1, 0.2), state=before)
    words = schedule.explain(before, after)
    assert words.startswith("period 4 → 38: a step takes 100 ms and a round holds it up for 200 ms")
    assert schedule.explain(after, after) == ""


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"target": 1.0}, "below 1"),
        ({"initial": 2, "minimum": 3}, "minimum <= initial"),
        ({"change": 1.0}, "above 1"),
        ({"target": "much"}, "target"),
    ],
)
def test_nonsense_is_refused_by_name(options: dict[str, object], words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=words):
        auto(**options)  # type: ignore[arg-type]

"""Schedules: the steps at which rounds run, worked out by hand."""

from __future__ import annotations

import ast
import functools
import math
from pathlib import Path

import numpy as np
import pytest

import cadenza.schedules
from cadenza.common.identity import identity
from cadenza.schedules import (
    Every,
    Schedule,
    adaptive,
    changing,
    every,
    gap_after,
    largest_due,
    moments,
    smallest_gap,
    staggered_levels,
)


def due_steps(schedule: Schedule, last: int, drift: float | None = None) -> list[int]:
    state, due = schedule.start(), []
    for n in range(1, last + 1):
        if schedule.is_due(n, state):
            due.append(n)
            state = schedule.after_round(n, state, drift)
    return due


def test_every_is_due_at_multiples_of_its_period_and_not_at_zero() -> None:
    assert due_steps(every(5), 16) == [5, 10, 15]
    assert not every(5).is_due(0, every(5).start())


def test_every_keeps_its_beat_after_a_round_between_beats() -> None:
    assert every(5).after_round(7, {"next": 10}, None) == {"next": 10}
    assert every(5).after_round(10, {"next": 10}, None) == {"next": 15}


def test_staggered_fragments_follow_the_rule_of_streaming_diloco() -> None:
    # (p + 1) * 10 // 3 is 3, 6, 10.
    assert [due_steps(every(10).staggered(p, 3), 30) for p in range(3)] == [[3, 13, 23], [6, 16, 26], [10, 20, 30]]


def test_with_as_many_fragments_as_steps_each_step_has_one() -> None:
    assert [due_steps(every(4).staggered(p, 4), 8) for p in range(4)] == [[1, 5], [2, 6], [3, 7], [4, 8]]


def test_staggering_twice_is_refused() -> None:
    for schedule in (every(10), changing({1: 10}), adaptive(10, target_drift=0.1, minimum=5, maximum=20)):
        with pytest.raises(ValueError, match="a fragment's already"):
            schedule.staggered(0, 3).staggered(0, 3)


def test_a_milestone_is_in_force_from_the_first_round_at_or_after_it() -> None:
    # 4 and 8 by the first period; 8 has reached milestone 6, so 10 later, 18, and 28; then 30 has passed at 38.
    assert due_steps(changing({1: 4, 6: 10, 30: 20}), 60) == [4, 8, 18, 28, 38, 58]


def test_milestones_are_taken_in_the_order_of_their_steps() -> None:
    assert changing({30: 20, 1: 4}) == changing({1: 4, 30: 20})
    assert "strategy.period.points: ((1, 4), (30, 20))" in identity(changing({30: 20, 1: 4}))


def test_a_function_is_asked_from_step_1_on_and_by_the_step_of_the_round() -> None:
    asked = []

    def period(n: int) -> int:
        asked.append(n)
        return 2 * n

    assert due_steps(changing(period), 60) == [2, 6, 18, 54]
    assert sorted(set(asked)) == [1, 2, 6, 18, 54]


def test_a_function_that_breaks_its_word_is_told_so() -> None:
    schedule = changing(lambda n: 8 if n < 10 else 2, minimum=4)
    assert schedule.shortest_gap == 4
    with pytest.raises(ValueError, match=r"at step 16 is 2, but at least 4 was promised; .* lower minimum="):
        schedule.after_round(16, schedule.start(), None)


@pytest.mark.parametrize("given", [2.5, "7", None, True])
def test_a_function_must_give_whole_steps(given: object) -> None:
    with pytest.raises(TypeError, match=r"The period at step 1 must be a whole number of steps \(int\); got"):
        changing(lambda n: given)  # type: ignore[arg-type, return-value]


def test_a_function_is_described_by_its_name_and_its_periods() -> None:
    def slower(n: int) -> int:
        return 3 + n // 100

    lines = identity(changing(slower), "s")
    assert lines[1].endswith(".slower")
    assert lines[2:7] == [
        "s.period(1): 3",
        "s.period(10): 3",
        "s.period(100): 4",
        "s.period(1000): 13",
        "s.period(10000): 103",
    ]
    lines = identity(changing(functools.partial(pow, 2)), "s")
    assert {"s.period: functools.partial", "s.period.func: pow", "s.period.args: (2,)"} <= set(lines)
    assert {"s.period(1): 2", "s.period(10): 1024", "s.period(1000000): undefined"} <= set(lines)


def test_a_function_may_be_undefined_beyond_the_run() -> None:
    def listed(n: int) -> int:
        return ([4] * 50)[n]

    assert {"s.period(10): 4", "s.period(100): undefined"} <= set(identity(changing(listed), "s"))


def test_adaptive_grows_below_the_target_shrinks_above_it_and_never_more_than_by_its_factor() -> None:
    schedule = adaptive(20, target_drift=0.1, minimum=2, maximum=1000, factor=2.0)
    periods = {drift: schedule.after_round(20, schedule.start(), drift)["period"] for drift in (0.0, 0.08, 0.1, 0.125)}
    assert periods == {0.0: 40.0, 0.08: 25.0, 0.1: 20.0, 0.125: 16.0}
    assert schedule.after_round(20, schedule.start(), 1e9)["period"] == 10.0
    assert schedule.after_round(20, schedule.start(), math.inf)["period"] == 10.0


@pytest.mark.parametrize("drift", [None, math.nan])
def test_adaptive_keeps_its_period_where_no_drift_is_known(drift: float | None) -> None:
    schedule = adaptive(20, target_drift=0.1, minimum=2, maximum=1000)
    assert schedule.after_round(33, {"next": 33, "period": 12.75}, drift) == {"next": 46, "period": 12.75}


def test_adaptive_stays_within_its_bounds() -> None:
    schedule = adaptive(20, target_drift=0.1, minimum=15, maximum=50)
    assert due_steps(schedule, 200, drift=0.0) == [20, 60, 110, 160]
    assert due_steps(schedule, 80, drift=1.0) == [20, 35, 50, 65, 80]


def test_many_small_changes_of_an_adaptive_period_add_up() -> None:
    schedule = adaptive(4, target_drift=0.1, minimum=2, maximum=100)
    state = schedule.start()
    for n in range(1, 11):
        state = schedule.after_round(n, state, drift=0.1 / 1.05)  # 5 % a round is less than half a step
    assert state["period"] == pytest.approx(4 * 1.05**10)


@pytest.mark.parametrize("power", [0.5, 1.0, 1.5])
def test_adaptive_finds_the_period_that_has_the_target_drift(power: float) -> None:
    # Drift grows with the period: like its root if steps are mere noise, in proportion if workers pull apart.
    schedule = adaptive(4, target_drift=0.1, minimum=1, maximum=10_000)
    state, n = schedule.start(), 0
    for _ in range(40):
        n = int(state["next"])
        state = schedule.after_round(n, state, drift=0.1 * (state["period"] / 300) ** power)
    assert state["period"] == pytest.approx(300, rel=0.01)


def test_only_the_largest_due_level_runs() -> None:
    levels = [every(2), every(4), every(8)]
    ran = [largest_due([level.is_due(n, level.start()) for level in levels]) for n in range(1, 9)]
    assert ran == [None, 0, None, 1, None, 0, None, 2]


def test_levels_staggered_together_meet_where_the_inner_one_is_due() -> None:
    for index in range(3):
        inner, middle, outer = staggered_levels([every(4), every(12), every(48)], index, 3)
        assert set(due_steps(outer, 200)) < set(due_steps(middle, 200)) < set(due_steps(inner, 200))
        assert smallest_gap([inner, middle, outer]) == 4


def test_levels_staggered_together_still_spread_over_the_outer_period() -> None:
    # Turns of the outer level would be 16, 32 and 48; the inner one's steps at or before them are 13, 30 and 48.
    levels = [staggered_levels([every(4), every(48)], index, 3) for index in range(3)]
    assert [inner.start()["next"] for inner, _ in levels] == [1, 2, 4]
    assert [outer.start()["next"] for _, outer in levels] == [13, 30, 48]


def test_levels_that_do_not_nest_are_staggered_each_for_itself() -> None:
    assert staggered_levels([every(4), every(6)], 0, 2) == (Every(4, 2), Every(6, 3))


def test_the_smallest_gap_counts_the_steps_between_levels() -> None:
    assert smallest_gap([every(6)]) == 6
    assert smallest_gap([every(10).staggered(0, 2), every(10)]) == 5
    assert smallest_gap([every(10), changing({1: 20})]) == 1
    with pytest.raises(ValueError, match="at least one level"):
        smallest_gap([])


def test_integers_of_other_libraries_become_ours() -> None:
    assert every(np.int64(8)) == every(8)
    assert type(every(np.int64(8)).start()["next"]) is int
    assert type(changing(lambda n: np.int64(8)).start()["next"]) is int


@pytest.mark.parametrize("period", [0, -3])
def test_a_period_below_one_step_is_refused(period: int) -> None:
    with pytest.raises(ValueError, match=f"period must be at least 1 step; got {period}"):
        every(period)


@pytest.mark.parametrize("period", [2.0, "8", None, True])
def test_a_period_that_is_not_whole_is_refused(period: object) -> None:
    with pytest.raises(TypeError, match=r"period must be a whole number of steps \(int\); got"):
        every(period)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("milestones", "message"),
    [
        ({}, "at least one entry, such as"),
        ({5: 10}, "No period is in force before step 5, the first milestone; add one for step 1"),
        ({-1: 10}, "count from 1; got -1"),
        ({1: 0}, "The period from step 1 must be at least 1 step; got 0"),
    ],
)
def test_milestones_that_leave_a_gap_are_refused(milestones: dict[int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        changing(milestones)


def test_changing_refuses_what_is_neither_function_nor_milestones() -> None:
    with pytest.raises(TypeError, match=r"function of the step or milestones .* got 16. .* use every\(\)"):
        changing(16)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="minimum= is for functions"):
        changing({1: 4}, minimum=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"initial": 2}, "minimum <= initial <= maximum; got 4, 2 and 64"),
        ({"maximum": 8}, "minimum <= initial <= maximum; got 4, 16 and 8"),
        ({"target_drift": 0.0}, "target_drift must be a positive number.* got 0.0"),
        ({"target_drift": math.nan}, "target_drift must be a positive number.* got nan"),
        ({"factor": 1.0}, r"factor, .*, must be above 1; got 1.0. .* use every\(\)"),
    ],
)
def test_adaptive_options_that_contradict_each_other_are_refused(options: dict[str, float], message: str) -> None:
    settings = {"initial": 16, "target_drift": 0.01, "minimum": 4, "maximum": 64, **options}
    with pytest.raises(ValueError, match=message):
        adaptive(**settings)  # type: ignore[arg-type]


def test_adaptive_refuses_a_drift_that_is_no_number() -> None:
    with pytest.raises(TypeError, match="target_drift must be a number; got '1 %', a str"):
        adaptive(16, target_drift="1 %", minimum=4, maximum=64)  # type: ignore[arg-type]


SCHEDULES = Path(cadenza.schedules.__file__).parent
COMMON = [SCHEDULES.parent / "common" / f"{name}.py" for name in ("__init__", "checks", "milestones", "protocols")]
OWN = ("cadenza.schedules.", *(f"cadenza.common.{name}" for name in ("checks", "milestones", "protocols")))


@pytest.mark.parametrize("file", [*SCHEDULES.glob("*.py"), *COMMON], ids=lambda file: f"{file.parent.name}.{file.stem}")
def test_schedules_import_nothing_but_the_standard_library(file: Path) -> None:
    tree = ast.parse(file.read_text())
    imported = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    foreign = {name for name in imported if not name.startswith(OWN)}
    assert not {name for name in foreign if name.split(".")[0] in ("torch", "numpy", "cadenza")}


def test_only_a_fixed_period_has_a_cycle() -> None:
    assert every(8).cycle == (8, 0)
    assert every(8).staggered(0, 4).cycle == (8, 2)
    assert changing({1: 8}).cycle is None
    assert adaptive(8, target_drift=0.1, minimum=4, maximum=16).cycle is None


def test_the_gap_after_a_level_looks_forward_only() -> None:
    levels = [Every(12), Every(12, offset=1), Every(12, offset=4)]
    assert [gap_after(levels, level) for level in range(3)] == [1, 3, 8]
    assert smallest_gap(levels) == 1
    assert gap_after([every(4), changing({1: 8})], 0) == 1


def test_moments_have_periods_of_their_own() -> None:
    periods = moments(exp_avg_sq=every(6), exp_avg=np.int64(2))
    assert [periods.due(n) for n in (0, 1, 2, 6)] == [(), (), ("exp_avg",), ("exp_avg", "exp_avg_sq")]
    assert hash(periods) == hash(moments(exp_avg=2, exp_avg_sq=6))


@pytest.mark.parametrize("given", [{}, {"exp_avg": 0}, {"exp_avg": changing({1: 4})}])
def test_moments_that_cannot_be_are_refused(given: dict[str, int | Schedule]) -> None:
    with pytest.raises(ValueError, match=r"at least"):
        moments(**given)

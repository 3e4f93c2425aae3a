"""A strategy that contradicts itself is refused when it is made, and the message says how to mend it."""

from __future__ import annotations

import pickle
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest

import cadenza
from cadenza import LevelPlan, Strategy, codecs
from cadenza.fragments import whole
from cadenza.outer import mean

EVERY_4 = LevelPlan(4)


class Index:
    """A whole number of another library."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value


def test_a_number_of_steps_is_a_schedule() -> None:
    assert LevelPlan(8).schedule == cadenza.every(8)
    assert LevelPlan(Index(8)).schedule == cadenza.every(8)  # type: ignore[arg-type]
    assert cadenza.diloco(period=Index(8)).period == 8  # type: ignore[arg-type]


def test_a_level_takes_the_mean_of_exact_values_with_everyone_by_default() -> None:
    assert EVERY_4.groups == "all"
    assert EVERY_4.codec == codecs.fp32()
    assert EVERY_4.outer == mean()


@pytest.mark.parametrize(
    ("plan", "anchored"),
    [
        (EVERY_4, False),
        (LevelPlan(4, codec=codecs.int8()), True),
        (LevelPlan(4, outer=cadenza.nesterov()), True),
        (LevelPlan(4, codec=codecs.bf16(), outer=cadenza.nesterov()), True),
    ],
)
def test_a_level_keeps_an_anchor_if_it_has_a_use_for_one(plan: LevelPlan, anchored: bool) -> None:
    assert plan.anchored is anchored


@pytest.mark.parametrize("groups", ["all", "host", 1, 4, ((0, 1), (2, 3))])
def test_groups_that_make_sense(groups: Any) -> None:
    assert LevelPlan(4, groups=groups).groups == groups


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"schedule": 0}, ValueError),
        ({"schedule": -1}, ValueError),
        ({"schedule": True}, TypeError),
        ({"schedule": 4.0}, TypeError),
        ({"schedule": "4"}, TypeError),
        ({"schedule": None}, TypeError),
        ({"schedule": 4, "codec": "int8"}, TypeError),
        ({"schedule": 4, "codec": codecs.int8}, TypeError),
        ({"schedule": 4, "outer": 0.7}, TypeError),
        ({"schedule": 4, "outer": cadenza.nesterov}, TypeError),
        ({"schedule": 4, "groups": 0}, ValueError),
        ({"schedule": 4, "groups": True}, ValueError),
        ({"schedule": 4, "groups": "rack"}, ValueError),
        ({"schedule": 4, "groups": None}, ValueError),
        ({"schedule": 4, "groups": [[0, 1], [2, 3]]}, ValueError),
        ({"schedule": 4, "groups": ((0, 1), (1, 2))}, ValueError),
        ({"schedule": 4, "groups": ()}, ValueError),
        ({"schedule": 4, "groups": (0, 1)}, (TypeError, ValueError)),
    ],
    ids=str,
)
def test_levels_that_make_no_sense_are_refused(options: dict[str, Any], error: Any) -> None:
    with pytest.raises(error):
        LevelPlan(**options)


REFUSED: dict[str, tuple[dict[str, Any], Any, str]] = {
    "no level": ({"levels": ()}, ValueError, "at least one level"),
    "a schedule as a level": ({"levels": (cadenza.every(4),)}, TypeError, "LevelPlan"),
    "a level alone": ({"levels": EVERY_4}, TypeError, "levels"),
    "levels out of order": ({"levels": (LevelPlan(16), LevelPlan(4))}, ValueError, "innermost"),
    "half a step of warm-up": ({"warmup_steps": 0.5}, TypeError, "warmup_steps"),
    "negative warm-up": ({"warmup_steps": -1}, ValueError, "warmup_steps"),
    "negative delay": ({"delay": -1}, ValueError, "delay"),
    "true delay": ({"delay": True}, TypeError, "delay"),
    "delay as long as the period": ({"delay": 4}, ValueError, "below 4"),
    "delay longer than the period": ({"delay": 5}, ValueError, "below 4"),
    "delay between levels that do not nest": (
        {"levels": (LevelPlan(4), LevelPlan(6)), "delay": 2},
        ValueError,
        "below 2",
    ),
    "delay and a period that may be 1": (
        {"levels": (LevelPlan(cadenza.changing(lambda n: 4)),), "delay": 1},
        ValueError,
        "shorter",
    ),
    "buffers that land late": ({"delay": 1, "buffers": True}, ValueError, "land late"),
    "moments that land late": ({"delay": 1, "optimizer_state": "average"}, ValueError, "land late"),
    "alpha of the mean": ({"alpha": 0.5}, ValueError, "alpha"),
    "alpha of 1": ({"levels": (LevelPlan(4, outer=cadenza.nesterov()),), "alpha": 1.0}, ValueError, "alpha"),
    "negative alpha": ({"levels": (LevelPlan(4, outer=cadenza.nesterov()),), "alpha": -0.1}, ValueError, "alpha"),
    "alpha that is no number": ({"alpha": float("nan")}, ValueError, "alpha"),
    "alpha in words": ({"alpha": "half"}, TypeError, "alpha"),
    "unknown optimizer state": ({"optimizer_state": "forget"}, ValueError, "optimizer_state"),
    "unknown weight": ({"weight": "tokens"}, ValueError, "weight"),
    "weight that is a number": ({"weight": 2.0}, ValueError, "weight"),
    "balanced levels": ({"levels": (LevelPlan(2, groups=2), EVERY_4), "balanced": True}, ValueError, "balanced"),
    "balanced and late": ({"balanced": True, "delay": 1}, ValueError, "balanced"),
    "balanced and changing": (
        {"levels": (LevelPlan(cadenza.changing({1: 4})),), "balanced": True},
        ValueError,
        "balanced",
    ),
    "fragments in words": ({"fragments": "by_layers"}, TypeError, "fragments"),
    "fragments that were not called": ({"fragments": cadenza.by_layers}, TypeError, "fragments"),
    "adaptive inside": (
        {
            "levels": (
                LevelPlan(cadenza.adaptive(2, target_drift=0.1, minimum=1, maximum=4), groups=2),
                LevelPlan(8),
            )
        },
        ValueError,
        "drift",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_contradictions_are_refused(what: str) -> None:
    options, error, words = REFUSED[what]
    with pytest.raises(error, match=words):
        Strategy(**{"levels": (EVERY_4,), **options})


def test_what_goes_together_is_taken() -> None:
    nesterov = LevelPlan(4, outer=cadenza.nesterov())
    Strategy(levels=(EVERY_4,), delay=3)
    Strategy(levels=(nesterov,), delay=3, alpha=0.5)
    Strategy(levels=(LevelPlan(4), LevelPlan(8)), delay=3)
    Strategy(levels=(LevelPlan(cadenza.changing({1: 4, 100: 8})),), delay=3)
    Strategy(levels=(nesterov,), balanced=True, weight="samples")
    Strategy(levels=(EVERY_4,), buffers=True, optimizer_state="average", warmup_steps=100)
    Strategy(levels=[EVERY_4])  # type: ignore[arg-type]


def test_a_strategy_is_a_value() -> None:
    one, other = cadenza.diloco(4, codec=codecs.int8()), cadenza.diloco(4, codec=codecs.int8())
    assert one == other
    assert hash(one) == hash(other)
    assert pickle.loads(pickle.dumps(one)) == one
    with pytest.raises(FrozenInstanceError):
        one.delay = 3  # type: ignore[misc]


def test_whole_is_the_default_fragmentation() -> None:
    assert Strategy(levels=(EVERY_4,)).fragments == whole()


DIFFERENT: list[Strategy] = [
    cadenza.diloco(4),
    cadenza.diloco(5),
    cadenza.diloco(4, outer_lr=0.5),
    cadenza.diloco(4, outer_momentum=0.5),
    cadenza.diloco(4, clip=1.0),
    cadenza.diloco(4, codec=codecs.bf16()),
    cadenza.diloco(4, codec=codecs.int8()),
    cadenza.diloco(4, codec=codecs.int8(block=64)),
    cadenza.diloco(4, codec=codecs.error_feedback(codecs.int8())),
    cadenza.diloco(4, codec=codecs.error_feedback(codecs.int8(), decay=0.5)),
    cadenza.diloco(4, codec=codecs.topk(0.02)),
    cadenza.diloco(4, codec=codecs.topk(0.02, bits=4)),
    cadenza.diloco(4, codec=codecs.topk(0.02, chunk=64)),
    cadenza.diloco(4, codec=codecs.topk(0.02000001)),
    cadenza.diloco(4, delay=1),
    cadenza.diloco(4, delay=1, alpha=0.5),
    cadenza.diloco(4, delay=1, alpha=0.50000001),
    cadenza.diloco(4, buffers=True),
    cadenza.diloco(4, optimizer_state="average"),
    cadenza.diloco(4, optimizer_state="reset"),
    cadenza.diloco(4, weight="samples"),
    cadenza.diloco(4, balanced=True),
    cadenza.diloco(4, measure_drift=False),
    cadenza.diloco(4, fragments=cadenza.by_layers(1)),
    cadenza.diloco(4, fragments=cadenza.by_layers(1, strided=False)),
    cadenza.diloco(4, fragments=cadenza.by_bytes(100)),
    cadenza.diloco(4, warmup_steps=1),
    cadenza.local_sgd(4),
    cadenza.hierarchical({4: 2, 8: "all"}),
    cadenza.hierarchical({4: ((0, 1), (2, 3)), 8: "all"}),
    cadenza.slowmo(4),
    cadenza.slowmo(4, beta=0.4),
]


def test_ranks_can_tell_different_strategies_apart() -> None:
    told = [tuple(strategy.identity) for strategy in DIFFERENT]
    twins = {text for text in told if told.count(text) > 1}
    assert not twins


def test_offloading_is_each_ranks_own_affair() -> None:
    assert cadenza.diloco(4).identity == cadenza.diloco(4, offload=True).identity


def test_the_period_is_that_of_the_innermost_level() -> None:
    assert cadenza.hierarchical({2: 2, 8: "all"}).period == 2


def test_drift_is_measured_where_a_schedule_needs_it() -> None:
    schedule = cadenza.adaptive(4, target_drift=0.1, minimum=1, maximum=8)
    assert replace(cadenza.local_sgd(schedule), measure_drift=False).measures_drift
    assert not cadenza.local_sgd(4, measure_drift=False).measures_drift

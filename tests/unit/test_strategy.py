"""A strategy that contradicts itself is refused when it is made, and the message says how to mend it."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import FrozenInstanceError, dataclass, replace
from typing import Any

import pytest

import cadenza
from cadenza import LevelPlan, Strategy, codecs
from cadenza.codecs.feedback import ErrorFeedback
from cadenza.fragments import whole
from cadenza.outer import mean
from cadenza.schedules import moments
from cadenza.topology import Level

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
        ({"schedule": 4, "groups": Level(((0, 1),))}, ValueError),
        ({"schedule": 4, "delay": -1}, ValueError),
        ({"schedule": 4, "delay": 1.0}, TypeError),
        ({"schedule": cadenza.schedules.Every}, TypeError),
    ],
)
def test_levels_that_make_no_sense_are_refused(options: dict[str, Any], error: Any) -> None:
    with pytest.raises(error):
        LevelPlan(**options)


class Pairs:
    """Groups that change from round to round."""

    def groups(self, round: int, ranks: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(ranks[i : i + 2]) for i in range(0, len(ranks), 2))


class HalfWeighting:
    def weigh(self, contributions: Any, state: Any) -> Any:
        return None


REFUSED: dict[str, tuple[dict[str, Any], Any, str]] = {
    "no level": ({"levels": ()}, ValueError, "at least one level"),
    "a schedule as a level": ({"levels": (cadenza.every(4),)}, TypeError, "LevelPlan"),
    "a level alone": ({"levels": EVERY_4}, TypeError, "levels"),
    "levels out of order": ({"levels": (LevelPlan(16), LevelPlan(4))}, ValueError, "innermost"),
    "half a step of warm-up": ({"warmup_steps": 0.5}, TypeError, "warmup_steps"),
    "negative warm-up": ({"warmup_steps": -1}, ValueError, "warmup_steps"),
    "negative delay": ({"delay": -1}, ValueError, "delay"),
    "true delay": ({"delay": True}, TypeError, "delay"),
    "delay longer than the period": ({"delay": 5}, ValueError, "at most 4"),
    "delay between levels that do not nest": (
        {"levels": (LevelPlan(4), LevelPlan(6)), "delay": 3},
        ValueError,
        "at most 2",
    ),
    "delay and a period that may be 1": (
        {"levels": (LevelPlan(cadenza.changing(lambda n: 4)),), "delay": 2},
        ValueError,
        "at most 1",
    ),
    "a level's delay longer than the gap to the inner level": (
        {"levels": (LevelPlan(4), LevelPlan(16, delay=5))},
        ValueError,
        "delay 5 is longer than the 4 steps",
    ),
    "buffers that land late at one level": (
        {"levels": (LevelPlan(4), LevelPlan(16, delay=4)), "buffers": True},
        ValueError,
        "land late",
    ),
    "moments of their own that land late": (
        {"delay": 1, "optimizer_state": moments(exp_avg=4)},
        ValueError,
        "land late",
    ),
    "moments of their own that come and go": (
        {"optimizer_state": moments(exp_avg=4), "faults": cadenza.shrink()},
        ValueError,
        "moments at periods of their own",
    ),
    "averaged gradients that come and go": (
        {"average_gradients": True, "faults": cadenza.shrink()},
        ValueError,
        "average_gradients",
    ),
    "balanced and averaged gradients": ({"average_gradients": True, "balanced": True}, ValueError, "balanced"),
    "balanced at one level's delay": ({"levels": (LevelPlan(4, delay=1),), "balanced": True}, ValueError, "balanced"),
    "balanced in fragments": ({"balanced": True, "fragments": cadenza.by_layers(1)}, ValueError, "balanced"),
    "a class as the weight": ({"weight": cadenza.weighting.Samples}, TypeError, "is a class"),
    "a class as fragments": ({"fragments": cadenza.fragments.Whole}, TypeError, "is a class"),
    "faults in words": ({"faults": "shrink"}, TypeError, r"str lacks .* cadenza\.faults\.FaultPolicy"),
    "faults that were not called": ({"faults": cadenza.shrink}, TypeError, r"function: call it, as in cadenza\.shrink"),
    "half a weighting": ({"weight": HalfWeighting()}, TypeError, "HalfWeighting lacks needs_samples, start and own"),
    "changing groups inside others": (
        {"levels": (LevelPlan(4, groups=Pairs()), LevelPlan(8))},
        ValueError,
        "need not nest",
    ),
    "changing groups that follow the drift": (
        {"levels": (LevelPlan(cadenza.adaptive(4, target_drift=0.1, minimum=2, maximum=8), groups=Pairs()),)},
        ValueError,
        "drift of its own",
    ),
    "changing groups and balanced": (
        {"levels": (LevelPlan(4, groups=Pairs()),), "balanced": True},
        ValueError,
        "speeds",
    ),
    "changing groups and one anchor": (
        {"levels": (LevelPlan(4, groups=Pairs(), outer=cadenza.nesterov()),)},
        ValueError,
        "different anchors",
    ),
    "buffers that land late": ({"delay": 1, "buffers": True}, ValueError, "land late"),
    "moments that land late": ({"delay": 1, "optimizer_state": "average"}, ValueError, "land late"),
    "alpha of the mean": ({"alpha": 0.5}, ValueError, "alpha"),
    "alpha of 1": ({"levels": (LevelPlan(4, outer=cadenza.nesterov()),), "alpha": 1.0}, ValueError, "alpha"),
    "negative alpha": ({"levels": (LevelPlan(4, outer=cadenza.nesterov()),), "alpha": -0.1}, ValueError, "alpha"),
    "alpha that is no number": ({"alpha": float("nan")}, ValueError, "alpha"),
    "a share and the progress": (
        {"levels": (LevelPlan(4, outer=cadenza.nesterov()),), "delay": 2, "alpha": 0.5, "keep_progress": True},
        ValueError,
        "choose one of them; got alpha=0.5",
    ),
    "progress in words": ({"keep_progress": "yes"}, TypeError, "keep_progress is True or False; got 'yes'"),
    "a number for balanced": ({"balanced": 1}, TypeError, "balanced is True or False; got 1"),
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
    Strategy(levels=(EVERY_4,), delay=4)  # a round lands in the step in which the next one is launched
    Strategy(levels=(LevelPlan(4), LevelPlan(16, delay=4)))
    Strategy(levels=(LevelPlan(4), LevelPlan(6)), delay=2)
    Strategy(levels=(LevelPlan(cadenza.changing(lambda n: 4)),), delay=1)
    Strategy(levels=(LevelPlan(4, groups=Pairs()),))
    Strategy(levels=(EVERY_4,), optimizer_state=moments(exp_avg=8, exp_avg_sq=cadenza.every(16)))
    Strategy(levels=(nesterov,), average_gradients=True)
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
    cadenza.diloco(4, delay=1, keep_progress=True),
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


class OwnSchedule:
    """A user's schedule: every third step, without any of ours."""

    shortest_gap = 3
    cycle = (3, 0)
    uses_drift = False

    def start(self) -> dict[str, int | float]:
        return {"next": 3}

    def is_due(self, n: int, state: Any) -> bool:
        return n >= 1 and n % 3 == 0

    def after_round(self, n: int, state: Any, drift: float | None) -> dict[str, int | float]:
        return {"next": n + 3 - n % 3}

    def staggered(self, index: int, count: int) -> OwnSchedule:
        return self


def test_a_users_own_schedule_can_do_what_every_can() -> None:
    plan = LevelPlan(OwnSchedule())
    assert Strategy(levels=(plan,), balanced=True).period == 3
    assert Strategy(levels=(plan, LevelPlan(6)), delay=3).delay_of(1) == 3
    with pytest.raises(ValueError, match="at most 1"):
        Strategy(levels=(plan, LevelPlan(7)), delay=2)


def test_what_a_users_piece_lacks_is_named() -> None:
    class Half:
        def is_due(self, n: int, state: Any) -> bool:
            return True

        def start(self) -> dict[str, int | float]:
            return {}

        def after_round(self, n: int, state: Any, drift: float | None) -> dict[str, int | float]:
            return {}

        def staggered(self, index: int, count: int) -> Half:
            return self

        uses_drift = False

    with pytest.raises(TypeError, match=r"Half lacks shortest_gap and cycle: see cadenza\.schedules\.Schedule"):
        LevelPlan(Half())  # type: ignore[arg-type]


@dataclass(frozen=True)
class Shaped:
    """A codec that asks for shapes; it writes as int8 does."""

    sparse: bool
    shaped: bool = True

    def __getattr__(self, name: str) -> Any:
        return getattr(codecs.int8(), name)


class ShapedAndAble(Shaped):
    def for_shapes(self, shapes: Sequence[tuple[int, ...]]) -> Shaped:
        return Shaped(self.sparse, shaped=False)

    def split(self, row_bytes: int) -> list[tuple[int, Shaped]]:
        return [(6, self)]


def test_a_codec_that_asks_for_shapes_is_sparse_and_can_be_given_them() -> None:
    assert LevelPlan(4, codec=ShapedAndAble(sparse=True)).codec.shaped  # type: ignore[arg-type]
    for codec in (ShapedAndAble(sparse=False), Shaped(sparse=True)):
        with pytest.raises(ValueError, match="must be sparse and have for_shapes"):
            LevelPlan(4, codec=codec)  # type: ignore[arg-type]


def test_error_feedback_passes_on_what_a_codec_asks_for() -> None:
    codec: Any = codecs.error_feedback(ShapedAndAble(sparse=True))  # type: ignore[arg-type]
    assert (codec.shaped, codec.sparse, codec.aligned) == (True, True, True)
    assert codec.for_shapes([(2, 3)]) == ErrorFeedback(Shaped(True, shaped=False), 1.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="values of any shape"):
        codecs.error_feedback(codecs.int8()).for_shapes([(2, 3)])  # type: ignore[attr-defined]


def test_fragments_whose_levels_come_too_near_for_the_delay_are_refused() -> None:
    strategy = Strategy(levels=(LevelPlan(4), LevelPlan(6)), delay=2, fragments=cadenza.by_layers(1))
    with pytest.raises(ValueError, match="at most 1"):
        strategy.schedules_of(0, 2)
    nested = Strategy(levels=(LevelPlan(4), LevelPlan(8)), delay=4, fragments=cadenza.by_layers(1))
    assert [schedule.cycle for schedule in nested.schedules_of(0, 2)] == [(4, 2), (8, 2)]
    assert nested.schedules_of(0, 1) == (cadenza.every(4), cadenza.every(8))


def test_a_levels_own_delay_comes_before_the_strategys() -> None:
    strategy = Strategy(levels=(LevelPlan(4, delay=0), LevelPlan(16)), delay=2)
    assert [strategy.delay_of(0), strategy.delay_of(1)] == [0, 2]

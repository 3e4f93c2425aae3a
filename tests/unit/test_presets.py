"""Every preset is the composition that its paper describes, with its paper's defaults."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Any, get_args, get_type_hints

import pytest

import cadenza
from cadenza import LevelPlan, Strategy, codecs, presets
from cadenza.fragments import by_layers, whole
from cadenza.outer import eager, mean, nesterov, noloco, sgd, sign, slowmo
from cadenza.schedules import every, moments
from cadenza.strategy import StrategyOptions
from cadenza.weighting import edit_norms


def level(strategy: Strategy) -> LevelPlan:
    [plan] = strategy.levels
    return plan


def test_local_sgd_takes_the_exact_mean() -> None:
    assert level(cadenza.local_sgd(8)) == LevelPlan(every(8), codec=codecs.fp32(), outer=mean())


def test_post_local_sgd_is_local_sgd_after_a_warm_up() -> None:
    assert cadenza.post_local_sgd(8, warmup_steps=100) == cadenza.local_sgd(8, warmup_steps=100)
    with pytest.raises(TypeError, match="warmup_steps"):
        cadenza.post_local_sgd(8)  # type: ignore[call-arg]


def test_hierarchical_has_a_level_a_period() -> None:
    strategy = cadenza.hierarchical({4: "host", 16: 8, 64: "all"})
    assert [(plan.schedule, plan.groups) for plan in strategy.levels] == [
        (every(4), "host"),
        (every(16), 8),
        (every(64), "all"),
    ]
    encoded = cadenza.hierarchical({4: "host", 64: "all"}, codec=codecs.int8())
    assert [plan.codec.name for plan in encoded.levels] == ["fp32", "int8"]  # inside a group links are fast
    with pytest.raises(ValueError, match="at least one level"):
        cadenza.hierarchical({})
    with pytest.raises(ValueError, match="innermost"):
        cadenza.hierarchical({64: 8, 4: "all"})


def test_slowmo_is_that_of_1910_00643() -> None:
    plan = level(cadenza.slowmo())
    assert plan.outer == slowmo(alpha=1.0, beta=0.6)
    assert plan.outer.needs_inner_lr


def test_diloco_is_that_of_2311_08105() -> None:
    plan = level(cadenza.diloco())
    assert plan.schedule == every(500)
    assert plan.outer == nesterov(lr=0.7, momentum=0.9)
    assert plan.codec == codecs.fp32()
    assert cadenza.diloco().fragments == whole()


@pytest.mark.parametrize(("period", "lr"), [(8, 0.5), (30, 0.7), (100, 0.94)])
def test_dilocos_outer_step_suits_the_period(period: int, lr: float) -> None:
    assert level(cadenza.diloco(period)).outer == nesterov(lr=lr, momentum=0.8, rises_beyond=4)
    assert level(cadenza.diloco(every(period))).outer == nesterov(lr=lr, momentum=0.8, rises_beyond=4)
    assert level(cadenza.diloco(period, defaults="paper")).outer == nesterov(lr=0.7, momentum=0.9)


def test_streaming_dilocos_outer_step_suits_the_period() -> None:
    assert level(cadenza.streaming_diloco(30)).outer == nesterov(lr=0.7, momentum=0.8, rises_beyond=4)
    assert level(cadenza.streaming_diloco(30, outer_lr=0.4)).outer == nesterov(lr=0.4, momentum=0.8)


def test_an_explicit_outer_value_wins_and_the_other_one_suits_it() -> None:
    assert level(cadenza.diloco(30, outer_lr=0.1)).outer == nesterov(lr=0.1, momentum=0.8)
    assert level(cadenza.diloco(30, outer_momentum=0.0)).outer == nesterov(lr=1.0, momentum=0.0, rises_beyond=4)
    assert level(cadenza.diloco(30, outer_lr=2.0, outer_momentum=0.0)).outer == nesterov(lr=2.0, momentum=0.0)
    assert level(cadenza.diloco(30, outer_momentum=0.5, defaults="paper")).outer == nesterov(lr=0.7, momentum=0.5)


def test_a_large_momentum_has_a_small_rate_and_not_none() -> None:
    assert level(cadenza.diloco(8, outer_momentum=0.99)).outer.lr == 0.025
    assert level(cadenza.diloco(8, outer_momentum=0.999)).outer.lr == 0.0025


@pytest.mark.parametrize("period", ["auto", cadenza.changing({1: 8, 100: 64})], ids=["auto", "changing"])
def test_where_the_period_is_not_known_beforehand_the_outer_step_is_that_of_30(period: Any) -> None:
    assert level(cadenza.diloco(period)).outer == level(cadenza.diloco(30)).outer
    assert level(cadenza.muloco(period)).outer == level(cadenza.muloco(30)).outer
    assert level(cadenza.diloco(period, defaults="paper")).outer == nesterov(lr=0.7, momentum=0.9)


def test_periods_beyond_the_papers_have_its_outer_step() -> None:
    for period in (500, 2000, 100_000):
        assert level(cadenza.diloco(period)).outer == nesterov(lr=0.7, momentum=0.9)


def test_defaults_of_nobody_are_refused() -> None:
    with pytest.raises(ValueError, match='"measured" or "paper"'):
        cadenza.diloco(30, defaults="papers")  # type: ignore[arg-type]


def test_streaming_diloco_is_that_of_2501_18512() -> None:
    strategy = cadenza.streaming_diloco(defaults="paper")
    plan = level(strategy)
    assert plan.outer == nesterov(lr=0.4, momentum=0.9)
    assert plan.codec == codecs.e3m0()
    assert strategy.fragments == by_layers(3, strided=True)
    assert (strategy.delay, strategy.alpha) == (5, 0.5)


def test_streaming_diloco_keeps_what_was_learned_since_the_launch_or_what_it_is_told_to() -> None:
    kept = {
        (): (0.0, True),
        (("alpha", 0.3),): (0.3, False),
        (("alpha", 0.0),): (0.0, False),
        (("keep_progress", False),): (0.0, False),
        (("defaults", "paper"), ("keep_progress", True)): (0.0, True),
        (("defaults", "paper"), ("alpha", 0.2)): (0.2, False),
    }
    for given, expected in kept.items():
        options: dict[str, Any] = dict(given)
        strategy = cadenza.streaming_diloco(30, delay=2, **options)
        assert (strategy.alpha, strategy.keep_progress) == expected, given
    with pytest.raises(ValueError, match="choose one of them"):
        cadenza.streaming_diloco(30, delay=2, alpha=0.5, keep_progress=True)


def test_streaming_diloco_takes_a_schedule_for_its_period() -> None:
    schedule = cadenza.changing({1: 20, 100: 50})
    assert level(cadenza.streaming_diloco(schedule)).schedule == schedule


def test_sparse_loco_is_that_of_2508_15706() -> None:
    plan = level(cadenza.sparse_loco())
    assert plan.codec == codecs.error_feedback(codecs.topk(density=0.02, bits=2, mean_of="senders"), decay=0.95)
    assert plan.outer == sgd(lr=1.0)


def test_demo_is_that_of_2411_19870() -> None:
    plan = level(cadenza.demo())
    assert plan.schedule == every(1)
    assert plan.codec == codecs.error_feedback(codecs.dct(32, chunk=64), decay=0.999)
    assert plan.outer == sign(4e-4, weight_decay=0.0)


def test_des_loc_is_that_of_2505_22549() -> None:
    strategy = cadenza.des_loc(16)
    assert level(strategy) == LevelPlan(every(16), codec=codecs.fp32(), outer=mean())
    assert strategy.optimizer_state == moments(exp_avg=48, exp_avg_sq=96)
    own = cadenza.des_loc(16, momentum_period=20, variance_period=100, outer=nesterov(1.0))
    assert own.optimizer_state == moments(exp_avg=20, exp_avg_sq=100)
    assert level(own).outer == nesterov(1.0)
    changing = cadenza.des_loc(cadenza.changing({1: 8, 100: 64}))
    assert changing.optimizer_state == moments(exp_avg=24, exp_avg_sq=48)


@pytest.mark.parametrize(("given", "error"), [(0, ValueError), (2.5, TypeError), ("8", TypeError), (True, TypeError)])
def test_periods_of_moments_that_are_none_are_refused(given: Any, error: type[Exception]) -> None:
    for name in ("momentum_period", "variance_period"):
        with pytest.raises(error, match=name):
            cadenza.des_loc(16, **{name: given})


def test_eager_diloco_is_that_of_2502_12996() -> None:
    strategy = cadenza.eager_diloco()
    assert level(strategy) == LevelPlan(every(30), outer=eager(lr=0.7, momentum=0.9))
    assert strategy.delay == 30


def test_muloco_is_that_of_2505_23725() -> None:
    assert cadenza.muloco(defaults="paper") == cadenza.diloco(30, outer_lr=0.7, outer_momentum=0.6)
    assert cadenza.muloco() == cadenza.diloco(30)


def test_snoo_is_that_of_2510_15830() -> None:
    strategy = cadenza.snoo()
    inner, everyone = strategy.levels
    assert inner == LevelPlan(every(30), groups=1, outer=nesterov(lr=0.7, momentum=0.8))
    assert (everyone.groups, everyone.outer) == ("all", mean())
    assert strategy.average_gradients
    assert not cadenza.snoo(average_gradients=False).average_gradients


def test_edit_is_that_of_2412_07210() -> None:
    strategy = cadenza.edit()
    assert strategy.period == 128
    assert strategy.fragments == cadenza.by_layers(1)
    assert strategy.weight == edit_norms(threshold=3.0, smoothing=0.02, temperature=1.0)
    assert level(strategy).outer == nesterov(lr=0.8, momentum=0.85, clip=10.0)


def test_noloco_is_that_of_2506_10911() -> None:
    plan = level(cadenza.noloco())
    assert plan.schedule == every(50)
    assert plan.groups == cadenza.topology.random_pairs(seed=0)
    assert plan.outer == noloco(lr=0.7, momentum=0.5, pull=0.7)


PRESETS: dict[str, dict[str, Any]] = {
    "demo": {},
    "des_loc": {},
    "local_sgd": {},
    "post_local_sgd": {"warmup_steps": 3},
    "noloco": {},
    "slowmo": {},
    "snoo": {},
    "diloco": {},
    "eager_diloco": {},
    "edit": {},
    "muloco": {},
    "streaming_diloco": {},
    "sparse_loco": {},
}


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_takes_the_options_of_a_strategy(name: str) -> None:
    strategy = getattr(cadenza, name)(64, buffers=False, weight="samples", offload=True, **PRESETS[name])
    assert strategy.weight == "samples"
    assert strategy.offload
    assert strategy.period == 64


@pytest.mark.parametrize("name", sorted(set(PRESETS) - {"eager_diloco", "streaming_diloco"}))
def test_the_period_may_be_a_schedule(name: str) -> None:
    schedule = cadenza.changing({1: 8, 100: 64})
    assert getattr(cadenza, name)(schedule, **PRESETS[name]).levels[0].schedule == schedule


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("period", [0, -1, 2.5, "8", None, True])
def test_a_period_that_is_none_is_refused(name: str, period: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        getattr(cadenza, name)(period, **PRESETS[name])


@pytest.mark.parametrize("name", [*PRESETS, "hierarchical"])
def test_misspelled_options_are_refused(name: str) -> None:
    options = PRESETS.get(name, {})
    with pytest.raises(TypeError, match="warmup"):
        getattr(cadenza, name)({8: "all"} if name == "hierarchical" else 64, **options, warmup=3)


def test_every_preset_is_public_and_documented() -> None:
    assert set(presets.__all__) == {*PRESETS, "hierarchical"}
    for name in presets.__all__:
        assert getattr(cadenza, name) is getattr(presets, name)
        assert ">>>" in (inspect.getdoc(getattr(presets, name)) or "")


def test_a_delay_must_fit_a_short_period() -> None:
    with pytest.raises(ValueError, match="at most 4"):
        cadenza.streaming_diloco(4)


def test_presets_are_typed_for_every_option_of_a_strategy() -> None:
    named = {field.name for field in fields(Strategy)} - {"levels"}
    assert set(StrategyOptions.__annotations__) == named
    for name in presets.__all__:
        preset = getattr(presets, name)
        hints = get_type_hints(preset)
        [options] = get_args(hints["options"])
        own = set(inspect.signature(preset).parameters)
        assert not own & set(options.__annotations__), "a name that the preset takes itself"
        assert set(options.__annotations__) <= named

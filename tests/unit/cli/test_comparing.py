"""Strategies that are compared: what each takes over of the configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

import cadenza
from cadenza.cli.comparing import contestants
from cadenza.cli.recipes.files import find_recipe
from cadenza.errors import UsageError
from cadenza.training.config import Config, read_config


def test_each_strategy_takes_the_keys_that_it_knows() -> None:
    given = {"strategy.period": 8, "strategy.outer_lr": 0.5, "strategy.codec": "bf16"}
    found = contestants(None, given, ["ddp", " local_sgd", "diloco"])
    ddp, averaged, diloco = (entry.config for entry in found.values())
    assert ddp.strategy.arguments == {}
    assert (averaged.strategy.codec, averaged.strategy.arguments) == ("bf16", {"period": 8})
    assert diloco.strategy.arguments.items() >= {"period": 8, "outer_lr": 0.5}.items()


def test_each_strategy_has_its_own_values_for_what_was_not_given(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('[strategy]\nname = "diloco"\nperiod = 64\ncodec = "int8"\n')
    found = contestants(file, {"strategy.outer_momentum": 0.5}, ["streaming_diloco", "diloco"])
    streaming, diloco = (entry.config.strategy for entry in found.values())
    assert streaming.build() == cadenza.streaming_diloco(outer_momentum=0.5)
    assert diloco.codec == "int8"
    assert diloco.arguments.items() >= {"period": 64, "outer_momentum": 0.5}.items()


def test_all_else_is_the_same() -> None:
    given = {"steps": 7, "seed": 3, "options.width": 2, "options.lr": 0.5}
    for entry in contestants(None, given, ["ddp", "slowmo"]).values():
        assert entry.config.model_copy(update={"strategy": Config().strategy}) == read_config(None, given)


def test_levels_are_for_the_one_that_has_some() -> None:
    given = {"strategy.levels": {"4": 2, "16": "all"}}
    averaged, levelled = (entry.config for entry in contestants(None, given, ["local_sgd", "hierarchical"]).values())
    assert "levels" not in averaged.strategy.arguments
    assert [level.groups for level in levelled.strategy.build().levels] == [2, "all"]


def test_each_strategy_has_the_learning_rate_of_its_recipe_unless_one_was_given() -> None:
    names = ["ddp", "diloco", "slowmo"]
    own = contestants(None, {}, names)
    assert [entry.tuned for entry in own.values()] == [True, True, False]
    for name, recipe in (("ddp", "gpt-ddp"), ("diloco", "gpt-diloco")):
        values = find_recipe(recipe).values
        assert own[name].config.options["lr"] == values["options.lr"]
        assert f"from the recipe {recipe}" in own[name].told
    assert (
        own["diloco"].config.strategy.arguments["outer_momentum"]
        == find_recipe("gpt-diloco").values["strategy.outer_momentum"]
    )
    assert "no recipe" in own["slowmo"].told
    given = contestants(None, {"options.lr": 0.25}, names)
    assert {entry.config.options["lr"] for entry in given.values()} == {0.25}
    assert not any(entry.tuned for entry in given.values())
    assert given["diloco"].config.strategy == Config().strategy


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("steps", 200),
        ("launch.workers", 8),
        ("options.width", 256),
        ("strategy.period", 8),
        ("strategy.period", "auto"),
    ],
)
def test_a_recipe_is_not_called_tuned_for_what_it_was_not_tuned_for(key: str, value: object) -> None:
    [entry] = contestants(None, {key: value}, ["diloco"]).values()
    assert not entry.tuned
    assert f"from the recipe gpt-diloco, which was tuned for other values of {key}" in entry.told.replace(
        "strategy.outer_lr, strategy.outer_momentum, ", ""
    )


def test_a_codec_or_what_the_recipe_says_anyway_leaves_it_tuned() -> None:
    same = {key: value for key, value in find_recipe("gpt-diloco").values.items() if key != "options.lr"}
    [entry] = contestants(None, {**same, "strategy.codec": "bf16"}, ["diloco"]).values()
    assert entry.tuned
    assert entry.config.strategy.codec == "bf16"


def test_a_recipes_outer_step_is_not_taken_to_another_period_or_over_the_papers() -> None:
    for given in ({"strategy.period": 8}, {"strategy.defaults": "paper"}):
        [entry] = contestants(None, given, ["diloco"]).values()
        assert entry.config.strategy.arguments.keys().isdisjoint({"outer_lr", "outer_momentum"})
    assert entry.config.strategy.build() == cadenza.diloco(16, defaults="paper", codec=cadenza.codecs.int8())


def test_what_was_given_wins_over_the_recipe_even_if_it_is_the_default(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('steps = 3\n[strategy]\nname = "diloco"\nouter_momentum = 0.8\n')
    [entry] = contestants(file, {"strategy.outer_lr": 1.0}, ["diloco"]).values()
    assert entry.config.strategy.arguments.items() >= {"outer_lr": 1.0, "outer_momentum": 0.8}.items()


def test_other_tasks_have_no_recipes_and_are_told_so() -> None:
    [entry] = contestants(None, {"task": "other.task:build"}, ["ddp"]).values()
    assert not entry.tuned
    assert entry.config.options == {}


def test_a_strategy_that_needs_more_says_so_before_anything_is_trained() -> None:
    with pytest.raises(UsageError, match="levels is missing"):
        contestants(None, {}, ["ddp", "hierarchical"])
    with pytest.raises(UsageError, match='Did you mean "diloco"'):
        contestants(None, {}, ["ddp", "dilocco"])
    with pytest.raises(UsageError, match=r'strategy\.perod: none of ddp, local_sgd .* mean "period"'):
        contestants(None, {"strategy.perod": 3}, ["ddp", "local_sgd"])
    with pytest.raises(UsageError, match="names ddp twice"):
        contestants(None, {}, ["ddp", "ddp"])

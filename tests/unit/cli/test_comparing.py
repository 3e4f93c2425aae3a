"""Strategies that are compared: what each takes over of the configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

import cadenza
from cadenza.cli.comparing import contestants
from cadenza.errors import UsageError
from cadenza.training.config import Config, read_config


def test_each_strategy_takes_the_keys_that_it_knows() -> None:
    given = {"strategy.period": 8, "strategy.outer_lr": 0.5, "strategy.codec": "bf16"}
    ddp, averaged, diloco = contestants(None, given, ["ddp", " local_sgd", "diloco"]).values()
    assert ddp.strategy.arguments == {}
    assert (averaged.strategy.codec, averaged.strategy.arguments) == ("bf16", {"period": 8})
    assert diloco.strategy == read_config(None, given).strategy


def test_each_strategy_has_its_own_values_for_what_was_not_given(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('[strategy]\nname = "diloco"\nperiod = 64\ncodec = "int8"\n')
    streaming, diloco = contestants(file, {"strategy.outer_momentum": 0.5}, ["streaming_diloco", "diloco"]).values()
    assert streaming.strategy.build() == cadenza.streaming_diloco(outer_momentum=0.5)
    assert (diloco.strategy.codec, diloco.strategy.arguments) == ("int8", {"period": 64, "outer_momentum": 0.5})


def test_all_else_is_the_same() -> None:
    given = {"steps": 7, "seed": 3, "options.width": 2}
    for entry in contestants(None, given, ["ddp", "slowmo"]).values():
        assert entry.model_copy(update={"strategy": Config().strategy}) == read_config(None, given)


def test_levels_are_for_the_one_that_has_some() -> None:
    given = {"strategy.levels": {"4": 2, "16": "all"}}
    averaged, levelled = contestants(None, given, ["local_sgd", "hierarchical"]).values()
    assert averaged.strategy.arguments == {}
    assert [level.groups for level in levelled.strategy.build().levels] == [2, "all"]


def test_a_strategy_that_needs_more_says_so_before_anything_is_trained() -> None:
    with pytest.raises(UsageError, match="levels is missing"):
        contestants(None, {}, ["ddp", "hierarchical"])
    with pytest.raises(UsageError, match='Did you mean "diloco"'):
        contestants(None, {}, ["ddp", "dilocco"])
    with pytest.raises(UsageError, match=r'strategy\.perod: none of ddp, local_sgd .* mean "period"'):
        contestants(None, {"strategy.perod": 3}, ["ddp", "local_sgd"])
    with pytest.raises(UsageError, match="names ddp twice"):
        contestants(None, {}, ["ddp", "ddp"])

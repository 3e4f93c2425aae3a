"""Strategies that are compared: what each takes over of the configuration."""

from __future__ import annotations

import pytest

from cadenza.cli.comparing import contestants
from cadenza.errors import UsageError
from cadenza.training.config import Config, read_config


def test_each_strategy_takes_the_keys_that_it_knows() -> None:
    config = read_config(None, {"strategy.period": 8, "strategy.outer_lr": 0.5, "strategy.codec": "bf16"})
    ddp, averaged, diloco = contestants(config, ["ddp", " local_sgd", "diloco"]).values()
    assert ddp.strategy.arguments == {}
    assert (averaged.strategy.codec, averaged.strategy.arguments) == ("bf16", {"period": 8})
    assert diloco.strategy.arguments == config.strategy.arguments
    assert config.strategy.arguments.items() >= {"period": 8, "outer_lr": 0.5}.items()


def test_all_else_is_the_same() -> None:
    config = read_config(None, {"steps": 7, "seed": 3, "options.width": 2})
    for entry in contestants(config, ["ddp", "slowmo"]).values():
        assert entry.model_copy(update={"strategy": Config().strategy}) == config


def test_a_strategy_that_needs_more_says_so_before_anything_is_trained() -> None:
    with pytest.raises(UsageError, match="levels is missing"):
        contestants(Config(), ["ddp", "hierarchical"])

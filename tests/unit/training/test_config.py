"""A configuration is checked before anything is started, and an error says what would have been right."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

import cadenza
from cadenza.errors import UsageError
from cadenza.training.config import Config, read_config
from cadenza.training.config_text import commented
from cadenza.training.standard_library_gpt import Options
from cadenza.training.strategies import KEYS, STRATEGIES, keys_of

# What each strategy needs beside its name.
NEEDED: dict[str, dict[str, Any]] = {
    "post_local_sgd": {"warmup_steps": 8},
    "hierarchical": {"levels": {"4": 2, "16": "all"}},
}

WRONG = [
    ({"steps": "many"}, ["steps", '"many"', "integer"]),
    ({"steps": 0}, ["steps = 0", "greater than or equal to 1"]),
    ({"steps": True}, ["steps = true", "integer"]),
    ({"stepps": 5}, ["stepps", 'Did you mean "steps"?', "Allowed: task, steps"]),
    ({"launch.wrokers": 3}, ["launch.wrokers", 'Did you mean "launch.workers"?', "Allowed: workers"]),
    ({"launch.backend": "glo"}, ["launch.backend", '"glo"', "'auto', 'gloo' or 'nccl'"]),
    ({"launch.nnodes": "two"}, ["launch.nnodes", '"two"', "2:4"]),
    ({"steps.x": 3}, ["steps"]),
    ({"options": 3}, ["options = 3"]),
    ({"strategy": 3}, ["strategy = 3"]),
    ({"strategy.name": "dilocco"}, ['strategy.name = "dilocco"', 'Did you mean "diloco"?', "Allowed: ddp, local_sgd"]),
    ({"strategy.perod": 3}, ["strategy.perod", 'Did you mean "period"?', "Allowed: period"]),
    ({"strategy.period": "x"}, ["strategy.period = 'x'", "whole number of steps"]),
    ({"strategy.period": 2.5}, ["strategy.period = 2.5", "whole number of steps"]),
    ({"strategy.codec": "int9"}, ['strategy.codec = "int9"', 'Did you mean "int8"?', "Allowed: fp32, bf16"]),
    ({"strategy.codec": "fp32+feedback"}, ["fp32+feedback", "loses nothing"]),
    ({"strategy.codec": 8}, ["strategy.codec = 8", "string"]),
    ({"strategy.delay": 20}, ["delay = 20", "at most 16"]),
    ({"strategy.outer_lr": float("nan")}, ["outer_lr = nan", "number above 0"]),
    ({"strategy.balanced": True}, ["strategy.balanced", "loop of your own"]),
    ({"strategy.name": "post_local_sgd"}, ["strategy.warmup_steps is missing", "warmup_steps = 100"]),
    ({"strategy.name": "hierarchical"}, ["strategy.levels is missing", "{4 = 2"]),
    ({"strategy.name": "hierarchical", "strategy.levels": 3}, ["strategy.levels = 3", "table"]),
    ({"strategy.name": "hierarchical", "strategy.levels": {"often": 2}}, ['"often"', "numbers of steps"]),
    ({"strategy.name": "ddp", "strategy.period": 3}, ["strategy.period", '"ddp" takes no keys']),
    ({"faults.policy": "srink"}, ['faults.policy = "srink"', "'raise_error', 'skip_round' or 'shrink'"]),
    ({"faults.grace": 3}, ["faults.grace", 'Did you mean "faults.grace_s"?', "Allowed: policy, min_workers"]),
    ({"faults.quorum": 1.5}, ["faults.quorum = 1.5", "less than 1", "share of the last round's workers"]),
    ({"faults.grace_s": 0.0}, ["faults.grace_s = 0.0", "greater than 0"]),
    ({"faults.restarts": -1}, ["faults.restarts = -1", "greater than or equal to 0"]),
    ({"faults.store": "here"}, ['faults.store = "here"', '"10.0.0.1:29400"']),
    ({"faults.store": "here:99999"}, ['faults.store = "here:99999"', "from 1 to 65535"]),
    ({"faults.policy": "shrink", "faults.explosion": 0.5}, ["explosion", "above 1", "0.5"]),
    ({"faults.policy": "shrink", "launch.max_restarts": 2}, ["launch.max_restarts = 2", "faults.restarts"]),
    ({"faults.policy": "shrink", "strategy.name": "ddp"}, ['faults.policy = "shrink"', 'strategy.name = "ddp"']),
    ({"faults.policy": "shrink", "strategy.name": "des_loc"}, ['faults.policy = "shrink"', "moments at periods"]),
    (
        {"faults.policy": "skip_round", "strategy.name": "hierarchical", "strategy.levels": {"4": 2, "16": "all"}},
        ['faults.policy = "skip_round"', "groups of fixed ranks"],
    ),
    ({"strategy.name": "sparse_loco", "strategy.codec": "int8"}, ["strategy.codec", '"sparse_loco" does not take']),
]


@pytest.mark.parametrize(("overrides", "said"), WRONG)
def test_an_error_names_the_key_what_was_given_and_what_is_allowed(overrides: dict[str, Any], said: list[str]) -> None:
    with pytest.raises(UsageError) as raised:
        read_config(None, overrides)
    text = str(raised.value)
    assert [part for part in said if part not in text] == []
    assert "\n" not in text
    assert ".." not in text


def test_an_error_in_a_file_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('steps = 10\n[strategy]\nname = "dilocco"\n')
    with pytest.raises(UsageError, match=r"In .*mine\.toml: strategy\.name") as raised:
        read_config(path)
    assert "diloco" in str(raised.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"steps = = 3", "is not TOML"), (b"\xff\xfe", "not a text file")],
)
def test_a_file_that_is_not_toml_is_said_to_be(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=said):
        read_config(path)


def test_a_file_that_is_not_there_is_said_to_be(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no configuration file .*gone\.toml"):
        read_config(tmp_path / "gone.toml")
    with pytest.raises(UsageError, match="is a folder"):
        read_config(tmp_path)


def strategy(name: str) -> dict[str, Any]:
    return {"strategy.name": name, **{f"strategy.{key}": value for key, value in NEEDED.get(name, {}).items()}}


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_complete_file_makes_the_same_configuration(tmp_path: Path, name: str) -> None:
    config = read_config(None, {**strategy(name), "steps": 7, "options": {"width": 64, "names": ["a", "b"]}})
    path = tmp_path / "complete.toml"
    path.write_text(config.to_toml())
    again = read_config(path)
    assert again.to_toml() == config.to_toml()
    assert again.strategy.build() == config.strategy.build()
    assert again.options == config.options


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_can_be_chosen_in_place_of_the_default_one(name: str) -> None:
    built = read_config(None, strategy(name)).strategy
    assert built.name == name
    assert built.build().levels


def test_another_strategy_has_its_own_values(tmp_path: Path) -> None:
    streaming = read_config(None, {"strategy.name": "streaming_diloco"})
    assert streaming.strategy.build() == cadenza.streaming_diloco()
    assert streaming.strategy.build().levels[0].codec.name == "e3m0"
    path = tmp_path / "mine.toml"
    path.write_text('[strategy]\nname = "diloco"\nperiod = 8\nouter_lr = 0.5\ncodec = "e3m0"\n')
    assert read_config(path, {"strategy.name": "diloco"}).strategy.arguments == {"period": 8, "outer_lr": 0.5}
    slowmo = read_config(path, {"strategy.name": "slowmo", "strategy.beta": 0.5}).strategy
    assert (slowmo.codec, slowmo.arguments) == ("", {"beta": 0.5})
    with pytest.raises(UsageError, match=r"strategy\.outer_lr"):
        read_config(path, {"strategy.name": "local_sgd", "strategy.outer_lr": 0.1})


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_key_of_a_printed_configuration_has_a_comment(tmp_path: Path, name: str) -> None:
    config = read_config(None, strategy(name))
    text = commented(config)
    path = tmp_path / "printed.toml"
    path.write_text(text)
    assert read_config(path).to_toml() == config.to_toml()
    lines = text.splitlines()
    inner = False  # inside a table that is the value of a key, such as strategy.levels
    for above, line in itertools.pairwise(["", *lines]):
        if line.startswith("["):
            inner = "." in line
        if line and not line.startswith("#") and not (inner and " = " in line):
            assert above.startswith("# "), line


def test_every_key_that_a_strategy_takes_is_explained() -> None:
    assert {key for name in STRATEGIES for key in keys_of(name)} - {"codec"} == KEYS.keys()


def test_a_strategy_in_a_file_has_its_own_defaults_and_not_the_default_runs(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('[strategy]\nname = "diloco"\n')
    assert read_config(path).strategy.build().period == 500


def test_changing_a_key_leaves_the_configuration_as_it_was() -> None:
    config = Config()
    changed = config.with_(**{"strategy.period": 32, "launch.workers": 2})
    assert (config.strategy.build().period, config.launch.workers) == (16, 4)
    assert (changed.strategy.build().period, changed.launch.workers) == (32, 2)


def test_a_period_may_change_over_time() -> None:
    built = read_config(None, {"strategy.period": {"1": 16, "1000": 64}}).strategy.build()
    assert built.levels[0].schedule == cadenza.changing({1: 16, 1000: 64})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"widht": 64}, ["options.widht", 'Did you mean "options.width"?', "Allowed: layers, width"]),
        ({"lr": "fast"}, ["options.lr", '"fast"', "number"]),
        ({"lr": -1.0}, ["options.lr = -1.0", "greater than 0"]),
        ({"heads": 3}, ["3 heads", "width 64"]),
    ],
)
def test_a_tasks_options_are_checked_alike(options: dict[str, Any], said: list[str]) -> None:
    with pytest.raises(UsageError) as raised:
        Config(options=options).options_as(Options)
    assert [part for part in said if part not in str(raised.value)] == []

"""From flags to a run's folder: settings, and a folder that nodes share."""

from __future__ import annotations

from pathlib import Path

import pytest

from cadenza.cli.running import make_run, title_of
from cadenza.cli.train import parse_settings
from cadenza.cli.train_options import overrides_of
from cadenza.errors import UsageError
from cadenza.training.config import read_config
from cadenza.training.runs import open_run


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("8", 8),
        ("0.5", 0.5),
        ("true", True),
        ('"a b"', "a b"),
        ("diloco", "diloco"),
        ("int8+feedback", "int8+feedback"),
        ("package.module:build", "package.module:build"),
        ("[1, 2]", [1, 2]),
        ('{4 = 2, 16 = "all"}', {"4": 2, "16": "all"}),
    ],
)
def test_settings_are_written_as_in_toml_and_words_without_quotes(text: str, value: object) -> None:
    assert parse_settings([f"some.key={text}"]) == {"some.key": value}


NODES = {"launch.nnodes": "2", "launch.rdzv_endpoint": "localhost:29400"}


def test_nodes_that_share_a_folder_share_a_run(tmp_path: Path) -> None:
    for node in range(2):
        run = make_run(tmp_path / "run", read_config(None, {**NODES, "launch.node_rank": node}))
    assert open_run(run.folder).config().launch.node_rank == 0


def test_nodes_with_other_settings_do_not_share_a_run(tmp_path: Path) -> None:
    make_run(tmp_path / "run", read_config(None, NODES))
    with pytest.raises(UsageError, match="another configuration"):
        make_run(tmp_path / "run", read_config(None, {**NODES, "steps": 7}))


def test_a_node_does_not_join_a_run_that_has_begun(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", read_config(None, NODES))
    run.metrics_of(0).write_text("{}\n")
    with pytest.raises(UsageError, match="go on with it by --resume"):
        make_run(tmp_path / "run", read_config(None, NODES))


def test_one_node_does_not_write_into_a_folder_of_another_run(tmp_path: Path) -> None:
    make_run(tmp_path / "run", read_config(None, {}))
    with pytest.raises(UsageError, match="is there already"):
        make_run(tmp_path / "run", read_config(None, {}))


def test_the_title_says_what_is_trained_where(tmp_path: Path) -> None:
    config = read_config(None, {**NODES, "strategy.codec": "bf16"})
    run = make_run(tmp_path / "run", config)
    assert title_of(run, config) == f"cadenza train diloco bf16 · 4 workers on each of 2 nodes · {tmp_path / 'run'}"


def test_loggers_are_named_by_a_flag() -> None:
    config = read_config(None, overrides_of({"log": "wandb,mlflow"}))
    assert (config.log.tensorboard, config.log.wandb, config.log.mlflow) == (False, True, True)
    assert read_config(None, overrides_of({"log": None})).log.tensorboard
    with pytest.raises(UsageError, match='there is no logger "comet"; there are tensorboard, wandb, mlflow'):
        overrides_of({"log": "wandb,comet"})


def test_levels_are_given_by_a_flag() -> None:
    given = overrides_of({"strategy": "hierarchical", "levels": "4=2, 16=host,64=all"})
    assert [level.groups for level in read_config(None, given).build_strategy().levels] == [2, "host", "all"]
    for wrong in ("4", "4=some", "x=2", "4=2,4=all", ""):
        with pytest.raises(UsageError, match="--levels is PERIOD=GROUPS"):
            overrides_of({"levels": wrong})


def test_one_worker_is_called_a_worker(tmp_path: Path) -> None:
    config = read_config(None, {"launch.workers": 1})
    assert " · 1 worker · " in title_of(make_run(tmp_path / "run", config), config)

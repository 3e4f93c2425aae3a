"""Recipes: every one can be trained, and the commands hand them out as they are."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from cadenza.cli.app import app
from cadenza.cli.recipes import Recipe, all_recipes
from cadenza.errors import UsageError
from cadenza.training.config import read_config
from cadenza.training.standard_library_gpt import Options


def names() -> list[str]:
    return [recipe.name for recipe in all_recipes()]


@pytest.mark.parametrize("recipe", all_recipes(), ids=lambda recipe: recipe.name)
def test_a_recipe_is_a_configuration_and_says_what_it_is(recipe: Recipe, tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(recipe.text)
    config = read_config(path)
    assert config.strategy.name == recipe.values["strategy.name"]
    if recipe.task is not None:
        assert config.options_as(Options).lr == recipe.values["options.lr"]
    lines = recipe.text.splitlines()
    assert all(line.startswith("# ") for line in lines[:2])  # what it is, where it comes from
    assert max(map(len, lines)) <= 120


def test_the_commands_list_show_and_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    runner = CliRunner()
    listed = runner.invoke(app, ["recipes", "list"]).output.splitlines()
    assert [line.split()[0] for line in listed] == names()
    shown = runner.invoke(app, ["recipes", "show", "gpt-diloco"]).output
    assert runner.invoke(app, ["recipes", "copy", "gpt-diloco"]).output == "gpt-diloco.toml\n"
    assert (tmp_path / "gpt-diloco.toml").read_text() == shown
    assert runner.invoke(app, ["recipes", "copy", "gpt-ddp", "mine.toml"]).exit_code == 0


def test_a_copy_does_not_write_over_a_file_unless_told(tmp_path: Path) -> None:
    runner, target = CliRunner(), tmp_path / "run.toml"
    target.write_text("mine")
    with pytest.raises(UsageError, match=r"is there already: give another FILE, or --force"):
        runner.invoke(app, ["recipes", "copy", "gpt-ddp", str(target)], catch_exceptions=False)
    assert target.read_text() == "mine"
    assert runner.invoke(app, ["recipes", "copy", "gpt-ddp", str(target), "--force"]).exit_code == 0
    assert "ddp" in target.read_text()


def test_what_cannot_be_done_is_told(tmp_path: Path) -> None:
    runner = CliRunner()
    with pytest.raises(UsageError, match=r'no recipe "gpt-dpd". Did you mean "gpt-ddp"'):
        runner.invoke(app, ["recipes", "show", "gpt-dpd"], catch_exceptions=False)
    with pytest.raises(UsageError, match="cannot be written"):
        runner.invoke(app, ["recipes", "copy", "gpt-ddp", str(tmp_path / "no" / "folder")], catch_exceptions=False)

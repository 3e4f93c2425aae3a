"""The files of the recipes, and which of them suits a task and a strategy."""

from __future__ import annotations

import difflib
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from cadenza.errors import UsageError

__all__ = ["Recipe", "all_recipes", "find_recipe", "recipe_for"]


@dataclass(frozen=True)
class Recipe:
    """A configuration that comes with Cadenza.

    >>> find_recipe("gpt-ddp").values["strategy.name"]
    'ddp'
    """

    name: str
    text: str

    @property
    def summary(self) -> str:
        """What it is, in a line."""
        return self.text.partition("\n")[0].removeprefix("# ")

    @property
    def task(self) -> str | None:
        """The task that it was tuned on; None: it is a strategy's values from its paper, for any task."""
        task: str | None = self.values.get("task")
        return task

    @property
    def values(self) -> dict[str, Any]:
        """Its values, by dotted keys."""
        found: dict[str, Any] = {}
        for key, value in tomllib.loads(self.text).items():
            inside = value.items() if isinstance(value, dict) else ()
            found |= {f"{key}.{name}": one for name, one in inside} or {key: value}
        return found


@cache
def all_recipes() -> tuple[Recipe, ...]:
    """Return every recipe, by name.

    >>> "gpt-diloco" in [recipe.name for recipe in all_recipes()]
    True
    """
    files = [file for file in resources.files("cadenza.cli.recipes").iterdir() if file.name.endswith(".toml")]
    files.sort(key=lambda file: file.name)
    return tuple(Recipe(file.name.removesuffix(".toml"), file.read_text(encoding="utf-8")) for file in files)


def find_recipe(name: str) -> Recipe:
    """Return the recipe of a name.

    >>> find_recipe("gpt-dilocco")
    Traceback (most recent call last):
      ...
    cadenza.errors.UsageError: There is no recipe "gpt-dilocco". Did you mean "gpt-diloco"? `cadenza recipes list` \
names them all.
    """
    names = [recipe.name for recipe in all_recipes()]
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        hint = f' Did you mean "{near[0]}"?' if near else ""
        raise UsageError(f'There is no recipe "{name}".{hint} `cadenza recipes list` names them all.')
    return all_recipes()[names.index(name)]


def recipe_for(task: str, strategy: str) -> Recipe | None:
    """Return the recipe that was tuned for a strategy on a task, if there is one.

    >>> recipe_for("cadenza.training.standard_library_gpt:build", "ddp").name
    'gpt-ddp'
    >>> recipe_for("mypackage.task:build", "ddp")
    """
    tuned = (recipe for recipe in all_recipes() if recipe.task == task)
    return next((recipe for recipe in tuned if recipe.values.get("strategy.name") == strategy), None)

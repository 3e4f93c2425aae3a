"""`cadenza recipes list`, `show` and `copy`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cadenza.cli.recipes.files import all_recipes, find_recipe
from cadenza.errors import UsageError

__all__ = ["recipes"]

recipes = typer.Typer(
    name="recipes",
    help="Configurations that come with Cadenza, for `cadenza train --config`: list, show and copy them.",
    no_args_is_help=True,
)

_Name = Annotated[str, typer.Argument(metavar="NAME", help="The recipe's name.", show_default=False)]


@recipes.command("list")
def list_recipes() -> None:
    """Name all recipes, with a line about each."""
    width = max(len(recipe.name) for recipe in all_recipes())
    for recipe in all_recipes():
        print(f"{recipe.name:{width}}  {recipe.summary}")


@recipes.command("show")
def show_recipe(name: _Name) -> None:
    """Print a recipe, with where its values come from."""
    print(find_recipe(name).text, end="")


@recipes.command("copy")
def copy_recipe(
    name: _Name,
    file: Annotated[
        Path | None,
        typer.Argument(metavar="FILE", help="Where to; NAME.toml in this folder if not told.", show_default=False),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Write over a file that is there.")] = False,
) -> None:
    """Write a recipe to a file, to be edited and given to `cadenza train --config`."""
    recipe = find_recipe(name)
    target = file or Path(f"{name}.toml")
    try:
        with target.open("w" if force else "x", encoding="utf-8") as opened:
            opened.write(recipe.text)
    except FileExistsError:
        raise UsageError(f"{target} is there already: give another FILE, or --force to write over it.") from None
    except OSError as error:
        raise UsageError(f"The recipe cannot be written to {target}: {error.strerror or error}.") from error
    print(target)

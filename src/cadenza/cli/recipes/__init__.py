"""Recipes: configurations that come with Cadenza, as TOML files, and the commands that hand them out.

A recipe is a file for `cadenza train --config`. Its first comment line says what it is, the others where its values
come from.
"""

from cadenza.cli.recipes.command import recipes
from cadenza.cli.recipes.files import Recipe, all_recipes, recipe_for

__all__ = ["Recipe", "all_recipes", "recipe_for", "recipes"]

"""The house keeps its measure: files of one idea, functions that fit a screen."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import cadenza

SOURCES = Path(cadenza.__file__).parent
MOST_LINES_OF_A_FILE = 400
MOST_LINES_OF_A_FUNCTION = 60


def functions(path: Path) -> Iterator[tuple[str, int]]:
    """Each function of a file, and its lines without the docstring."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0]
            told = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
            docstring = (first.end_lineno or 0) - first.lineno + 1 if told else 0
            yield node.name, (node.end_lineno or 0) - node.lineno + 1 - docstring


@pytest.mark.parametrize("path", sorted(SOURCES.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCES)))
def test_a_file_holds_one_idea_and_its_functions_fit_a_screen(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MOST_LINES_OF_A_FILE
    long = {name: lines for name, lines in functions(path) if lines > MOST_LINES_OF_A_FUNCTION}
    assert not long

"""The messages that the library raises, found in its sources, for the page that explains them."""

from __future__ import annotations

import ast
import functools
import re
from collections import defaultdict

from docs_tools.keywords import keyword_page_of, module_of, source_files

__all__ = ["messages", "raised"]


@functools.cache
def raised() -> dict[str, list[tuple[str, str]]]:
    """Return the texts with which each error is made, and the modules that do, by its name; `…` stands for values."""
    found: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for path in source_files():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args:
                text = _text(node.args[0])
                if node.func.id.endswith("Error") and len(re.findall(r"\w+", text)) > 3:
                    found[node.func.id].append((text, module_of(path)))
    return dict(found)


def _text(node: ast.expr) -> str:
    """Return the text of an expression as far as it is written there.

    >>> _text(ast.parse('f"period is {period!r}" + more', mode="eval").body)
    'period is ……'
    """
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left) + _text(node.right)
    return "…"


def messages(error: str) -> str:
    """Return a table of an error's messages, each with the file that raises it."""
    rows = [
        f"| {_cell(text)} | [{module.removeprefix('cadenza.')}](../docs/{keyword_page_of(module)}) |"
        for text, module in dict.fromkeys(raised().get(error, []))
    ]
    table = "| message (… stands for a value) | raised by |\n| --- | --- |\n" + "\n".join(rows)
    return table.replace("../docs/", "") if rows else ""


def _cell(text: str) -> str:
    return "`` " + text.replace("|", "∣").replace("\n", " ") + " ``"

"""A page for each source file: its identifiers, and where in the documentation each of them stands."""

from __future__ import annotations

import ast
import functools
import re
from dataclasses import dataclass
from html import escape
from pathlib import Path

from docs_tools.mentions import mentions_of
from docs_tools.rooms import SOURCES, public_names, room_of

__all__ = ["Identifier", "identifiers_of", "keyword_page_of", "keyword_pages", "source_files"]

FOLDER = "reference/files"


@dataclass(frozen=True)
class Identifier:
    """A name that a source file defines: a class, a function, a method, a field or a constant."""

    name: str
    kind: str
    line: int
    told: str


def source_files() -> list[Path]:
    """Return the library's Python files, without those that hold nothing."""
    return sorted(path for path in SOURCES.rglob("*.py") if path.read_text().strip())


def module_of(path: Path) -> str:
    """Return the module that a source file is.

    >>> module_of(SOURCES / "codecs" / "__init__.py")
    'cadenza.codecs'
    """
    parts = path.relative_to(SOURCES.parent).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def keyword_page_of(module: str) -> str:
    """Return the path of a module's keyword page.

    >>> keyword_page_of("cadenza.codecs.base")
    'reference/files/cadenza.codecs.base.md'
    """
    return f"{FOLDER}/{module}.md"


def identifiers_of(path: Path) -> list[Identifier]:
    """Return the identifiers of a source file that are not private, in the order of the file."""
    found: list[Identifier] = []
    for node in ast.parse(path.read_text()).body:
        found.extend(_defined_by(node, ""))
    return found


def _defined_by(node: ast.stmt, inside: str) -> list[Identifier]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        if node.name.startswith("_"):
            return []
        told = (ast.get_docstring(node) or "").partition("\n")[0]
        if not isinstance(node, ast.ClassDef):
            return [Identifier(inside + node.name, "method" if inside else "function", node.lineno, told)]
        own = [Identifier(inside + node.name, "class", node.lineno, told)]
        return own + [below for child in node.body for below in _defined_by(child, f"{inside}{node.name}.")]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    names = [target.id for target in targets if isinstance(target, ast.Name) and not target.id.startswith("_")]
    return [Identifier(inside + name, "field" if inside else "constant", node.lineno, "") for name in names]


@functools.cache
def keyword_pages() -> dict[str, str]:
    """Return every keyword page by its path below docs."""
    return {keyword_page_of(module_of(path)): _page(path) for path in source_files()}


def _page(path: Path) -> str:
    module = module_of(path)
    room = room_of(module)
    about = (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0].replace("*", r"\*")
    where = f"Room: [{room.title}](../../{room.page}). " if room else ""
    head = f"---\nkind: keywords\n---\n# {path.relative_to(SOURCES.parent)}\n\n{about}\n\n{where}Module `{module}`.\n\n"
    rows = [_row(module, one) for one in identifiers_of(path)]
    if not rows:
        return head + "It defines no name of its own that is not private.\n"
    top = "<thead><tr><th>identifier</th><th>what</th><th>line</th><th>in the documentation</th></tr></thead>"
    return f"{head}<table>{top}<tbody>{''.join(rows)}</tbody></table>\n"


def _row(module: str, one: Identifier) -> str:
    links = []
    top = one.name.partition(".")[0]
    if page := _reference().get(f"{module}.{top}"):
        links.append(_link(f"../../{page}", f"{module}.{top}", "reference"))
    links += [_link(f"../../{page}", None, title) for page, title in mentions_of(one.name.rpartition(".")[2])]
    told = " " + re.sub(r"`+([^`]+)`+", r"<code>\1</code>", escape(one.told)) if one.told else ""
    return (
        f'<tr><td><code id="{escape(one.name)}">{escape(one.name)}</code></td><td>{one.kind}.{told}</td>'
        f"<td>{one.line}</td><td>{', '.join(links) or '–'}</td></tr>"
    )


@functools.cache
def _reference() -> dict[str, str]:
    return {name.path: name.page for name in public_names()}


def _link(page: str, anchor: str | None, text: str) -> str:
    address = page.replace(".md", ".html") + (f"#{anchor}" if anchor else "")
    return f'<a href="{address}">{escape(text)}</a>'

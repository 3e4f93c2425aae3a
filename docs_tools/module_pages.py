"""The generated half of a module's page: names, dependencies, usage, tests and files."""

from __future__ import annotations

import functools
import re
from pathlib import Path

from docs_tools.dependencies import draw, importers_of, imports_of
from docs_tools.keywords import keyword_page_of, module_of, source_files
from docs_tools.mentions import mentions_of
from docs_tools.rooms import ROOT, Room, first_line, modules, public_names, room_of

__all__ = ["rest_of", "tests_of"]


def rest_of(room: Room) -> str:
    """Return what follows the hand-written half of a room's page."""
    parts = [_names(room), _dependencies(room), _usage(room), _tests(room), _files(room)]
    return "\n\n" + "\n\n".join(part for part in parts if part) + "\n"


def _names(room: Room) -> str:
    own = [name for name in public_names() if name.page == room.page]
    if not own:
        return ""
    blocks = [f"### ::: {name.path}" for name in own]
    return "## Classes and functions\n\n" + "\n\n".join(blocks)


def _dependencies(room: Room) -> str:
    def links(others: list[Room]) -> str:
        return ", ".join(f"[{one.title.partition(':')[0]}]({Path(one.page).name})" for one in others) or "none"

    return (
        f"## Dependencies\n\n{draw(room)}\n\nImports from: {links(imports_of(room))}. "
        f"Imported by: {links(importers_of(room))}."
    )


def _usage(room: Room) -> str:
    pages: dict[str, tuple[str, set[str]]] = {}
    for name in public_names():
        if name.page == room.page:
            for page, title in mentions_of(name.name, at_most=8):
                if not page.startswith("modules/"):
                    pages.setdefault(page, (title, set()))[1].add(name.name)
    most = sorted(pages.items(), key=lambda one: -len(one[1][1]))[:8]
    lines = [
        f"- [{title}](../{page}): {', '.join(f'`{one}`' for one in sorted(names)[:8])}" for page, (title, names) in most
    ]
    return "## Usage\n\n" + "\n".join(lines) if lines else ""


@functools.cache
def _test_texts() -> dict[str, str]:
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in sorted((ROOT / "tests").rglob("test_*.py"))}


def tests_of(room: Room) -> list[str]:
    """Return the test files of a room: those in a folder of its name, and those that import from it."""
    names = {module.rpartition(".")[2] for module in room.modules}
    imports = re.compile(rf"(?:from|import) (?:{'|'.join(re.escape(module) for module in room.modules)})\b")
    found = []
    for path, text in _test_texts().items():
        parts = Path(path).with_suffix("").parts
        named = any(part == name or part == f"test_{name}" for part in parts for name in names)
        if named or imports.search(text):
            found.append(path)
    return found


def _tests(room: Room) -> str:
    found = tests_of(room)
    lines = [f"- `{path}`" for path in found]
    examples = "Every example above is run as a doctest as well."
    return f"## Where it is tested\n\n{examples}\n\n" + "\n".join(lines) if lines else ""


def _files(room: Room) -> str:
    rows = []
    for path in source_files():
        module = module_of(path)
        if room_of(module) == room and module in modules():
            link = f"[`{path.relative_to(ROOT / 'src').as_posix()}`](../{keyword_page_of(module)})"
            rows.append(f"| {link} | {first_line(modules()[module]).replace('|', chr(92) + '|')} |")
    return "## Files\n\n| file, with its identifiers | what it holds |\n| --- | --- |\n" + "\n".join(rows)

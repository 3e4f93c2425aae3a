"""Which room imports which, from the import statements themselves, and a drawing of it."""

from __future__ import annotations

import functools
import html

from grimp import build_graph

from docs_tools.rooms import Room, room_of, rooms

__all__ = ["draw", "importers_of", "imports_of"]

_WIDTH, _HEIGHT, _GAP = 170, 28, 8


@functools.cache
def _pairs() -> frozenset[tuple[str, str]]:
    """Return (importer, imported) as pages of rooms."""
    graph = build_graph("cadenza", exclude_type_checking_imports=True, cache_dir=None)
    found = set()
    for module in graph.modules:
        own = room_of(module)
        for imported in graph.find_modules_directly_imported_by(module):
            other = room_of(imported)
            if own and other and own != other:
                found.add((own.page, other.page))
    return frozenset(found)


def imports_of(room: Room) -> list[Room]:
    """Return the rooms that a room imports from."""
    return [other for other in rooms() if (room.page, other.page) in _pairs()]


def importers_of(room: Room) -> list[Room]:
    """Return the rooms that import from a room."""
    return [other for other in rooms() if (other.page, room.page) in _pairs()]


def draw(room: Room) -> str:
    """Return a drawing in three columns: those that import the room, the room, and those that it imports."""
    left, right = importers_of(room), imports_of(room)
    rows = max(len(left), len(right), 1)
    height = rows * (_HEIGHT + _GAP) + _GAP
    middle = height / 2
    parts = []
    for column, others in ((0, left), (2, right)):
        top = middle - (len(others) * (_HEIGHT + _GAP) - _GAP) / 2
        for number, other in enumerate(others):
            y = top + number * (_HEIGHT + _GAP)
            parts.append(
                _box(column * 250, y, other.title, other.page.removeprefix("modules/").replace(".md", ".html"))
            )
            ends = (_WIDTH, 250) if column == 0 else (420, 500)
            one, two = (y + _HEIGHT / 2, middle) if column == 0 else (middle, y + _HEIGHT / 2)
            bend = sum(ends) / 2
            parts.append(f'<path d="M{ends[0]} {one:g}C{bend:g} {one:g} {bend:g} {two:g} {ends[1]} {two:g}"/>')
    parts.append(f'<g class="self">{_box(250, middle - _HEIGHT / 2, room.title, None)}</g>')
    told = f"{room.title} is imported by {_list(left)}, and imports {_list(right)}."
    # Not an image to a screen reader: its boxes are links.
    return (
        f'<svg class="imports" viewBox="-1 -1 672 {height + 2:g}" aria-label="{html.escape(told)}" role="group">'
        f"{''.join(parts)}</svg>"
    )


def _box(x: float, y: float, title: str, link: str | None) -> str:
    text = f'<text x="{x + _WIDTH / 2:g}" y="{y + 19:g}" text-anchor="middle">{html.escape(_short(title))}</text>'
    shape = f'<rect x="{x:g}" y="{y:g}" width="{_WIDTH}" height="{_HEIGHT}" rx="7"/>'
    return shape + (f'<a href="{link}">{text}</a>' if link else text)


def _short(title: str) -> str:
    return title.partition(":")[0]


def _list(found: list[Room]) -> str:
    return ", ".join(_short(room.title) for room in found) or "nothing"

"""The rooms of the library: each has a page in `docs/modules`, whose first lines name its modules."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import griffe
import yaml

__all__ = [
    "DOCS",
    "ROOT",
    "SOURCES",
    "PublicName",
    "Room",
    "first_line",
    "modules",
    "parameters_of",
    "public_names",
    "room_of",
    "rooms",
]

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
SOURCES = ROOT / "src" / "cadenza"


@dataclass(frozen=True)
class Room:
    """One page of `docs/modules`: its title, the modules that it is about, and those whose names are for users."""

    page: str
    title: str
    modules: tuple[str, ...]
    public: tuple[str, ...]

    def holds(self, module: str) -> bool:
        return any(module == own or module.startswith(f"{own}.") for own in self.modules)


@dataclass(frozen=True)
class PublicName:
    """A name that users may import: where from, what its page is, and what it is."""

    name: str
    exported: str
    page: str
    value: griffe.Object

    @property
    def path(self) -> str:
        """Where it is defined, which is its anchor on the page."""
        return self.value.path

    @property
    def kind(self) -> str:
        if self.value.is_class:
            return "error" if self.path.startswith("cadenza.errors.") else "class"
        return "function" if self.value.is_function else "type"

    def parameters(self) -> list[str]:
        """The names of what it takes."""
        return parameters_of(self.value)

    def methods(self) -> dict[str, griffe.Object]:
        """What a class defines itself for its users: methods and properties."""
        if not isinstance(self.value, griffe.Class):
            return {}
        return {
            name: one
            for name, one in self.value.members.items()
            if isinstance(one, griffe.Object)
            and not name.startswith("_")
            and (one.is_function or "property" in one.labels)
        }


@functools.cache
def rooms() -> tuple[Room, ...]:
    """Return all rooms, in the order of their pages."""
    found = []
    for page in sorted((DOCS / "modules").glob("*.md")):
        text = page.read_text()
        if not text.startswith("---\n"):
            raise ValueError(f"{page.name} does not begin with the modules that it is about: ---, modules: […], ---.")
        head = yaml.safe_load(text.split("---\n")[1])
        title = text.split("\n# ", 1)[1].splitlines()[0]
        own = tuple(head["modules"])
        found.append(Room(f"modules/{page.name}", title, own, tuple(head.get("public", own))))
    return tuple(found)


@functools.cache
def modules() -> dict[str, griffe.Module]:
    """Return every module of the library by its name, read and not imported: frameworks take long."""
    top = griffe.load("cadenza", search_paths=[str(SOURCES.parent)], resolve_aliases=True)
    found: dict[str, griffe.Module] = {}

    def collect(module: griffe.Module) -> None:
        found[module.path] = module
        for below in module.modules.values():
            if isinstance(below, griffe.Module):
                collect(below)

    if isinstance(top, griffe.Module):
        collect(top)
    return found


def room_of(module: str) -> Room | None:
    """Return the room that a module is in; of several the one that names it most exactly."""
    fitting = [(len(own), room) for room in rooms() for own in room.modules if Room("", "", (own,), ()).holds(module)]
    return max(fitting, key=lambda pair: pair[0])[1] if fitting else None


@functools.cache
def public_names() -> tuple[PublicName, ...]:
    """Return every name that users may import, once, from where it is exported, in the order of the pages."""
    found: dict[str, PublicName] = {}
    for room in rooms():
        for module in room.public:
            for export in modules()[module].exports or ():
                name = str(getattr(export, "name", export))
                one = PublicName(name, f"{module}.{name}", room.page, _defined(module, name))
                found.setdefault(one.path, one)
    return tuple(found.values())


def _defined(module: str, name: str) -> griffe.Object:
    """Return what a module exports under a name, from where it is defined."""
    found = modules()[module].members.get(name)
    if found is None:  # made by the module's __getattr__, when it is first asked for
        [found] = [
            below.members[name]
            for below in modules().values()
            if below.path.startswith(module) and name in below.members
        ]
    if isinstance(found, griffe.Module):  # a file that is named as what it holds
        found = found.members[name]
    return found.final_target if isinstance(found, griffe.Alias) else found


def parameters_of(value: griffe.Object) -> list[str]:
    """Return the names of what a function or a class takes, without those that stand for all others."""
    if not isinstance(value, griffe.Function | griffe.Class):
        return []
    rest = (griffe.ParameterKind.var_positional, griffe.ParameterKind.var_keyword)
    return [one.name for one in value.parameters if one.kind not in rest and one.name not in ("self", "cls")]


def first_line(thing: griffe.Object) -> str:
    """Return the first line of a docstring, or nothing."""
    return thing.docstring.value.strip().partition("\n")[0] if thing.docstring else ""

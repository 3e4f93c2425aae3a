"""What two ranks, or a run and its checkpoint, must have in common: one line for each field of every piece.

The lines are derived from the fields, so a field that is added to a piece is compared without anybody's doing. A field
that each worker may choose for itself says so, and why, in its metadata:

>>> from dataclasses import dataclass, field
>>> @dataclass(frozen=True)
... class Meeting:
...     period: int
...     name: str = field(default="", metadata={"local": "names are for reports"})
>>> identity(Meeting(16, name="daily"), "meeting")[1:]
['meeting.period: 16']

A field that was added when there were saved states already says `{"added": why}`: it is told only where it is not what
it is by default. A function is compared by its name and, where the field's metadata says `{"probe": (…)}`, by what it
gives for these arguments.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Iterator, Mapping, Set
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

from cadenza.common.later import torch

__all__ = ["identity"]

_PLAIN = (type(None), bool, int, float, complex, str, bytes)


def identity(piece: object, name: str = "strategy") -> list[str]:
    """Return the lines that are equal for two pieces exactly if they do the same.

    >>> from cadenza.schedules import every
    >>> identity(every(16), "schedule")
    ['schedule: cadenza.schedules.every.Every', 'schedule.period: 16', 'schedule.offset: 0']
    """
    return list(_Walk().lines(name, piece, {}))


class _Walk:
    """One way through a piece and all that it holds; an object that holds itself is told once."""

    def __init__(self) -> None:
        self._above: list[object] = []

    def lines(self, name: str, value: object, metadata: Mapping[Any, Any]) -> Iterator[str]:
        if (text := _plain(value)) is not None:
            yield f"{name}: {text}"
        elif any(value is holder for holder in self._above):
            yield f"{name}: itself"
        else:
            self._above.append(value)
            yield from self._held(name, value)
            if callable(value) and not is_dataclass(value):
                yield from _probed(name, value, metadata.get("probe", ()))
            self._above.pop()

    def _held(self, name: str, value: object) -> Iterator[str]:
        """Tell a piece by its type and by what it holds."""
        if isinstance(value, Mapping):
            yield f"{name}: {len(value)} entries"
            yield from self._all(name, {repr(key): value[key] for key in sorted(value, key=repr)})
        elif isinstance(value, list | tuple) and not hasattr(value, "_fields"):
            yield f"{name}: {len(value)} items"
            yield from self._all(name, dict(enumerate(value)))
        elif inspect.isroutine(value):
            yield f"{name}: {value.__qualname__}"
        else:
            yield f"{name}: {_type_name(type(value))}"
            for key, (held, metadata) in _attributes(value).items():
                yield from self.lines(f"{name}.{key}", held, metadata)

    def _all(self, name: str, items: Mapping[Any, object]) -> Iterator[str]:
        for key, item in items.items():
            yield from self.lines(f"{name}[{key}]", item, {})


def _plain(value: object) -> str | None:
    """Return a value that is one line as text, or None."""
    if isinstance(value, Enum):
        return f"{type(value).__qualname__}.{value.name}"
    if isinstance(value, type):
        return _type_name(value)
    if isinstance(value, torch.Tensor):
        digest = hashlib.blake2b(repr(value.tolist()).encode(), digest_size=8).hexdigest()
        return f"{value.dtype} of shape {tuple(value.shape)} with digest {digest}"
    if isinstance(value, Set):
        parts = sorted(_plain(item) or repr(item) for item in value)
        return f"{{{', '.join(parts)}}}"
    return repr(value) if _is_plain(value) else None


def _is_plain(value: object) -> bool:
    """Say whether `repr` tells all of a value; so it does of groups of ranks, which may be many."""
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return all(_is_plain(item) for item in value)
    kinds = (*_PLAIN, torch.dtype, torch.device, torch.Size)
    return isinstance(value, kinds) and not isinstance(value, Enum)


def _attributes(value: object) -> dict[str, tuple[object, Mapping[Any, Any]]]:
    """Return what an object holds, by name, with the metadata of the fields that have some."""
    if is_dataclass(value):
        told = {f.name: (getattr(value, f.name), f.metadata) for f in fields(value) if "local" not in f.metadata}
        new = {f.name: f.default for f in fields(value) if "added" in f.metadata}
        return {name: held for name, held in told.items() if name not in new or held[0] != new[name]}
    if isinstance(value, functools.partial):
        held: dict[str, object] = {"func": value.func, "args": value.args, "keywords": value.keywords}
    else:
        names = [name for kind in type(value).__mro__ for name in _slots(kind)]
        held = {name: getattr(value, name) for name in names if hasattr(value, name)} | getattr(value, "__dict__", {})
    return {name: (item, {}) for name, item in sorted(held.items())}


def _slots(kind: type) -> tuple[str, ...]:
    slots = kind.__dict__.get("__slots__", ())
    return tuple(name for name in ((slots,) if isinstance(slots, str) else slots) if not name.startswith("__"))


def _probed(name: str, function: Any, arguments: tuple[object, ...]) -> Iterator[str]:
    for argument in arguments:
        try:
            text = repr(function(argument))
        except Exception:  # a function need not be defined where the run never comes to
            text = "undefined"
        yield f"{name}({argument!r}): {text}"


def _type_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"

"""Checks that a piece, ours or a user's own, has all members of its protocol."""

from __future__ import annotations

from typing import Protocol

__all__ = ["check_piece", "missing_members"]


def missing_members(value: object, protocol: type) -> list[str]:
    """Return the public members of a protocol that a value lacks, in the protocol's order.

    >>> class Sized(Protocol):
    ...     name: str
    ...     def size(self) -> int: ...
    >>> missing_members(object(), Sized)
    ['name', 'size']
    """
    kinds = [
        kind for kind in reversed(protocol.__mro__) if getattr(kind, "_is_protocol", False) and kind is not Protocol
    ]
    names = [name for kind in kinds for name in (*vars(kind).get("__annotations__", {}), *vars(kind))]
    return [name for name in dict.fromkeys(names) if not name.startswith("_") and not hasattr(value, name)]


def check_piece(value: object, protocol: type, *, what: str, such_as: str) -> None:
    """Refuse what cannot be a piece of a protocol, and name what it lacks.

    >>> from cadenza.fragments import Fragmentation
    >>> check_piece(3, Fragmentation, what="fragments", such_as="cadenza.whole()")
    Traceback (most recent call last):
    TypeError: fragments=3 will not do: int lacks single and split: see cadenza.fragments.Fragmentation, or use one \
such as cadenza.whole().
    """
    where = f"{protocol.__module__.rsplit('.', 1)[0]}.{protocol.__name__}"
    if isinstance(value, type):
        raise TypeError(f"{what}={value!r} is a class: give an instance of it, such as {such_as}; see {where}.")
    if not (missing := missing_members(value, protocol)):
        return
    if callable(value) and hasattr(value, "__qualname__"):
        raise TypeError(f"{what}={value.__qualname__} is a function: call it, as in {such_as}; see {where}.")
    lacks = f"{type(value).__name__} lacks {_listed(missing)}"
    raise TypeError(f"{what}={value!r} will not do: {lacks}: see {where}, or use one such as {such_as}.")


def _listed(names: list[str]) -> str:
    return " and ".join(([", ".join(names[:-1])] if len(names) > 1 else []) + names[-1:])

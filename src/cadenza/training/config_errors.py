"""What is wrong with a table of a configuration, in words: the key, what was given, what is allowed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tomli_w
from pydantic import BaseModel
from pydantic_core import ErrorDetails

from cadenza.errors import CadenzaError
from cadenza.training.strategies import nearest

__all__ = ["explain"]


def explain(kind: type[BaseModel], error: ErrorDetails, prefix: str = "") -> str:
    """Return what pydantic found, as a sentence.

    Args:
        kind: The settings that a table was checked against.
        error: What pydantic says.
        prefix: The keys of the tables around this one, such as "options.".

    >>> from pydantic import ValidationError
    >>> class Options(BaseModel):
    ...     width: int
    >>> try:
    ...     Options.model_validate({"width": "wide"})
    ... except ValidationError as error:
    ...     print(explain(Options, error.errors()[0]))
    width = "wide": input should be a valid integer, unable to parse string as an integer.
    """
    *tables, last = [str(part) for part in error["loc"]] or [""]
    prefix += "".join(f"{table}." for table in tables)
    known = _fields_at(kind, tables)
    if error["type"] == "extra_forbidden":
        hint = nearest(last, list(known)).replace('"', f'"{prefix}', 1)
        return f"{prefix}{last}: there is no such key.{hint} Allowed: {', '.join(known)}."
    if error["type"] == "missing":
        return f"{prefix}{last} is missing{_meaning(known.get(last))}"
    cause = error.get("ctx", {}).get("error")
    if isinstance(cause, CadenzaError):  # which has named the key itself
        return str(cause)
    message = error["msg"].removeprefix("Value error, ").removesuffix(".")
    return f"{prefix}{last} = {_toml(error['input'])}: {message[:1].lower()}{message[1:]}{_meaning(known.get(last))}"


def _meaning(description: str | None) -> str:
    return f" ({description.rstrip('.')})." if description else "."


def _fields_at(kind: type[BaseModel], tables: list[str]) -> dict[str, str]:
    """Return the keys of a table inside the tables, and what they mean."""
    for table in tables:
        field = kind.model_fields.get(table)
        if field is None or not (isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)):
            return {}
        kind = field.annotation
    return {name: field.description or "" for name, field in kind.model_fields.items()}


def _toml(value: Any) -> str:
    """Return a value as it stands in a TOML file."""
    try:
        return tomli_w.dumps({"x": value}).removeprefix("x = ").strip() if not isinstance(value, Mapping) else "a table"
    except TypeError:
        return repr(value)

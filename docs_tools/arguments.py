"""What docstrings say of arguments."""

from __future__ import annotations

import inspect
import re

__all__ = ["told"]

_ENTRY = re.compile(r"^ {4}(\w+)(?: \([^)]*\))?: (.+(?:\n {6,}.+)*)", re.MULTILINE)


def told(thing: object) -> dict[str, str]:
    """Return what a docstring says of each argument or attribute.

    >>> from cadenza.reports import RoundReport
    >>> told(RoundReport)["level_name"]
    "That level's name."
    """
    text = inspect.getdoc(thing) or ""
    return {name: re.sub(r"\s+", " ", words).strip() for name, words in _ENTRY.findall(text)}

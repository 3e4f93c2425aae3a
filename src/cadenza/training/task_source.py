"""What a task's source tells before it is imported: a misspelt name is answered at once, without waiting for torch.

>>> refuse_misspelt("cadenza.training.standard_library_gpt", "biuld")
Traceback (most recent call last):
  ...
cadenza.errors.UsageError: The task "cadenza.training.standard_library_gpt:biuld": its module has no "biuld"; did you \
mean "build"?
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

from cadenza.errors import UsageError

__all__ = ["has_no", "refuse_misspelt"]

# A module in which one of these stands may have names that are not written in it.
_MADE_LATER = re.compile(r"import \*|__getattr__|\b(globals|locals|vars|setattr|exec|eval)\(|__dict__")
_DEFINED = re.compile(r"^(?:async\s+)?(?:def|class)\s+(\w+)|^(\w+)\s*[:=]", re.MULTILINE)


def refuse_misspelt(module: str, function: str) -> None:
    """Raise if there is no such module, or if its source shows that it has no such function; importing tells the rest.

    The packages around the module are imported.

    Raises:
        ModuleNotFoundError: There is no such module.
        UsageError: It has no such function.
    """
    try:
        spec = find_spec(module)
    except ValueError:  # a module without a source, such as __main__
        return
    if spec is None:
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)
    try:
        source = Path(spec.origin or "").read_text(encoding="utf-8") if spec.has_location else ""
    except (OSError, UnicodeDecodeError):
        return
    if source and not re.search(rf"\b{re.escape(function)}\b", source) and not _MADE_LATER.search(source):
        raise UsageError(has_no(module, function, [a or b for a, b in _DEFINED.findall(source)]))


def has_no(module: str, function: str, names: Iterable[str]) -> str:
    """Return that a module has no such function, and which of its names may have been meant."""
    near = difflib.get_close_matches(function, list(names), n=1)
    hint = f'; did you mean "{near[0]}"?' if near else "."
    return f'The task "{module}:{function}": its module has no "{function}"{hint}'

"""A configuration as a file to begin with: every key with what it means above it.

The words are those of the settings' own fields and docstrings, and of the strategies' keys.

>>> from cadenza.training.config import Config
>>> for line in commented(Config()).splitlines()[:4]:
...     print(line)
# What is trained: "package.module:function", which returns a Task.
task = "cadenza.training.standard_library_gpt:build"
# Optimizer steps of each worker.
steps = 2000
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

from pydantic import BaseModel

from cadenza.training.config import Config
from cadenza.training.strategies import KEYS

__all__ = ["commented", "meanings"]

_KEY = re.compile(r"([\w-]+) = ")
_TABLE = re.compile(r"\[([\w.-]+)\]$")


def commented(config: Config) -> str:
    """Return the complete configuration as TOML, each key below a comment on it."""
    known = meanings(Config) | {f"strategy.{key}": text for key, text in KEYS.items()}
    known["strategy.codec"] = known["strategy.codec"].replace("as the preset does", _own_codec(config))
    lines, table = [], ""
    for line in config.to_toml().splitlines():
        if header := _TABLE.match(line):
            table = f"{header[1]}."
        key = _KEY.match(line)
        meaning = known.get(f"{table}{key[1]}" if key else table.removesuffix(".") if header else "", "")
        lines += [f"# {meaning}"] if meaning else []
        lines.append(line)
    return "\n".join(lines) + "\n"


def meanings(kind: type[BaseModel], prefix: str = "") -> dict[str, str]:
    """Return what each key of a table of settings means, by its dotted name; a table is what its docstring says.

    >>> from cadenza.training.config import Config
    >>> meanings(Config)["launch.workers"]
    'Workers on each node (torchrun: --nproc-per-node).'
    """
    return dict(_meanings(kind, prefix))


def _meanings(kind: type[BaseModel], prefix: str) -> Iterator[tuple[str, str]]:
    for name, field in kind.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield f"{prefix}{name}", (inspect.getdoc(inner) or "").partition("\n")[0]
            yield from _meanings(inner, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field.description or ""


def _own_codec(config: Config) -> str:
    """Say what a strategy does if no codec is given."""
    if config.strategy.codec or config.strategy.name == "ddp":
        return "as the strategy does"
    return f"as the strategy does, here {config.strategy.build().levels[-1].codec.name}"

"""The reference of the TOML file, from the classes that check it."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass

from pydantic import BaseModel

from cadenza import Strategy, presets
from cadenza.training.config import Config
from cadenza.training.strategies import STRATEGIES, defaults_of, keys_of
from docs_tools.arguments import told

__all__ = ["Setting", "configuration", "settings"]


@dataclass(frozen=True)
class Setting:
    """A key of the configuration, as it is written in dotted form."""

    key: str
    default: str
    told: str

    @property
    def table(self) -> str:
        return self.key.rpartition(".")[0]


@functools.cache
def settings() -> tuple[Setting, ...]:
    """Return every key."""
    found = []
    defaults = Config()
    for name, field in Config.model_fields.items():
        value = getattr(defaults, name)
        if isinstance(value, BaseModel):
            fields = type(value).model_fields
            found += [
                Setting(f"{name}.{key}", toml(getattr(value, key)), one.description or "")
                for key, one in fields.items()
            ]
        else:
            found.append(Setting(name, toml(value), field.description or ""))
        if name == "strategy":
            found += _arguments_of_presets()
    return tuple(found)


def toml(value: object) -> str:
    """Return a value as the file has it.

    >>> toml("int8"), toml(True), toml({})
    ('"int8"', 'true', '{}')
    """
    return json.dumps(value)


def _arguments_of_presets() -> list[Setting]:
    takers: dict[str, list[str]] = {}
    words = dict(told(Strategy))
    for name in STRATEGIES:
        for key in keys_of(name):
            takers.setdefault(key, []).append(name)
        if name != "ddp":
            words |= told(getattr(presets, name))
    found = []
    for key, names in takers.items():
        if key == "codec":
            continue
        values = {toml(value) for name in names if (value := defaults_of(name).get(key)) is not None}
        who = "" if len(names) == len(STRATEGIES) - 1 else f" Taken by {', '.join(names)}."
        default = values.pop() if len(values) == 1 else "the preset's"
        found.append(Setting(f"strategy.{key}", default, words.get(key, "") + who))
    return found


def configuration() -> str:
    """Return a section for each table, with a row for each key."""
    tables: dict[str, list[Setting]] = {}
    for one in settings():
        tables.setdefault(one.table, []).append(one)
    parts = []
    for table, own in tables.items():
        rows = [
            f'| <span id="{one.key}"></span>`{one.key}` | `{one.default}` | {one.told.replace("|", "∣")} |'
            for one in own
        ]
        title = f"[{table}]" if table else "Top of the file"
        parts.append(f"## {title}\n\n| key | default | meaning |\n| --- | --- | --- |\n" + "\n".join(rows))
    return "\n\n".join(parts)

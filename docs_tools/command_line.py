"""The reference of the command line, from the parsers themselves."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from html import escape

import typer

from cadenza.cli.app import app
from cadenza.cli.train_options import CONFIG_KEYS

__all__ = ["Flag", "command_line", "flags"]


@dataclass(frozen=True)
class Flag:
    """A flag or an argument of a command."""

    command: str
    names: tuple[str, ...]
    help: str
    metavar: str
    key: str

    @property
    def anchor(self) -> str:
        return f"{self.command}{self.names[0]}" if self.names[0].startswith("-") else f"{self.command}-{self.names[0]}"


@functools.cache
def _commands() -> dict[str, str]:
    group = typer.main.get_command(app)
    return {name: (command.help or "").strip() for name, command in group.commands.items()}  # type: ignore[attr-defined]


@functools.cache
def flags() -> tuple[Flag, ...]:
    """Return every flag and argument of every command."""
    group = typer.main.get_command(app)
    commands = {"": group, **group.commands}  # type: ignore[attr-defined]
    found = []
    for command, parser in commands.items():
        for one in parser.params:
            if getattr(one, "hidden", False) or (not command and one.name in ("install_completion", "show_completion")):
                continue
            option = one.param_type_name == "option"
            names = (*one.opts, *one.secondary_opts) if option else (one.metavar or one.name.upper(),)
            key = CONFIG_KEYS.get(one.name, "") if command == "train" else ""
            takes = "" if getattr(one, "is_flag", False) or not option else one.metavar or "VALUE"
            found.append(
                Flag(command or "cadenza", names, " ".join((getattr(one, "help", "") or "").split()), takes, key)
            )
    return tuple(found)


def command_line() -> str:
    """Return a section for each command: what it does, and a table of its flags."""
    parts = []
    for command, about in {"cadenza": "", **_commands()}.items():
        own = [flag for flag in flags() if flag.command == command]
        title = "cadenza" if command == "cadenza" else f"cadenza {command}"
        parts.append(f"## {title}\n\n{about.split(chr(12))[0]}\n\n{_table(own)}")
    return "\n\n".join(parts)


def _table(own: list[Flag]) -> str:
    rows = []
    for flag in own:
        name = " ".join(f"`{one}`" for one in flag.names) + (f" `{flag.metavar}`" if flag.metavar else "")
        key = f"[`{flag.key}`](configuration.md#{flag.key})" if flag.key else ""
        rows.append(f'| <span id="{escape(flag.anchor)}"></span>{name} | {flag.help.replace("|", "∣")} | {key} |')
    return "| flag | what it does | sets the key |\n| --- | --- | --- |\n" + "\n".join(rows)

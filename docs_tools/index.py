"""The index: every public name, parameter, setting, flag, error, report field, variable and word, and its places."""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, fields
from html import escape

from cadenza.reports import RoundReport
from docs_tools.command_line import flags
from docs_tools.configuration import settings
from docs_tools.mentions import mentions_of, title_of
from docs_tools.rooms import DOCS, parameters_of, public_names

__all__ = ["Entry", "entries", "glossary_words", "index_of_names", "word_anchor"]

PAGE = "reference/index-of-names.md"


@dataclass(frozen=True)
class Entry:
    """A row: what it is, and links as (page below docs, anchor, text), the first to where it is defined."""

    label: str
    kind: str
    links: tuple[tuple[str, str, str], ...]


def glossary_words() -> dict[str, str]:
    """Return the words of the glossary and their anchors."""
    rows = re.findall(r"^\| (?!word |---)([^|]+?) \|", (DOCS / "glossary.md").read_text(), re.MULTILINE)
    return {word: word_anchor(word) for word in rows}


def word_anchor(word: str) -> str:
    """Return the anchor of a glossary word.

    >>> word_anchor("difference, δ")
    'word-difference-δ'
    """
    return "word-" + re.sub(r"\W+", "-", word.lower()).strip("-")


@functools.cache
def entries() -> tuple[Entry, ...]:
    """Return all entries in the order of the alphabet."""
    found = [*_names(), *_parameters(), *_fields(), *_settings(), *_flags(), *_words(), *_variables()]
    return tuple(sorted(found, key=lambda one: (one.label.lstrip("-_").lower(), one.kind)))


def _used(word: str, *but: str) -> tuple[tuple[str, str, str], ...]:
    return tuple((page, "", title) for page, title in mentions_of(word) if page not in but)


def _names() -> Iterator[Entry]:
    for one in public_names():
        links = [(one.page, one.path, one.exported)]
        if one.kind == "error":
            links.append(("errors.md", one.name.lower(), "what to do"))
        yield Entry(one.name, one.kind, (*links, *_used(one.name, one.page)))
        for name, method in one.methods().items():
            where = (one.page, method.path if method.docstring else one.path, one.exported)
            yield Entry(f"{one.name}.{name}", f"of {one.name}", (where, *_used(name, one.page)[:2]))


def _parameters() -> Iterator[Entry]:
    owners: dict[str, list[tuple[str, str, str]]] = defaultdict(list)
    for one in public_names():
        for name in one.parameters():
            owners[name].append((one.page, one.path, one.name))
        for method, value in one.methods().items():
            for name in parameters_of(value):
                owners[name].append((one.page, one.path, f"{one.name}.{method}"))
    for name, places in owners.items():
        yield Entry(name, "parameter of", tuple(dict.fromkeys(places)))


def _fields() -> Iterator[Entry]:
    [report] = [one for one in public_names() if one.name == "RoundReport"]
    for field in fields(RoundReport):
        where = (report.page, report.path, "RoundReport")
        yield Entry(field.name, "field of a round's report", (where, *_used(field.name, report.page)))


def _settings() -> Iterator[Entry]:
    for one in settings():
        last = one.key.rpartition(".")[2]
        yield Entry(one.key, "setting", (("reference/configuration.md", one.key, "configuration"), *_used(last)[:2]))


def _flags() -> Iterator[Entry]:
    for one in flags():
        for name in one.names:
            if name.startswith("--"):
                where = (
                    "reference/command-line.md",
                    one.anchor,
                    f"cadenza {one.command}".replace("cadenza cadenza", "cadenza"),
                )
                yield Entry(name, "flag", (where, *_used(name)))


def _words() -> Iterator[Entry]:
    for word, anchor in glossary_words().items():
        yield Entry(word, "word", (("glossary.md", anchor, "glossary"),))


def _variables() -> Iterator[Entry]:
    page = "reference/environment.md"
    for row in re.findall(r"^\| (`[^|]+) \|", (DOCS / page).read_text(), re.MULTILINE):
        for name in re.findall(r"`([A-Z_]+)`", row):
            yield Entry(name, "environment variable", ((page, "", title_of(page)), *_used(name, page)))


def index_of_names() -> str:
    """Return the index as HTML: a field that filters it, the letters, and a list under each."""
    letters: dict[str, list[Entry]] = defaultdict(list)
    for one in entries():
        first = one.label.lstrip("-_`").upper()[:1]
        letters[first if first.isascii() and first.isalpha() else "…"].append(one)
    jump = " ".join(f'<a href="#letter-{letter}">{letter}</a>' for letter in letters)
    lists = [
        f'<section class="letter"><h2 id="letter-{letter}">{letter}</h2><ul class="names">'
        f"{''.join(map(_row, own))}</ul></section>"
        for letter, own in letters.items()
    ]
    return (
        f'<p><label for="filter">Show only entries with</label><br><input id="filter" class="filter" type="search" '
        f'autocomplete="off"> <span id="filtered" role="status">{len(entries())} entries</span></p>\n'
        f'<p class="letters">{jump}</p>\n{"".join(lists)}'
    )


def _row(one: Entry) -> str:
    def address(page: str, anchor: str) -> str:
        place = page.removeprefix("reference/") if page.startswith("reference/") else f"../{page}"
        return place.replace(".md", ".html") + (f"#{anchor}" if anchor else "")

    links = [f'<a href="{escape(address(page, anchor))}">{escape(text)}</a>' for page, anchor, text in one.links]
    label, places = escape(one.label), ", ".join(links)
    return f'<li><code>{label}</code><span class="kind">{one.kind}</span><span class="at">{places}</span></li>'

"""The words of all pages, section by section, in a script that the site's search loads when it is first used."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

__all__ = ["SearchIndex"]

_HEADINGS = ("h1", "h2", "h3", "h4", "h5")
# Pages that list everything would be found for every word; the source files' pages only by their names.
_ONLY_TITLES = ("reference/index-of-names", "reference/source-files", "reference/files/")
# How much a page counts: what people look for first is how to do something.
_WEIGHTS = (("decisions/", 0.5), ("reference/files/", 0.3), ("modules/", 0.8), ("planning-accuracy", 0.5))


class _Sections(HTMLParser):
    """Cuts a page at its headings that have an anchor."""

    def __init__(self, title: str) -> None:
        super().__init__()
        self.sections: list[tuple[str, str, list[str]]] = [("", title, [])]
        self._heading: str | None = None
        self._skip = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if self._skip or tag in ("svg", "button", "script") or given.get("class") == "headerlink":
            self._skip += tag not in ("path", "circle", "rect", "br", "img", "input")
        elif tag in _HEADINGS and given.get("id"):
            self._heading = tag
            self.sections.append((str(given["id"]), "", []))

    def handle_endtag(self, tag: str) -> None:
        if self._skip:
            self._skip -= tag not in ("path", "circle", "rect", "br", "img", "input")
        elif tag == self._heading:
            self._heading = None

    def handle_data(self, data: str) -> None:
        if self._skip:
            return
        anchor, title, words = self.sections[-1]
        if self._heading:
            self.sections[-1] = (anchor, title + data, words)
        else:
            words.append(data)


class SearchIndex:
    """Collects (address, heading, page, text, weight) of every section."""

    def __init__(self) -> None:
        self._rows: list[tuple[str, str, str, str, float]] = []

    def clear(self) -> None:
        self._rows.clear()

    def add(self, address: str, title: str, content: str) -> None:
        """Add a page by its HTML."""
        parser = _Sections(title)
        parser.feed(content)
        weight = next((value for start, value in _WEIGHTS if address.startswith(start)), 1.0)
        if address.startswith(_ONLY_TITLES):
            self._rows.append((address, title, title, "", weight))
            return
        for anchor, heading, words in parser.sections:
            text = re.sub(r"\s+", " ", "".join(words)).strip()
            if text or anchor:
                place = f"{address}#{anchor}" if anchor else address
                self._rows.append((place, re.sub(r"\s+", " ", heading).strip() or title, title, text, weight))

    def write(self, path: Path) -> None:
        """Write the index as a script."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            f"window.cadenzaSearch = {json.dumps(self._rows, ensure_ascii=False, separators=(',', ':'))};\n"
        )

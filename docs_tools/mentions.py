"""Where in the documentation a word of code stands: in a code span, a code block or a table of flags."""

from __future__ import annotations

import functools
import re
from collections import Counter, defaultdict

from docs_tools.rooms import DOCS

__all__ = ["Mention", "mentions_of", "title_of"]

Mention = tuple[str, str]  # a page's path below docs, and its title

_CODE = re.compile(r"^```.*?^```|`[^`\n]+`", re.MULTILINE | re.DOTALL)
_WORD = re.compile(r"--[a-z][a-z-]+|[A-Za-z_][A-Za-z_0-9]*")
# Pages that tell what happened once are no place to learn how a name is used.
_NOT_FOR_LEARNING = ("decisions/", "planning-accuracy", "reference/")


@functools.cache
def title_of(page: str) -> str:
    """Return a page's title.

    >>> title_of("glossary.md")
    'Glossary'
    """
    found = re.search(r"^# (.+)$", (DOCS / page).read_text(), re.MULTILINE)
    return found.group(1).replace("`", "").strip() if found else page


@functools.cache
def _places() -> dict[str, list[Mention]]:
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for path in sorted(DOCS.rglob("*.md")):
        page = path.relative_to(DOCS).as_posix()
        if page.startswith(_NOT_FOR_LEARNING):
            continue
        for code in _CODE.findall(path.read_text()):
            for word in _WORD.findall(code):
                counts[word][page] += 1
    return {
        word: [(page, title_of(page)) for page, _ in sorted(pages.items(), key=lambda one: (-one[1], one[0]))]
        for word, pages in counts.items()
    }


def mentions_of(word: str, *, at_most: int = 4) -> list[Mention]:
    """Return the pages that use a word of code most often, the first ones first."""
    return _places().get(word, [])[:at_most]

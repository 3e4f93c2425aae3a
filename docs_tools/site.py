"""What MkDocs calls while it builds the site: the menu, the generated parts of pages, and the search index.

`mkdocs.yml` names this file under `hooks`. A page asks for a generated part by a line `<!-- generated: NAME -->`; the
pages of `docs/modules` get theirs at the end, and each source file has a page of its own.
"""

from __future__ import annotations

import html
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
for _folder in (str(ROOT), str(ROOT / "src")):
    if _folder not in sys.path:
        sys.path.insert(0, _folder)

from mkdocs.config.defaults import MkDocsConfig  # noqa: E402
from mkdocs.structure.files import File, Files  # noqa: E402
from mkdocs.structure.pages import Page  # noqa: E402

from docs_tools.generated import PARTS  # noqa: E402
from docs_tools.index import word_anchor  # noqa: E402
from docs_tools.keywords import keyword_pages  # noqa: E402
from docs_tools.module_pages import rest_of  # noqa: E402
from docs_tools.rooms import DOCS, rooms  # noqa: E402
from docs_tools.search import SearchIndex  # noqa: E402

__all__ = ["on_config", "on_files", "on_page_content", "on_page_markdown", "on_post_build"]

_ASKED = re.compile(r"^<!-- generated: ([a-z-]+)(?: (\w+))? -->$", re.MULTILINE)
_FIGURE_MARK = re.compile(r"<!-- /?figure[^>]*-->")
_CODE_BLOCK = re.compile(r'<div class="(?:language-)?(\w*) ?highlight">(?=<pre>)')
_ROW = re.compile(r"^\| (?!word |---)([^|]+?) \|", re.MULTILINE)
_search = SearchIndex()


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the pages that a pattern such as `decisions/*` names into the menu, so that a new one is a new file."""
    config.nav = _expanded(config.nav or [])
    _search.clear()
    return config


def _expanded(items: list[Any]) -> list[Any]:
    found: list[Any] = []
    for item in items:
        if isinstance(item, dict):
            [(title, below)] = item.items()
            found.append({title: _expanded(below) if isinstance(below, list) else below})
        elif "*" in item:
            found.extend(sorted(path.relative_to(DOCS).as_posix() for path in DOCS.glob(item)))
        elif (DOCS / item).exists():
            found.append(item)
    return [item for item in found if item and (not isinstance(item, dict) or all(item.values()))]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each source file."""
    for path, text in keyword_pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Fill in what a page asks for."""
    path = page.file.src_uri
    if path == "glossary.md":
        markdown = _ROW.sub(lambda row: f'| <span id="{word_anchor(row[1])}">{row[1]}</span> |', markdown)
    for room in rooms():
        if room.page == path:
            markdown += rest_of(room)
    markdown = _FIGURE_MARK.sub("", markdown)
    return _ASKED.sub(lambda asked: PARTS[asked[1]](*filter(None, [asked[2]])), markdown)


def on_page_content(content: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Make what may scroll reachable by keys, and give blocks of code a bar; note the words for the search."""
    content = _CODE_BLOCK.sub(_with_bar, content)
    content = content.replace("<pre>", '<pre tabindex="0">')
    content = re.sub(r"<table\b", '<div class="table" tabindex="0"><table', content).replace(
        "</table>", "</table></div>"
    )
    content = re.sub(r"<th([^>]*)></th>", r"<td\1></td>", content)  # a heading of nothing is no heading
    _search.add(page.file.dest_uri, str(page.title), content)
    return content


def _with_bar(block: re.Match[str]) -> str:
    name = {"": "text", "py": "python"}.get(block[1], block[1])
    bar = f'<div class="bar"><span>{html.escape(name)}</span><button type="button" class="copy">Copy</button></div>'
    return f'<div class="language-{name} highlight">{bar}'


def on_post_build(config: MkDocsConfig) -> None:
    """Write what the search reads: a script, because a page from file:// may load nothing else."""
    _search.write(Path(config.site_dir) / "assets" / "search_index.js")

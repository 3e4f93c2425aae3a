"""The generated parts of pages, by the name under which a page asks for them: `<!-- generated: NAME -->`."""

from __future__ import annotations

from collections.abc import Callable

from docs_tools.command_line import command_line
from docs_tools.configuration import configuration
from docs_tools.ddp_diff import ddp_diff
from docs_tools.index import index_of_names
from docs_tools.keywords import keyword_page_of, module_of, source_files
from docs_tools.matrix import matrix
from docs_tools.messages import messages
from docs_tools.race_picture import race
from docs_tools.rooms import ROOT, first_line, modules

__all__ = ["PARTS"]


def _source_files() -> str:
    rows = []
    for path in source_files():
        module = module_of(path)
        told = first_line(modules()[module]) if module in modules() else ""
        name = path.relative_to(ROOT / "src").as_posix()
        rows.append(f"| [`{name}`](../{keyword_page_of(module)}) | {told} |")
    return "| file | what it holds |\n| --- | --- |\n" + "\n".join(rows)


PARTS: dict[str, Callable[..., str]] = {
    "command-line": command_line,
    "configuration": configuration,
    "ddp-diff": ddp_diff,
    "index": index_of_names,
    "matrix": matrix,
    "messages": messages,
    "race": race,
    "source-files": _source_files,
}

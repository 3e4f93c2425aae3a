"""Tables of a page: figures as people read them, and the exact ones behind them for copying.

>>> table = Table("Bytes", ("level", "sent (bytes)"), [(text_cell("world"), Cell("12.3 MB", 12345678))])
>>> 'data-value="12345678"' in table.html()
True
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape

__all__ = ["Cell", "Table", "named_cell", "number_cell", "text_cell"]


@dataclass(frozen=True)
class Cell:
    """One cell: its text, the exact value that is copied, and whether it is the best of its row.

    >>> Cell("12.3 MB", 12345678).value
    12345678
    """

    text: str
    value: float | str | None
    numeric: bool = True
    best: bool = field(default=False, repr=False)


def text_cell(text: str) -> Cell:
    """Return a cell of words.

    >>> text_cell("finished").numeric
    False
    """
    return Cell(text, text, numeric=False)


def number_cell(value: float | None, text: Callable[[float | None], str]) -> Cell:
    """Return a cell of a number, written by `text`.

    >>> number_cell(2.5, lambda value: f"{value:.2f} s")
    Cell(text='2.50 s', value=2.5, numeric=True)
    """
    return Cell(text(value), value)


@dataclass(frozen=True)
class Table:
    """A table with a caption and a button that copies it as CSV; the first cell of a row is its heading.

    >>> print(Table("Empty", ("step", "loss"), []).html())
    <div class="table ">...
    """

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    kind: str = ""

    def html(self) -> str:
        """Return the table as HTML, everything in it escaped."""
        numeric = [any(row[index].numeric for row in self.rows) for index in range(len(self.columns))]
        heads = "".join(_head(name, flag) for name, flag in zip(self.columns, numeric, strict=True))
        rows = "".join(f"<tr>{''.join(_cell(cell, index == 0) for index, cell in enumerate(row))}</tr>\n"
                       for row in self.rows)  # fmt: skip
        caption = escape(self.caption)
        return (
            f'<div class="table {self.kind}"><div class="table-scroll" role="region" aria-label="{caption}"><table>\n'
            f"<caption>{caption}</caption>\n<thead><tr>{heads}</tr></thead>\n<tbody>\n{rows}</tbody></table></div>\n"
            f'<button type="button" class="copy" aria-label="Copy as CSV: {caption}">Copy as CSV</button></div>\n'
        )


def named_cell(name: str) -> Cell:
    """Return the heading of a row; a unit at its end is for the copy, since the page's figures have their own.

    >>> named_cell("time (s)")
    Cell(text='time', value='time (s)', numeric=False)
    """
    return Cell(_without_unit(name), name, numeric=False)


def _head(name: str, numeric: bool) -> str:
    shown = _without_unit(name)
    exact = "" if shown == name else f' data-value="{escape(name)}"'
    return f'<th scope="col"{_numeric(numeric)}{exact}>{escape(shown)}</th>'


def _without_unit(name: str) -> str:
    return re.sub(r" \((s|bytes)\)$", "", name)


def _numeric(flag: bool) -> str:
    return ' class="number"' if flag else ""


def _cell(cell: Cell, heading: bool) -> str:
    value = "" if cell.value is None else str(cell.value)
    if isinstance(cell.value, float) and math.isnan(cell.value):
        value = "nan"
    tag, scope = ("th", ' scope="row"') if heading else ("td", "")
    exact = "" if value == cell.text and not cell.best else f' data-value="{escape(value)}"'
    text = f'<strong class="best">{escape(cell.text)}</strong>' if cell.best else escape(cell.text)
    return f"<{tag}{scope}{_numeric(cell.numeric)}{exact}>{text}</{tag}>"

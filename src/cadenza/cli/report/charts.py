"""A chart of a page: a figure for plotly, in words for who cannot see it, and its legend.

Colours are names of the page's own CSS variables, `var(--run-0)`, which the page fills in for light and for dark.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

__all__ = ["Chart", "Figure", "Key", "View", "axis", "colour_of_run", "layout", "rounded", "time_unit"]

Figure: TypeAlias = dict[str, Any]
RUN_COLOURS = 8


@dataclass(frozen=True)
class Key:
    """A line of a legend: `style` is "line", "thin", "dotted", "box", "dot" or "ring"."""

    label: str
    colour: str
    style: str
    run: int | None = None


@dataclass(frozen=True)
class View:
    """One way to look at a chart, behind a button if there are several."""

    name: str
    figure: Figure
    note: str = ""


@dataclass(frozen=True)
class Chart:
    """A chart: its title, what it shows in words, how it can be looked at, its legend, a note on what was thinned.

    Zooming into one zooms into all that are `linked` by the same word.
    """

    id: str
    title: str
    words: str
    views: Sequence[View]
    keys: Sequence[Key] = ()
    note: str = ""
    height: int = 340
    wide: bool = False
    linked: str = ""


def colour_of_run(number: int) -> str:
    """Return the colour that a run has in every chart.

    >>> colour_of_run(0), colour_of_run(8)
    ('run-0', 'run-0')
    """
    return f"run-{number % RUN_COLOURS}"


def axis(title: str = "", **more: Any) -> Figure:
    """Return an axis of the page's looks.

    >>> axis("Steps")["title"]["text"]
    'Steps'
    """
    return {
        "title": {"text": title, "font": {"size": 13}, "standoff": 8},
        "gridcolor": "var(--grid)",
        "linecolor": "var(--line)",
        "zeroline": False,
        "automargin": True,
        "tickfont": {"size": 12},
        "ticklabelstandoff": 4,
        **more,
    }


def layout(x: Figure, y: Figure, **more: Any) -> Figure:
    """Return a layout of the page's looks.

    >>> layout(axis("Steps"), axis("Loss"))["showlegend"]
    False
    """
    return {
        "xaxis": x,
        "yaxis": y,
        "showlegend": False,
        "margin": {"l": 52, "r": 16, "t": 12, "b": 48},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"color": "var(--text)", "family": "var(--font)"},
        "hoverlabel": {
            "bgcolor": "var(--card)",
            "bordercolor": "var(--line)",
            "font": {"color": "var(--text)", "size": 13, "family": "var(--font)"},
            "align": "left",
        },
        **more,
    }


def time_unit(seconds: float) -> tuple[float, str]:
    """Return the unit that suits an axis up to a time: its length in seconds, and its name.

    >>> time_unit(5400.0)
    (60.0, 'minutes')
    """
    return (3600.0, "hours") if seconds > 7200 else (60.0, "minutes") if seconds > 180 else (1.0, "seconds")


def rounded(values: Iterable[float | None], digits: int = 5) -> list[float | None]:
    """Return the values with as many figures as a screen can show; what is not finite is None, a gap in a line.

    >>> rounded([1.23456789, float("nan"), 40000.0])
    [1.2346, None, 40000.0]
    """
    return [float(f"{value:.{digits}g}") if value is not None and math.isfinite(value) else None for value in values]

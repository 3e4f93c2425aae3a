"""Numbers as people read them: bytes, seconds, counts, shares.

>>> bytes_text(12_345_678), seconds_text(152.3), count_text(811_000), loss_text(1.93361)
('12.3 MB', '2 min 32 s', '811,000', '1.934')
"""

from __future__ import annotations

import math

__all__ = ["bytes_text", "count_text", "loss_text", "ratio_text", "seconds_text", "share_text"]

NOTHING = "–"  # an en dash: there is no such figure


def count_text(value: float | None) -> str:
    """Return a whole number with its thousands set apart.

    >>> count_text(40000), count_text(None)
    ('40,000', '–')
    """
    return NOTHING if value is None or not math.isfinite(value) else f"{value:,.0f}"


def bytes_text(value: float | None) -> str:
    """Return bytes in the decimal unit that leaves three figures.

    >>> bytes_text(0), bytes_text(999), bytes_text(64_000_000_000)
    ('0 B', '999 B', '64.0 GB')
    """
    if value is None or not math.isfinite(value):
        return NOTHING
    if value < 999.5:
        return f"{value:.0f} B"
    for unit in ("kB", "MB", "GB", "TB", "PB"):
        value /= 1000
        if value < 999.5 or unit == "PB":
            break
    return f"{_three_figures(value)} {unit}"


def seconds_text(value: float | None) -> str:
    """Return a time in the units in which people say it.

    >>> seconds_text(0.0531), seconds_text(9.25), seconds_text(3700), seconds_text(200_000)
    ('53.1 ms', '9.25 s', '1 h 2 min', '2 d 8 h')
    """
    if value is None or not math.isfinite(value):
        return NOTHING
    if value == 0:
        return "0 s"
    if value < 0.9995:
        return f"{_three_figures(value * 1000)} ms"
    if value < 99.95:
        return f"{_three_figures(value)} s"
    for large, small, unit, smaller in ((86400, 3600, "d", "h"), (3600, 60, "h", "min"), (60, 1, "min", "s")):
        if value >= large:
            wholes, rest = divmod(round(value / small), large // small)
            return f"{wholes} {unit} {rest} {smaller}" if rest else f"{wholes} {unit}"
    return f"{value:.0f} s"


def loss_text(value: float | None) -> str:
    """Return a loss with four figures; a loss that is not a number says so.

    >>> loss_text(0.00012345), loss_text(float("nan")), loss_text(None)
    ('0.0001234', 'not a number', '–')
    """
    if value is None:
        return NOTHING
    if math.isnan(value):
        return "not a number"
    return f"{value:.3f}" if 1 <= abs(value) < 1e6 else f"{value:.4g}"


def share_text(part: float | None, whole: float | None) -> str:
    """Return a part of a whole in percent.

    >>> share_text(1.5, 60), share_text(1, 0)
    ('2.5 %', '–')
    """
    if part is None or not whole:
        return NOTHING
    return f"{100 * part / whole:.1f} %"


def ratio_text(part: float | None, whole: float | None) -> str:
    """Return how many times smaller the part is.

    >>> ratio_text(2, 104), ratio_text(3, 2), ratio_text(0, 104)
    ('1/52', '1.5×', '0')
    """
    if part is None or not whole:
        return NOTHING
    if part == 0:
        return "0"
    times = whole / part
    return f"{part / whole:.3g}×" if times < 0.995 else f"1/{times:.3g}" if times < 99.5 else f"1/{times:,.0f}"


def _three_figures(value: float) -> str:
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 99.95 else f"{value:.0f}"

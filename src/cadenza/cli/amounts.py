"""Amounts as people write and read them: 25M parameters, 11.9 MB, 95 Mbit/s."""

from __future__ import annotations

import re

from cadenza.errors import UsageError

__all__ = ["bit_rate", "byte_size", "duration", "parse_count"]

_FACTORS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9}


def parse_count(option: str, text: str) -> int:
    """Return how many are meant by a number with or without k, M, G or B (both 10⁹).

    >>> parse_count("--parameters", "1.3G"), parse_count("--parameters", "100k")
    (1300000000, 100000)
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgb]?)", text.strip(), re.IGNORECASE)
    count = round(float(found[1]) * _FACTORS[found[2].lower()]) if found else 0
    if count < 1:
        raise UsageError(f"{option} is a number of parameters such as 25M, 1.3G or 100k; got {text!r}.")
    return count


def byte_size(size: float) -> str:
    """Return a number of bytes in decimal units.

    >>> byte_size(400), byte_size(11_900_000), byte_size(3e11)
    ('400 B', '11.9 MB', '300 GB')
    """
    return _scaled(size, ("B", "kB", "MB", "GB", "TB"))


def bit_rate(bytes_a_second: float) -> str:
    """Return a rate in the units in which links are sold.

    >>> bit_rate(12_500_000)
    '100 Mbit/s'
    """
    return _scaled(8 * bytes_a_second, ("bit/s", "kbit/s", "Mbit/s", "Gbit/s"))


def duration(seconds: float) -> str:
    """Return a time span in a unit that suits it.

    >>> duration(0.0000621), duration(0.0342), duration(2.5), duration(400)
    ('62 µs', '34.2 ms', '2.50 s', '6.7 min')
    """
    if seconds < 1e-3:
        return f"{1e6 * seconds:.0f} µs"
    if seconds < 1:
        return f"{1e3 * seconds:.3g} ms"
    return f"{seconds:.2f} s" if seconds < 120 else f"{seconds / 60:.1f} min"


def _scaled(amount: float, units: tuple[str, ...]) -> str:
    last = units[-1]
    for unit in units:
        if abs(amount) < 999.5 or unit == last:
            break
        amount /= 1000
    return f"{amount:.0f} {unit}" if unit == units[0] or amount >= 100 else f"{amount:.3g} {unit}"

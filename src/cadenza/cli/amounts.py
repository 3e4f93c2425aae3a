"""Amounts as people write and read them: 25M parameters, 11.9 MB, 95 Mbit/s."""

from __future__ import annotations

import math
import re

from cadenza.errors import UsageError

__all__ = ["bit_rate", "byte_size", "duration", "parse_count", "parse_rate", "parse_seconds", "parse_size"]

_SECONDS = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
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


def parse_rate(option: str, text: str) -> float:
    """Return the bits a second of a rate as links are given elsewhere: 100mbit, 1gbit.

    >>> parse_rate("--bandwidth", "200mbit")
    200000000.0
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]?)bit(?:/s)?", text.strip(), re.IGNORECASE)
    rate = float(found[1]) * _FACTORS[found[2].lower()] if found else 0.0
    if not 0 < rate < 1e18:
        raise UsageError(f"{option} is a number and a unit of bits a second, such as 100mbit or 1gbit; got {text!r}.")
    return rate


def parse_seconds(option: str, text: str) -> float:
    """Return the seconds of a time span; a number without a unit is seconds.

    >>> parse_seconds("--latency", "40ms"), parse_seconds("--step-s", "0.8"), parse_seconds("--fails-every", "3d")
    (0.04, 0.8, 259200.0)
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(us|µs|ms|s|min|h|d)?", text.strip(), re.IGNORECASE)
    if not found or not math.isfinite(float(found[1])):
        raise UsageError(f"{option} is a time such as 0.8, 40ms, 5min or 72h; got {text!r}.")
    return float(found[1]) * _SECONDS[(found[2] or "s").lower()]


def parse_size(option: str, text: str) -> int:
    """Return the bytes of a size in decimal units.

    >>> parse_size("--memory", "24GB")
    24000000000
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)b", text.strip(), re.IGNORECASE)
    size = round(float(found[1]) * {**_FACTORS, "t": 10**12}[found[2].lower()]) if found else 0
    if size < 1:
        raise UsageError(f"{option} is a number of bytes such as 24GB or 512MB; got {text!r}.")
    return size


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

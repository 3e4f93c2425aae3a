"""Checks of arguments that several rooms share, with one text for each kind of mistake.

Functions named `as_…` return the value in the type that is wanted, `check_…` return nothing; all raise TypeError for a
wrong type and ValueError for a wrong value.
"""

from __future__ import annotations

import math
from numbers import Real
from operator import index
from typing import SupportsIndex

__all__ = [
    "as_count",
    "as_fraction",
    "as_number",
    "as_positive",
    "as_steps",
    "as_whole_steps",
    "check_not_negative",
    "check_share",
    "check_whole_number",
]


def as_number(name: str, value: object) -> float:
    """Return a real number as a float.

    >>> as_number("lr", "0.1")
    Traceback (most recent call last):
    TypeError: lr must be a number; got '0.1', a str.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number; got {value!r}, a {type(value).__name__}.")
    return float(value)


def as_positive(name: str, value: object) -> float:
    """Return a finite number above 0 as a float.

    >>> as_positive("lr", 0)
    Traceback (most recent call last):
    ValueError: lr must be a number above 0; got 0.
    """
    if not 0 < as_number(name, value) < math.inf:
        raise ValueError(f"{name} must be a number above 0; got {value!r}.")
    return as_number(name, value)


def as_fraction(name: str, value: object) -> float:
    """Return a momentum, a number from 0 to below 1, as a float.

    >>> as_fraction("momentum", 1.0)
    Traceback (most recent call last):
    ValueError: momentum must be at least 0 and below 1, or the momentum would never fade; got 1.0.
    """
    if not 0 <= as_number(name, value) < 1:
        raise ValueError(f"{name} must be at least 0 and below 1, or the momentum would never fade; got {value!r}.")
    return as_number(name, value)


def as_whole_steps(name: str, value: object) -> int:
    """Return a whole number of steps, of any library, as an int.

    >>> as_whole_steps("A milestone", 1.5)
    Traceback (most recent call last):
    TypeError: A milestone must be a whole number of steps (int); got 1.5, a float. Round it, for example with int().
    """
    # With fractions of a step ranks would round, or never meet; integers of other libraries, such as numpy's, will do.
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise TypeError(
            f"{name} must be a whole number of steps (int); got {value!r}, a {type(value).__name__}. "
            "Round it, for example with int()."
        )
    return index(value)


def as_steps(name: str, value: object) -> int:
    """Return a number of steps, at least 1, as an int.

    >>> as_steps("period", 0)
    Traceback (most recent call last):
    ValueError: period must be at least 1 step; got 0.
    """
    steps = as_whole_steps(name, value)
    if steps < 1:
        raise ValueError(f"{name} must be at least 1 step; got {steps}.")
    return steps


def as_count(name: str, value: object) -> int:
    """Return a whole number of at least 1.

    >>> as_count("layers", 0)
    Traceback (most recent call last):
    ValueError: layers is at least 1; got 0.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is a whole number; got {value!r}.")
    if value < 1:
        raise ValueError(f"{name} is at least 1; got {value}.")
    return value


def check_not_negative(name: str, value: object) -> None:
    """Refuse a number of steps that is not whole, or is negative.

    >>> check_not_negative("delay", -1)
    Traceback (most recent call last):
    ValueError: delay is not negative; got -1.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is a whole number of steps; got {value!r}.")
    if value < 0:
        raise ValueError(f"{name} is not negative; got {value}.")


def check_whole_number(what: str, given: object, *, least: int, most: int, multiple: int = 1) -> None:
    """Refuse an option that is not a whole number in its range.

    >>> check_whole_number("block", 0, least=16, most=65536)
    Traceback (most recent call last):
    ValueError: block is 0; give a whole number from 16 to 65536.
    """
    kind = "a whole number" if multiple == 1 else f"a multiple of {multiple}"
    message = f"{what} is {given!r}; give {kind} from {least} to {most}."
    if not isinstance(given, int) or isinstance(given, bool):
        raise TypeError(message)
    if not least <= given <= most or given % multiple:
        raise ValueError(message)


def check_share(what: str, given: object, *, of: str) -> None:
    """Refuse an option that is not a number above 0 and up to 1.

    >>> check_share("decay", 2, of="the loss to keep")
    Traceback (most recent call last):
    ValueError: decay is 2; give the share of the loss to keep, above 0 and up to 1.
    """
    message = f"{what} is {given!r}; give the share of {of}, above 0 and up to 1."
    if not isinstance(given, int | float) or isinstance(given, bool):
        raise TypeError(message)
    if not 0 < given <= 1:
        raise ValueError(message)

"""Checking what a codec is made with."""

from __future__ import annotations

__all__ = ["check_share", "check_whole_number"]


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

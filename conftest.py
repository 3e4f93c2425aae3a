"""Doctests compare the notes of errors too, and every error of Cadenza has one: they are left out."""

import doctest
import traceback
from types import SimpleNamespace


def _without_notes(kind: type[BaseException], value: BaseException) -> list[str]:
    told = traceback.TracebackException(kind, value, None)
    told.__notes__ = None
    return list(told.format_exception_only())


doctest.traceback = SimpleNamespace(  # type: ignore[attr-defined]
    format_exception_only=_without_notes, print_exc=traceback.print_exc, print_exception=traceback.print_exception
)

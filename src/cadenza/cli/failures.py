"""What becomes of errors: one paragraph for the person at the keyboard, an exit code for scripts.

0: done. 1: the training failed. 2: bad input. 128 + the number of a signal: interrupted by it, so 130 after Ctrl-C.
"""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.text import Text

from cadenza.cli.exit_codes import BAD_INPUT, FAILED
from cadenza.errors import CadenzaError, UsageError

__all__ = ["TrainingFailedError", "exit_code", "explain", "last_lines"]


class TrainingFailedError(CadenzaError):
    """A worker died or raised; the message is its own, and where its log is."""


def exit_code(error: CadenzaError | OSError) -> int:
    """Return what the process shall exit with.

    >>> exit_code(UsageError("no such strategy")), exit_code(TrainingFailedError("worker 1 died"))
    (2, 1)
    """
    return BAD_INPUT if isinstance(error, UsageError | OSError) else FAILED


def explain(error: CadenzaError | OSError, console: Console) -> None:
    """Print an error as a paragraph, without a traceback."""
    console.print(Text.assemble(("Error: ", "bold red"), _told(error)))
    if isinstance(error, CadenzaError):
        console.print(Text(f"See {error.address}", "dim"))


def _told(error: CadenzaError | OSError) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}."
    return str(error)


def last_lines(path: Path, count: int = 12) -> str:
    """Return the end of a log, or nothing.

    >>> last_lines(Path("there-is-no-such-file"))
    ''
    """
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 8192))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return "\n".join(lines[-count:])

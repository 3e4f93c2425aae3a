"""What the command and its workers end with.

128 and more: ended by a signal, so 130 after Ctrl-C.
"""

from __future__ import annotations

__all__ = ["BAD_INPUT", "FAILED", "NOBODY_LEFT"]

FAILED = 1
BAD_INPUT = 2  # whoever tries again fails in the same way
NOBODY_LEFT = 3  # of a worker: none of those that are there has trained yet, and all others are gone

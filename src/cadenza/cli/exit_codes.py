"""What the command and its workers end with.

128 and more: ended by a signal, so 130 after Ctrl-C.
"""

from __future__ import annotations

__all__ = ["BAD_INPUT", "FAILED", "FULL_DISK", "NOBODY_LEFT"]

FAILED = 1
BAD_INPUT = 2  # whoever tries again fails in the same way
NOBODY_LEFT = 3  # of a worker: none of those that are there has trained yet, and all others are gone
FULL_DISK = 4  # of a worker: which may not even have had room to say so

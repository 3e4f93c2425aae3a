"""What all contracts share: telling a broken promise, and the promises of any piece."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import dataclass
from typing import TypeVar

from cadenza.common.identity import identity
from cadenza.common.protocols import missing_members

__all__ = ["Contract"]

State = TypeVar("State")


@dataclass(frozen=True)
class Contract:
    """A piece and the protocol that it is held to.

    >>> from cadenza.fragments import Fragmentation, whole
    >>> Contract(whole(), Fragmentation).holds(1 > 2, "one is above two")
    Traceback (most recent call last):
    AssertionError: Whole() breaks a promise of cadenza.fragments.Fragmentation: one is above two.
    """

    piece: object
    protocol: type

    def holds(self, kept: bool, promise: str) -> None:
        """Raise AssertionError if a promise is not kept."""
        if not kept:
            where = f"{self.protocol.__module__.rsplit('.', 1)[0]}.{self.protocol.__name__}"
            raise AssertionError(f"{self.piece!r} breaks a promise of {where}: {promise}.")

    def through_json(self, state: State) -> State:
        """Return a state as it comes back from a checkpoint."""
        try:
            back: State = json.loads(json.dumps(state, allow_nan=False))
        except (TypeError, ValueError) as error:
            self.holds(False, f"its state can be written as JSON; {state!r} cannot: {error}")
            raise
        return back

    def is_whole(self) -> None:
        """Check what any piece promises: all members, and one identity on all ranks."""
        missing = missing_members(self.piece, self.protocol)
        self.holds(not missing, f"it has all members; {', '.join(missing)} are missing")
        lines = identity(self.piece)
        self.holds(lines == identity(deepcopy(self.piece)), "its fields are plain values, so that ranks can compare it")
        addresses = [line for line in lines if " at 0x" in line]
        self.holds(not addresses, f"its fields are the same in every process; not so {addresses[:1]}")

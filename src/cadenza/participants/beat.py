"""What a worker tells all others at every beat, in the one entry that it has in the store, and how others hear it.

Entries of a worker have an order: later processes come after earlier ones, and each counts its beats. So one that was
written again by somebody else is not heard.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, replace
from typing import Literal, get_args

__all__ = ["CLOCKS_S", "Beat", "Heard", "beat_key"]

CLOCKS_S = 600.0  # with a secret: how far clocks may be apart; what is older was written again by somebody else
_PROOF = 3  # changes of a beat that show that a worker is alive whose line has ended; two may have been under way

State = Literal["here", "gone"]

_TYPES = {
    **dict.fromkeys(("worker", "started", "number"), int),
    **dict.fromkeys(("incarnation", "address", "state", "site"), str),
    "at": float,
    **dict.fromkeys(("waiting", "preparing", "exhausted"), bool),
}


def beat_key(worker: int) -> str:
    """Return where a worker's entry stands."""
    return f"beat/{worker}"


@dataclass(frozen=True)
class Beat:
    """A worker's entry.

    Attributes:
        worker: Its number.
        incarnation: What tells its process from an earlier or later one in the same place.
        started: When the process began, in nanoseconds since 1970; later than that of every earlier one.
        number: Counts its beats.
        at: When it was written, in seconds since 1970 by its own clock.
        address: Where its liveness socket listens; empty if it has none.
        state: Whether it is there, or has signed off, or was seen to die.
        waiting: Whether it waits for others from whom it can take a state.
        preparing: Whether it is still building its model, so that no round should wait for it.
        exhausted: Whether it has run out of data, so that it comes to rounds only where others hold them.
        site: Where it is, from the largest place to the smallest, with slashes.
    """

    worker: int
    incarnation: str
    started: int
    number: int = 0
    at: float = 0.0
    address: str = ""
    state: State = "here"
    waiting: bool = False
    preparing: bool = False
    exhausted: bool = False
    site: str = ""

    def pack(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def unpack(cls, text: str) -> Beat:
        beat = cls(**json.loads(text))
        for name, kind in _TYPES.items():
            if type(getattr(beat, name)) is not kind:
                raise TypeError(f"{name} is no {kind.__name__}")
        if beat.state not in get_args(State) or beat.worker < 0:
            raise ValueError("this is no beat")
        return beat

    def next(self, **changes: object) -> Beat:
        """Return the worker's next beat, now."""
        return replace(self, number=self.number + 1, at=time.time(), **changes)  # type: ignore[arg-type]

    def follows(self, other: Beat) -> bool:
        """Tell whether this was written after another entry of the same worker."""
        return (self.started, self.number) > (other.started, other.number)


@dataclass
class Heard:
    """What was heard of one worker.

    Attributes:
        last: Its last beat.
        silent_s: How long nothing new was heard.
        doubt: How many changes are still wanted since its liveness connection has ended.
        again: How often an entry was there that is older than the last beat.
    """

    last: Beat
    silent_s: float = 0.0
    doubt: int = 0
    again: int = 0

    @property
    def left(self) -> bool:
        return self.last.state == "gone"

    def hear(self, beat: Beat | None, elapsed: float) -> None:
        """Take what stands in the store now."""
        if beat is None or not beat.follows(self.last):
            self.silent_s += elapsed
            self.again += beat is not None and beat != self.last
            return
        if beat.incarnation != self.last.incarnation:
            self.doubt = 0  # another process
        self.last, self.silent_s, self.doubt = beat, 0.0, max(0, self.doubt - 1)

    def end_line(self) -> None:
        """Note that its liveness connection has ended."""
        self.doubt = _PROOF

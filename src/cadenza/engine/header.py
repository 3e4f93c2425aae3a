"""What the members of a round must agree on before data moves.

The header is a few bytes that every member sends to every other at the start of a round. Each sees all of them, so a
difference is found by all alike, before the first value is sent; then, and only then, they exchange descriptions and
every rank raises the same error.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cadenza.common.messages import HEADER_BYTES
from cadenza.errors import DisagreementError

__all__ = ["HEADER_BYTES", "Header", "Stance", "disagreement", "mark"]

_LAYOUT = struct.Struct("<4s????q16sdddIIQddd")
_MAGIC = b"CDZ1"


@dataclass(frozen=True)
class Header:
    """What a member is about to do, at which step and with what, and what the others need to know of it.

    `lr_mark` tells apart members whose inner learning rates differ, where the outer update uses them. `anchor` is the
    checksum of the anchor from which its differences are taken, where that must be the same bits on all members, and 0
    elsewhere. `fed_back` is the norm of what earlier rounds have lost and this one sends, where it may fail. `step_s`
    and `stall_s` are what a member has measured of its steps and of its last round, where a schedule or a codec follows
    them.

    >>> header = Header(step=7, digest=bytes(16), able=True, weight=2.0)
    >>> Header.unpack(header.pack()) == header
    True
    """

    step: int
    digest: bytes
    able: bool
    atomic: bool = False
    exhausted: bool = False
    weight: float = 1.0
    norm2: float = 0.0
    speed: float = 0.0
    steps: int = 0
    faulty: bool = False
    lr_mark: int = 0
    anchor: int = 0
    step_s: float = 0.0
    stall_s: float = 0.0
    fed_back: float = 0.0

    @property
    def intent(self) -> tuple[int, bytes, bool, bool]:
        """What must be the same on every member."""
        return self.step, self.digest, self.able, self.atomic

    def pack(self) -> bytes:
        return _LAYOUT.pack(
            _MAGIC,
            self.able,
            self.atomic,
            self.exhausted,
            self.faulty,
            self.step,
            self.digest,
            self.weight,
            self.norm2,
            self.speed,
            self.steps,
            self.lr_mark,
            self.anchor,
            self.step_s,
            self.stall_s,
            self.fed_back,
        )

    @classmethod
    def unpack(cls, data: bytes) -> Header:
        magic, able, atomic, exhausted, faulty, step, digest, *figures = _LAYOUT.unpack(data)
        if magic != _MAGIC:
            raise DisagreementError(
                "A member of this group sent something that is no Cadenza header: is every rank running the same "
                "version of Cadenza, and is every rank averaging at this point of the program?"
            )
        weight, norm2, speed, steps, lr_mark, anchor, *more = figures
        return cls(step, digest, able, atomic, exhausted, weight, norm2, speed, steps, faulty, lr_mark, anchor, *more)


def mark(digest: bytes, level: int, fragment: int) -> bytes:
    """Return a digest of 16 bytes that also tells rounds of different levels and fragments apart.

    >>> mark(bytes(16), 0, 0) == bytes(16), mark(bytes(16), 0, 1) == bytes(16)
    (True, False)
    """
    return bytes(a ^ b for a, b in zip(digest, struct.pack("<qq", level, fragment), strict=True))


@dataclass(frozen=True)
class Stance:
    """A member's side of a disagreement, told in words: sent only once the headers have shown that there is one."""

    step: int
    problem: str | None
    lines: Sequence[str]
    atomic: bool = False

    def pack(self) -> bytes:
        return json.dumps([self.step, self.problem, list(self.lines), self.atomic]).encode()

    @classmethod
    def unpack(cls, data: bytes) -> Stance:
        return cls(*json.loads(data))

    def line(self, position: int) -> str:
        """Return what stands at a position."""
        return self.lines[position] if position < len(self.lines) else f"nothing at position {position}"


def disagreement(
    stances: Mapping[int, Stance],
    *,
    what: str = "what to average",
    mend: str = "Pass the same parameters, in the same order, on every rank",
    mend_steps: str = "Call the averager once per step on every rank, and restore its step together with the model",
) -> str:
    """Tell, in the same words on every rank, which ranks differ from which and in what, and how to mend it.

    >>> ours, theirs = Stance(4, None, ["parameter 0: (2,)"]), Stance(4, None, ["parameter 0: (3,)"])
    >>> print(disagreement({0: ours, 1: theirs}))
    The ranks disagree on what to average. parameter 0: (2,) on rank 0; parameter 0: (3,) on rank 1. \
Pass the same parameters, in the same order, on every rank.
    """
    if any(stance.problem for stance in stances.values()):
        sides = _sides({rank: stance.problem or "" for rank, stance in stances.items()})
        told = " ".join(f"On {who}: {problem}" for problem, who in sides.items() if problem)
        return f"These parameters cannot be averaged. {told}"
    steps = _sides({rank: f"step {stance.step}" for rank, stance in stances.items()})
    if len(steps) > 1:
        return f"The ranks average at different steps: {_told(steps)}. {mend_steps}."
    ways = _sides({rank: f"atomic={stance.atomic}" for rank, stance in stances.items()})
    if len(ways) > 1:
        return f"The ranks average in different ways: {_told(ways)}. Choose the same on every rank."
    positions = max(len(stance.lines) for stance in stances.values())
    table = [{rank: stance.line(position) for rank, stance in stances.items()} for position in range(positions)]
    differing = [row for row in table if len(set(row.values())) > 1]
    if not differing:
        return (
            "The ranks disagree on how the parameters lie in memory: the same ones must share memory (be tied) on "
            "every rank, and have the same strides."
        )
    more = f" {len(differing)} parameters differ in all." if len(differing) > 1 else ""
    return f"The ranks disagree on {what}. {_told(_sides(differing[0]))}.{more} {mend}{_hint(differing[0])}."


def _hint(row: Mapping[int, str]) -> str:
    if any(line.endswith("has no gradient") for line in row.values()):
        return ", and average before zero_grad(); a parameter without a gradient does not take part"
    return ""


def _sides(views: Mapping[int, str]) -> dict[str, str]:
    """Group ranks by what they hold: {what: "rank 0" or "ranks 1, 3"}, in rank order."""
    holders: dict[str, list[int]] = {}
    for rank, view in views.items():
        holders.setdefault(view, []).append(rank)
    return {
        view: ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks)) for view, ranks in holders.items()
    }


def _told(sides: dict[str, str]) -> str:
    return "; ".join(f"{view} on {who}" for view, who in sides.items())

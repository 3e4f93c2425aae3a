"""The name of a round, the same on all workers that come to it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["RoundId"]


@dataclass(frozen=True, order=True)
class RoundId:
    """Names a round, in the order in which rounds are held: at which step, of which fragment, and of which level.

    `phase` counts the rounds of a fragment at one step: 0 for the regular one, more for attempts at the end of a run.

    >>> RoundId.parse(str(RoundId(100, 0, 2)))
    RoundId(step=100, phase=0, fragment=2, level=0)
    """

    step: int
    phase: int = 0
    fragment: int = 0
    level: int = 0

    @classmethod
    def parse(cls, text: str) -> RoundId:
        step, phase, fragment, level = map(int, text.split(".") if text.count(".") == 3 else f"{text}.0".split("."))
        if min(step, phase, fragment, level) < 0:
            raise ValueError(f"A round has a step, a phase, a fragment and a level, none below 0; got {text!r}.")
        return cls(step, phase, fragment, level)

    def __str__(self) -> str:
        return f"{self.step}.{self.phase}.{self.fragment}" + (f".{self.level}" if self.level else "")

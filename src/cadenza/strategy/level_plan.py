"""The choices of one level."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any, Literal, SupportsIndex

from cadenza.codecs import ChoosingCodec, Codec, ShapedCodec, fp32
from cadenza.codecs import auto as auto_codec
from cadenza.common.checks import check_not_negative
from cadenza.common.protocols import check_piece
from cadenza.outer import Outer, mean
from cadenza.schedules import Schedule, TimedSchedule, auto, every
from cadenza.topology import Level, RoundTopology

__all__ = ["Groups", "LevelPlan", "as_codec", "as_schedule"]

Groups = Literal["all", "host", "site"] | int | tuple[tuple[int, ...], ...] | RoundTopology


def as_schedule(period: Any) -> Schedule:
    """Return a schedule as it is, `every(n)` for a whole number of steps of whatever library, and `auto()` for "auto".

    >>> as_schedule(8)
    Every(period=8, offset=0)
    """
    if isinstance(period, SupportsIndex) and not isinstance(period, bool):
        return every(operator.index(period))
    if isinstance(period, str) and period == "auto":
        return auto()
    schedule: Schedule = period
    return schedule


def as_codec(codec: Codec | Literal["auto"] | None, otherwise: Codec | None = None) -> Codec:
    """Return a codec as it is, `codecs.auto()` for "auto", and for None another, fp32 by default.

    >>> as_codec(None).name, as_codec("auto").name
    ('fp32', 'auto(bf16, int8, e3m0)')
    """
    if codec is None:
        return otherwise or fp32()
    return auto_codec() if codec == "auto" else codec


@dataclass(frozen=True)
class LevelPlan:
    """The choices of one level.

    Args:
        schedule: When; a number means that many steps, "auto" the schedule that measures and decides itself.
        groups: With whom: "all", the ranks of one "host", a number for runs of that many ranks, explicit groups, or a
            `RoundTopology` that cuts the ranks anew for every round. Where workers come and go, those of one "site"
            (`cadenza.join`).
        codec: How differences are written on the wire; "auto" is `cadenza.codecs.auto()`.
        outer: What becomes of the mean.
        name: What the level is called in reports; "level 0" and so on without one.
        keep_anchor: Send differences from an anchor also where a plain mean would not need one.
        delay: How many steps training goes on between the launch of a round and its landing; None: the strategy's.
        through_host: Send values on a GPU through the host's memory, by Gloo: where NCCL does not reach the others.

    >>> LevelPlan(8).schedule
    Every(period=8, offset=0)
    """

    schedule: Schedule
    groups: Groups = "all"
    codec: Codec = field(default_factory=fp32)
    outer: Outer = field(default_factory=mean)
    name: str = field(default="", metadata={"local": "it only stands in reports"})
    keep_anchor: bool = False
    delay: int | None = None
    through_host: bool = field(default=False, metadata={"added": "states were saved before it was there"})

    def __post_init__(self) -> None:
        object.__setattr__(self, "schedule", as_schedule(self.schedule))
        object.__setattr__(self, "codec", as_codec(self.codec))
        check_piece(self.schedule, Schedule, what="schedule", such_as="cadenza.every(16)")
        check_piece(self.codec, Codec, what="codec", such_as="cadenza.codecs.int8()")
        check_piece(self.outer, Outer, what="outer", such_as="cadenza.nesterov()")
        if self.delay is not None:
            check_not_negative("delay", self.delay)
        self._check_groups()
        self._check_codec()

    @property
    def anchored(self) -> bool:
        """Whether the level keeps an anchor, and sends differences from it."""
        return self.keep_anchor or not self.outer.plain or not self.codec.exact

    @property
    def follows(self) -> bool:
        """Whether period or codec follow numbers that must be the same on all ranks: the drift, or measured times."""
        timed = isinstance(self.schedule, TimedSchedule) or isinstance(self.codec, ChoosingCodec)
        return self.schedule.uses_drift or timed

    @property
    def regroups(self) -> bool:
        """Whether the groups change from round to round."""
        return not isinstance(self.groups, str | int | tuple)

    def _check_groups(self) -> None:
        if isinstance(self.groups, tuple):
            if not all(isinstance(group, tuple) for group in self.groups):
                raise ValueError(f"Explicit groups are a tuple of tuples of ranks; got {self.groups!r}.")
            Level(self.groups)  # refuses empty and overlapping groups
            return
        sized = isinstance(self.groups, int) and not isinstance(self.groups, bool) and self.groups >= 1
        given: object = self.groups
        made = not isinstance(given, type) and callable(getattr(given, "groups", None))
        if not sized and not made and self.groups not in ("all", "host", "site"):
            raise ValueError(
                'groups is "all", "host", "site", a number of ranks, a tuple of tuples of ranks or a '
                f"cadenza.topology.RoundTopology; got {self.groups!r}."
            )

    def _check_codec(self) -> None:
        if self.codec.shaped and not (self.codec.sparse and isinstance(self.codec, ShapedCodec)):
            raise ValueError(
                f"{self.codec.name} asks for the tensors' shapes, so its values are gathered, not reduced: it must be "
                "sparse and have for_shapes() and split(); see cadenza.codecs.ShapedCodec."
            )

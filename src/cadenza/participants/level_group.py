"""This worker's group at one level: who they are, how they are reached, and what the level's plan says."""

from __future__ import annotations

from dataclasses import dataclass

from cadenza.errors import NotInitializedError
from cadenza.strategy import LevelPlan
from cadenza.transports import Transport

__all__ = ["LevelGroup", "Stage"]


@dataclass(frozen=True)
class Stage:
    """The way of an outer level through an inner one: reduce inside, exchange across, gather inside.

    `inside` is the transport of this rank's group at the inner level, `across` that of the ranks that have its position
    in the other inner groups. So a site of several hosts sends the model once, and not once for each of them.
    """

    inside: Transport
    across: Transport


class LevelGroup:
    """This worker's group at one level; it is Cadenza's own, so that nobody else's collectives cross it.

    Attributes:
        plan: The choices of the level.
        name: What the level is called in reports.
        stage: The way through the level inside it, if there is one.
    """

    def __init__(self, plan: LevelPlan, name: str, transport: Transport | None, stage: Stage | None = None) -> None:
        self.plan = plan
        self.name = name
        self.stage = stage
        self._transport = transport

    @property
    def transport(self) -> Transport:
        """The way to the other members."""
        if self._transport is None:
            raise NotInitializedError(f"The workers of {self.name} have not come together yet.")
        return self._transport

    @transport.setter
    def transport(self, transport: Transport) -> None:
        self._transport = transport

    @property
    def connected(self) -> bool:
        """Whether the members have come together yet."""
        return self._transport is not None

    @property
    def alone(self) -> bool:
        """Whether this worker is the only member."""
        return len(self.transport.members) == 1

    @property
    def this_rank(self) -> int:
        """This worker's number."""
        return self.transport.members[self.transport.position]

    @property
    def agrees(self) -> bool:
        """Whether a round leaves all workers of the level with one anchor; not so in pairs, or where anchors differ."""
        return not self.plan.regroups and not self.plan.outer.diverges

    def abandon(self) -> None:
        """Let go of the level's connections."""
        self.transport.abandon()
        if self.stage is not None:
            self.stage.across.abandon()

"""This worker's group at one level: who they are, how they are reached, and what the level's plan says."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cadenza.errors import NotInitializedError
from cadenza.participants.island import Island
from cadenza.strategy import LevelPlan
from cadenza.transports import Transport

__all__ = ["LevelGroup", "Stage"]


@dataclass(frozen=True)
class Stage:
    """The way of an outer level through an inner one: reduce inside, exchange across, gather inside.

    `inside` is the transport of this rank's group at the inner level, `across` that of the ranks that have its position
    in the other inner groups. So a site of several hosts sends the model once, and not once for each of them. Where all
    inside are `alike`, the ranks of one replica, there is nothing to reduce.
    """

    inside: Transport
    across: Transport
    alike: bool = False


class LevelGroup:
    """This worker's group at one level; it is Cadenza's own, so that nobody else's collectives cross it.

    Attributes:
        plan: The choices of the level.
        name: What the level is called in reports.
        stage: The way through the level inside it, if there is one.
        island: The ranks that are this worker.
    """

    def __init__(
        self,
        plan: LevelPlan,
        name: str,
        transport: Transport | None,
        stage: Stage | None = None,
        island: Island | None = None,
    ) -> None:
        self.plan = plan
        self.island = island or Island()
        self.name = name
        self.stage = stage
        self._transport = transport
        self._expected: tuple[int, ...] = ()
        self._position = 0

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
    def members(self) -> tuple[int, ...]:
        """Who they are; before they have come together, who is expected to come."""
        return self._expected if self._transport is None else tuple(self._transport.members)

    @property
    def position(self) -> int:
        """Which of them this worker is."""
        return self._position if self._transport is None else self._transport.position

    def expect(self, members: Iterable[int], worker: int) -> None:
        """Know who will be in the group, this worker among them, before they have come together."""
        self._expected = tuple(sorted({*members, worker}))
        self._position = self._expected.index(worker)

    @property
    def alone(self) -> bool:
        """Whether this worker is the only member."""
        return len(self.transport.members) == 1

    @property
    def this_rank(self) -> int:
        """This worker's number."""
        return self.transport.members[self.transport.position]

    @property
    def way_across(self) -> Transport:
        """The way of encoded values: through the stage, if there is one."""
        return self.transport if self.stage is None else self.stage.across

    @property
    def reduces_inside(self) -> bool:
        """Whether what crosses is the sum of a group, and not this member's own."""
        return self.stage is not None and not self.stage.alike

    @property
    def ranks(self) -> tuple[int, ...]:
        """The numbers of the members where ranks are counted: of those that have this one's place in a replica."""
        return tuple(self.island.number(member) for member in self.members)

    @property
    def agrees(self) -> bool:
        """Whether a round leaves all workers of the level with one anchor; not so in pairs, or where anchors differ."""
        return not self.plan.regroups and not self.plan.outer.diverges

    def abandon(self) -> None:
        """Let go of the level's connections."""
        self.transport.abandon()
        if self.stage is not None:
            self.stage.across.abandon()

"""What the engine asks of those who train together, whether they are always the same or come and go.

A round goes through three verbs: `admit` finds out who is in it, `agree` exchanges the values and decides whether the
result counts, `commit` notes that it has landed. Between `admit` and `agree`, `catch_up` gives those who are behind the
state of the others. Nothing here calls the engine: it hands in its state (`SharedState`), and obeys what comes back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from cadenza.participants.level_group import LevelGroup
from cadenza.participants.round_id import RoundId
from cadenza.transports import Transport

__all__ = ["Admission", "FailedRound", "Participants", "SharedState"]

Result = TypeVar("Result")


@dataclass(frozen=True)
class FailedRound:
    """A round that failed and changed nothing.

    Attributes:
        reason: Why.
        absent: Workers that were expected and did not come.
        own_fault: Whether this worker's own values were the reason.
    """

    reason: str
    absent: tuple[int, ...] = ()
    own_fault: bool = False


@dataclass(frozen=True)
class Admission:
    """Leave to hold a round.

    Attributes:
        catching_up: Whether somebody must take the state of the others first, so that rounds in flight land now.
        settled: Whether the others hold the result of this step's round already, so that none is needed.
    """

    catching_up: bool = False
    settled: bool = False


class SharedState(Protocol):
    """A worker's copy of what all share: the model and what rounds have made of it."""

    def take_from_first(self, transport: Transport) -> None:
        """Give the whole model the values that the first member of a transport has."""
        ...

    def refit(self, level: int) -> None:
        """Make what is kept between rounds of a level fit the members that have come together now."""
        ...

    def shared_tensors(self) -> Mapping[str, torch.Tensor]:
        """Return what all workers share, by name, in one order; the tensors themselves."""
        ...

    def shared_facts(self) -> dict[str, Any]:
        """Return what all workers share besides tensors, as JSON can hold it."""
        ...

    def adopt(self, facts: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], *, new: bool, level: int) -> None:
        """Take the others' state; a worker that is not new keeps what it has done since it was last in step.

        It came to a round of a level; what it shares with others at levels inside that one moves with it.
        """
        ...


class Participants(Protocol):
    """The workers that hold a synchronizer's rounds together."""

    @property
    def levels(self) -> Sequence[LevelGroup]:
        """This worker's group of every level; with all that ever meet there, where the pairs change."""
        ...

    @property
    def members(self) -> tuple[int, ...]:
        """The workers that held the last round together, of the outermost level, ascending."""
        ...

    @property
    def always_together(self) -> bool:
        """Whether all are there at any moment, so that they can be asked for something outside of rounds too."""
        ...

    @property
    def atomic(self) -> bool:
        """Whether a round may fail and training goes on, so that nothing may change before all have agreed."""
        ...

    @property
    def behind(self) -> bool:
        """Whether rounds were, or may have been, held without this worker: it comes to the next one."""
        ...

    def missed(self, round: RoundId) -> bool:
        """Say whether a round that this worker came to was held without it, or not at all."""
        ...

    @property
    def over(self) -> bool:
        """Whether the others were seen to have finished."""
        ...

    @property
    def idle(self) -> bool:
        """Whether this worker has only just joined, and has nothing yet to contribute."""
        ...

    @property
    def last_phases(self) -> Sequence[int]:
        """The phases (`RoundId.phase`) in which the last round is attempted."""
        ...

    @property
    def held(self) -> int:
        """How many rounds this worker has seen land, where that is counted."""
        ...

    def resume(self, held: int, marks: Sequence[str]) -> None:
        """Go on from a saved state that has seen so many rounds, whatever was known before.

        `marks` tell the states of each level apart; an empty one begins at the outermost anchor.
        """
        ...

    def group(self, level: int, round: int) -> LevelGroup:
        """Return with whom this worker holds the round of a level that comes after so many others."""
        ...

    def start(self, state: SharedState) -> None:
        """Start from one state together with the others, unless they have begun: then `awaited` says where they are."""
        ...

    def awaited(self) -> RoundId | None:
        """Wait, if this worker was in no round yet, for one that the others hold; None if it was."""
        ...

    def summons(self, step: int) -> RoundId | None:
        """Return the round that the others are at, if this worker is behind and should come to it now."""
        ...

    def follow(self, own: RoundId, *, after: RoundId) -> RoundId | None:
        """Wait, where this worker has run out of data, for the next round that others hold; None if none will come.

        Args:
            own: The next round that is due; it is returned too where nobody is left who takes steps.
            after: The last one that this worker was, or could have been, at.
        """
        ...

    def admit(
        self, round: RoundId, digest: str, *, settled: bool = False, last: bool = False
    ) -> Admission | FailedRound:
        """Find out who is in a round, and connect them.

        Args:
            round: Which one.
            digest: A fingerprint of what this worker is about to send.
            settled: Whether this worker holds the result of this step's round already.
            last: Whether none follows, so that all are waited for: who is left out of it ends with less.
        """
        ...

    def catch_up(self, state: SharedState) -> FailedRound | None:
        """Let those who are behind take the others' state, after `admit` and before anything is sent."""
        ...

    def agree(self, round: RoundId, exchange: Callable[[], Result]) -> Result | FailedRound:
        """Exchange the values of a round and return the result, if all members have one."""
        ...

    def commit(self, round: RoundId, wire_s: float, shares: Sequence[float] = ()) -> None:
        """Count a round that has landed, and learn how long such rounds take; `shares` is what each member counted."""
        ...

    def prepare_last_round(self) -> None:
        """Wait for whatever a last round needs."""
        ...

    def end(self, *, together: bool) -> None:
        """Note that training is over, after a last round in which all came together or not."""
        ...

    def close(self) -> None:
        """Leave the others, without any collective."""
        ...

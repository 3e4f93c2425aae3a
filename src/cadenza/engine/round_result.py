"""What a round was: who took part with which weight, and what it cost."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from cadenza.engine.exchange import Exchanged
from cadenza.engine.header import HEADER_BYTES, Header
from cadenza.engine.measuring import Measured
from cadenza.weighting import Weighed

__all__ = ["RoundResult"]


@dataclass
class RoundResult:
    """A round whose values are exchanged.

    Attributes:
        headers: What the members told, in their order.
        weighed: What each of them counts.
        weights: The factors on their contributions, steps made up for.
        exchanged: What the exchange cost and lost.
        wire_s: How long it took.
        measured: What was measured of it, the same numbers on all members.
        members: The members' numbers.
        position: Which of them this worker is.
    """

    headers: list[Header]
    weighed: Weighed
    weights: list[float]
    exchanged: Exchanged = field(default_factory=Exchanged)
    wire_s: float = 0.0
    measured: Measured = field(default_factory=Measured)
    members: tuple[int, ...] = ()
    position: int = 0

    @property
    def weightless(self) -> bool:
        """Whether nobody had anything to add, as when all have run out of data; then all count alike."""
        counted = (h.weight for i, h in enumerate(self.headers) if i not in self.weighed.left_out)
        return not any(counted) or not any(self.weights)

    @property
    def own_share(self) -> float:
        """What this worker's values beside the parameters count, relative to the others'; 1 where all count alike."""
        shares = self.weighed.shares
        return 1.0 if len(set(shares)) == 1 else shares[self.position]

    @property
    def left_out(self) -> list[int]:
        """The workers whose contributions did not count because they would have done harm."""
        return [self.members[position] for position in sorted(self.weighed.left_out)]

    @property
    def own_left_out(self) -> bool:
        """Whether this worker's contribution was left out."""
        return self.position in self.weighed.left_out

    def facts(self) -> dict[str, Any]:
        """Return everything, as JSON can hold it."""
        return {
            "headers": [header.pack().hex() for header in self.headers],
            "weighed": [list(self.weighed.shares), sorted(self.weighed.left_out), self.weighed.state],
            "weights": self.weights,
            "exchanged": asdict(self.exchanged),
            "wire_s": self.wire_s,
            "measured": asdict(self.measured),
            "members": self.members,
            "position": self.position,
        }

    @classmethod
    def from_facts(cls, facts: dict[str, Any]) -> RoundResult:
        """Return what `facts` told."""
        shares, left_out, state = facts["weighed"]
        return cls(
            [Header.unpack(bytes.fromhex(header).ljust(HEADER_BYTES, b"\0")) for header in facts["headers"]],
            Weighed(tuple(shares), frozenset(left_out), state),
            facts["weights"],
            Exchanged(**facts["exchanged"]),
            facts["wire_s"],
            Measured(**facts["measured"]),
            tuple(facts["members"]),
            facts["position"],
        )

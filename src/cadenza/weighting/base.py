"""What every weighting promises, and what it sees of the members of a round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias, runtime_checkable

__all__ = ["Contribution", "PlainContribution", "State", "Weighed", "Weighting", "needs_anchor"]

State: TypeAlias = dict[str, float | list[float]]


class Contribution(Protocol):
    """What a header tells of one member; a round's own headers fulfil it.

    >>> def heaviest(members: Sequence[Contribution]) -> float:
    ...     return max(member.weight for member in members)
    >>> heaviest([PlainContribution(weight=2.0), PlainContribution()])
    2.0
    """

    @property
    def weight(self) -> float:
        """What the member says it counts: `Weighting.own(…)`, or 0 if it has nothing to add."""
        ...

    @property
    def norm2(self) -> float:
        """The squared norm of its difference, or of its values where there is no anchor."""
        ...

    @property
    def steps(self) -> int:
        """The local steps since its last round; 0 if they are not counted."""
        ...

    @property
    def exhausted(self) -> bool:
        """Whether it has run out of data."""
        ...

    @property
    def faulty(self) -> bool:
        """Whether its values were not finite, so that it sent zeros."""
        ...


@dataclass(frozen=True)
class PlainContribution:
    """A contribution as plain values, for wrappers of other weightings and for tests.

    >>> PlainContribution(weight=2.0).norm2
    0.0
    """

    weight: float = 1.0
    norm2: float = 0.0
    steps: int = 0
    exhausted: bool = False
    faulty: bool = False


@dataclass(frozen=True)
class Weighed:
    """What a weighting makes of a round's headers.

    Attributes:
        shares: The factor on each member's contribution, in the order of the headers; usually they add up to 1.
        left_out: Positions of the members whose contribution does not count because it would do harm.
        state: The state after this round; it is kept only if the round lands.
        refuse: Whether the round must fail, on all members, because of `left_out`.

    >>> Weighed((0.5, 0.5)).left_out
    frozenset()
    """

    shares: tuple[float, ...]
    left_out: frozenset[int] = frozenset()
    state: State = field(default_factory=dict)
    refuse: bool = False


@runtime_checkable
class Weighting(Protocol):
    """What a weighting gives. It depends on nothing but its arguments, so that all members weigh alike.

    One that judges differences, not values, says so by `needs_anchor = True`; then all levels keep an anchor.

    >>> from cadenza.weighting import samples
    >>> def next_shares(weighting: Weighting, used: Sequence[float]) -> tuple[float, ...]:
    ...     members = [PlainContribution(weight=weighting.own(count)) for count in used]
    ...     return weighting.weigh(members, weighting.start()).shares
    >>> next_shares(samples(), [30, 10])
    (0.75, 0.25)
    """

    @property
    def needs_samples(self) -> bool:
        """Say whether `sync.step(samples=…)` is required."""

    def start(self) -> State:
        """Return the state before the first round: a small dict that can be written as JSON."""

    def own(self, samples: float) -> float:
        """Return what this worker says it counts, given the samples that it has used since its last round."""

    def weigh(self, contributions: Sequence[Contribution], state: State) -> Weighed:
        """Return each member's share; the same headers and state give the same on all members."""


def needs_anchor(weighting: object) -> bool:
    """Say whether a weighting judges differences from an anchor, so that levels must keep one.

    >>> from cadenza.weighting import edit_norms, samples
    >>> needs_anchor(samples()), needs_anchor(edit_norms())
    (False, True)
    """
    return bool(getattr(weighting, "needs_anchor", False))

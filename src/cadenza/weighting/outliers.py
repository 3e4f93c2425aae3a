"""Leave out contributions that would harm everyone: not finite, or far larger than the others'.

>>> members = [PlainContribution(norm2=norm2) for norm2 in (1.0, 1.2, 1e9)]
>>> weighed = outliers(explosion=10.0).weigh(members, {})
>>> weighed.shares, sorted(weighed.left_out)
((0.5, 0.5, 0.0), [2])
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low

from cadenza.weighting.base import Contribution, PlainContribution, State, Weighed, Weighting, needs_anchor
from cadenza.weighting.uniform import uniform

__all__ = ["Outliers", "outliers"]

_FEWEST = 3  # contributions; of two nobody can say which one is wrong
_ABSURD = 1e6  # times the norm of the other one: but this cannot be training
_ALIKE = uniform()


@dataclass(frozen=True)
class Outliers:
    """Another weighting, for all but the contributions that would do harm; made by `outliers`.

    >>> Outliers(uniform(), explosion=None).needs_samples
    False
    """

    of: Weighting
    explosion: float | None = 10.0
    leave_out: bool = True

    def __post_init__(self) -> None:
        if self.explosion is not None and not self.explosion > 1:
            raise ValueError(f"explosion is a multiple of the median norm, above 1, or None; got {self.explosion!r}.")

    @property
    def needs_samples(self) -> bool:
        return self.of.needs_samples

    @property
    def needs_anchor(self) -> bool:
        return needs_anchor(self.of)

    def start(self) -> State:
        return self.of.start()

    def own(self, samples: float) -> float:
        return self.of.own(samples)

    def weigh(self, contributions: Sequence[Contribution], state: State) -> Weighed:
        harmful = self._harmful(contributions)
        rest = [_counting_nothing(m) if i in harmful else m for i, m in enumerate(contributions)]
        weighed = self.of.weigh(rest, state)
        left_out = weighed.left_out | harmful
        refuse = weighed.refuse or bool(harmful and not self.leave_out)
        return Weighed(weighed.shares, left_out, weighed.state, refuse)

    def _harmful(self, contributions: Sequence[Contribution]) -> frozenset[int]:
        """Return the positions of what was not finite, and of what is too large beside the others."""
        faulty = {i for i, member in enumerate(contributions) if member.faulty}
        norms = [member.norm2 for member in contributions if member.weight > 0 and not member.faulty]
        if self.explosion is None or not norms:
            return frozenset(faulty)
        times = self.explosion if len(norms) >= _FEWEST else max(self.explosion, _ABSURD)
        limit = times**2 * median_low(norms)  # the lower one: half of the contributions cannot pull it up
        large = {i for i, member in enumerate(contributions) if member.weight > 0 and member.norm2 > limit > 0}
        return frozenset(faulty | large)


def _counting_nothing(member: Contribution) -> PlainContribution:
    return PlainContribution(0.0, member.norm2, member.steps, member.exhausted, faulty=True)


def outliers(of: Weighting = _ALIKE, *, explosion: float | None = 10.0, leave_out: bool = True) -> Outliers:
    """Weigh as `of` does, but without contributions that are not finite or explode.

    Args:
        of: How the others are weighed.
        explosion: How many times the group's median norm is too much; None: any finite norm is accepted.
        leave_out: Whether the round goes on without them; otherwise it fails on all members.

    >>> outliers(leave_out=False).weigh([PlainContribution(faulty=True, weight=0.0)], {}).refuse
    True
    """
    return Outliers(of, explosion, leave_out)

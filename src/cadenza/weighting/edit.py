"""EDiT's weighting (arXiv 2412.07210): who moves far counts little, and who moves strangely far counts nothing.

>>> from cadenza.weighting import PlainContribution
>>> members = [PlainContribution(norm2=1.0), PlainContribution(norm2=4.0)]  # norms 1 and 2
>>> [round(share, 3) for share in edit_norms().weigh(members, {}).shares]
[0.731, 0.269]
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Context, Decimal
from typing import ClassVar, NamedTuple, cast

from cadenza.common.checks import as_count, as_positive, check_share
from cadenza.weighting.base import Contribution, State, Weighed
from cadenza.weighting.shares import shares_of

__all__ = ["EditNorms", "edit_norms"]

_DIGITS = Context(prec=20)  # more than a float has


@dataclass(frozen=True)
class EditNorms:
    """Softmax of the negative norms of the differences, without anomalies; made by `edit_norms`.

    The state has, by the members' positions, the rounds, the sum of the weights, the mean and the variance of a moving
    average of their norms, and in how many rounds in a row all were anomalous. Another number of members starts anew.

    >>> EditNorms().own(samples=32.0)
    1.0
    """

    threshold: float = 3.0
    smoothing: float = 0.02
    observe: int = 10
    temperature: float = 1.0
    patience: int | None = 5
    needs_samples: ClassVar[bool] = False
    needs_anchor: ClassVar[bool] = True

    def start(self) -> State:
        return {}

    def own(self, samples: float) -> float:
        return 1.0

    def weigh(self, contributions: Sequence[Contribution], state: State) -> Weighed:
        counting = [i for i, member in enumerate(contributions) if member.weight > 0 and not member.faulty]
        if not counting:
            return Weighed(shares_of(contributions), state=state)
        seen = _read(state, len(contributions))
        norms = [math.sqrt(member.norm2) for member in contributions]
        accepted = [i for i in counting if self._is_usual(norms[i], seen[i])]
        if not accepted:
            return Weighed((0.0,) * len(contributions), state=self._after_anomalies(state))
        for i in accepted:
            seen[i] = seen[i].after(norms[i], self.smoothing)
        return Weighed(self._shares(norms, accepted), state=_write(seen))

    def _is_usual(self, norm: float, seen: _Seen) -> bool:
        """Say whether a norm is not far above those that the member had before, as far as that can be told."""
        limit = self.threshold * math.sqrt(seen.variance)
        unknown = seen.rounds < self.observe or not limit
        return math.isfinite(norm) and (unknown or norm - seen.mean <= limit)

    def _shares(self, norms: Sequence[float], accepted: Sequence[int]) -> tuple[float, ...]:
        least = min(norms[i] for i in accepted)
        parts = {i: _exp((least - norms[i]) / self.temperature) for i in accepted}
        total = sum(parts.values())
        return tuple(parts.get(i, 0.0) / total for i in range(len(norms)))

    def _after_anomalies(self, state: State) -> State:
        """Return the state after a round in which all were anomalous: a new one if that has become the usual case."""
        in_a_row = cast(float, state.get("all_anomalous", 0.0)) + 1
        return {} if in_a_row == self.patience else {**state, "all_anomalous": in_a_row}


class _Seen(NamedTuple):
    """The moving average of one member's norms, in which the first ones count no less than they should."""

    rounds: float = 0.0
    total: float = 0.0
    mean: float = 0.0
    variance: float = 0.0

    def after(self, norm: float, smoothing: float) -> _Seen:
        total = (1 - smoothing) * self.total + smoothing
        rate = smoothing / total
        mean = self.mean + rate * (norm - self.mean)
        variance = (1 - rate) * self.variance + rate * (norm - mean) * (norm - mean)
        return _Seen(self.rounds + 1, total, mean, variance)


def _read(state: State, members: int) -> list[_Seen]:
    columns = [cast(list[float], state.get(name, [])) for name in _Seen._fields]
    seen = [_Seen(*row) for row in zip(*columns, strict=True)]
    return seen if len(seen) == members else [_Seen()] * members


def _write(seen: Sequence[_Seen]) -> State:
    return {name: [row[i] for row in seen] for i, name in enumerate(_Seen._fields)}


def _exp(exponent: float) -> float:
    """Return e to a power, rounded alike on all machines, which the C library's is not: all members must agree."""
    return float(Decimal(exponent).exp(_DIGITS))


def edit_norms(
    *,
    threshold: float = 3.0,
    smoothing: float = 0.02,
    observe: int = 10,
    temperature: float = 1.0,
    patience: int | None = 5,
) -> EditNorms:
    """Weigh workers by the norms G of their differences, as EDiT does (arXiv 2412.07210).

    A worker whose G is more than `threshold` standard deviations above its own moving average is anomalous: it counts
    nothing, and goes on from the anchor like the others. The others have the shares softmax(−G / temperature). If all
    are anomalous, all go back to the last anchor, and the outer update keeps its momentum.

    The average is μ ← μ + r·(G − μ), σ² ← (1 − r)·σ² + r·(G − μ)². The paper leaves its start open: r is `smoothing`,
    corrected for the rounds that are missing at the start, and the first `observe` rounds of a worker are only
    observed. An anomaly does not enter the average. Where all were anomalous in `patience` rounds in a row (None:
    however often, as in the paper), that is how training is now, and the averages start anew.

    Norms are of differences from an anchor, so levels keep one under this weighting.

    >>> from cadenza.weighting import PlainContribution
    >>> members, large = [PlainContribution(norm2=norm2) for norm2 in (1.0, 1.21)], PlainContribution(norm2=9.0)
    >>> weighting = edit_norms(observe=2)
    >>> state = weighting.start()
    >>> for pair in [members, members[::-1], members]:
    ...     state = weighting.weigh(pair, state).state
    >>> weighting.weigh([members[0], large], state).shares
    (1.0, 0.0)
    """
    check_share("smoothing", smoothing, of="a new norm in the moving average")
    return EditNorms(
        as_positive("threshold", threshold),
        float(smoothing),
        as_count("observe", observe),
        as_positive("temperature", temperature),
        patience if patience is None else as_count("patience", patience),
    )

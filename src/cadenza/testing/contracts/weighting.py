"""The contract of weightings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import deepcopy

from cadenza.testing.contracts.promises import Contract
from cadenza.weighting import Contribution, PlainContribution, State, Weighed, Weighting

__all__ = ["check_weighting"]


def check_weighting(weighting: Weighting) -> None:
    """Raise AssertionError if a weighting breaks a promise of `cadenza.weighting.Weighting`.

    >>> from cadenza.weighting import outliers
    >>> check_weighting(outliers(explosion=5.0))
    """
    contract = Contract(weighting, Weighting)
    contract.is_whole()
    kind = type(weighting.needs_samples)
    contract.holds(kind is bool, f"needs_samples is True or False; it is a {kind.__name__}")
    for used in (0.0, 1.0, 32.5):
        own: object = weighting.own(used)
        sound = isinstance(own, int | float) and math.isfinite(own) and own >= 0
        contract.holds(sound, f"own gives a finite number that is not negative; {used} samples gave {own!r}")
    state = weighting.start()
    contract.holds(state == weighting.start(), "start gives the same state every time")
    for members in _rounds():  # the state goes on from round to round, and the number of members changes
        state = _check_round(contract, weighting, members, state)


def _check_round(contract: Contract, weighting: Weighting, members: Sequence[Contribution], state: State) -> State:
    before = deepcopy(state)
    weighed = weighting.weigh(members, state)
    contract.holds(state == before, f"weigh leaves the state that it is given alone; not with {members}")
    saved = contract.through_json(before)
    again = deepcopy(weighting).weigh(tuple(members), saved)
    contract.holds(
        weighed == again, f"all members come to the same from the same headers and state; not with {members}"
    )
    _check_shares(contract, weighed, members)
    return weighed.state


def _check_shares(contract: Contract, weighed: Weighed, members: Sequence[Contribution]) -> None:
    shares, case = weighed.shares, f"not with {members}: {weighed.shares}"
    contract.holds(len(shares) == len(members), f"every member has a share; {case}")
    contract.holds(all(math.isfinite(s) and s >= 0 for s in shares), f"shares are finite and not negative; {case}")
    outside = sorted(set(weighed.left_out) - set(range(len(members))))
    contract.holds(not outside, f"left_out are positions of members; {outside} are none of {len(members)}")
    counting = [m.weight > 0 and i not in weighed.left_out for i, m in enumerate(members)]
    if any(counting):
        idle = [share for share, counts in zip(shares, counting, strict=True) if not counts]
        contract.holds(not any(idle), f"who has weight 0 or is left out has the share 0; {case}")
        contract.holds(any(shares), f"somebody counts if somebody has something to add; {case}")
    kept = not weighed.refuse or bool(weighed.left_out)
    contract.holds(kept, f"a round is refused only because of somebody who is left out; not with {members}")


def _rounds() -> list[list[PlainContribution]]:
    """Return the headers of rounds of all kinds: alike, unequal, without data, with an outlier, not finite, alone."""
    alike = [PlainContribution(1.0, norm2=4.0, steps=8) for _ in range(4)]
    unequal = [PlainContribution(float(i), norm2=1.0 + i, steps=4 * i) for i in range(1, 6)]
    idle = PlainContribution(0.0, norm2=2.0, exhausted=True)
    sick = PlainContribution(0.0, norm2=0.0, faulty=True)
    huge = PlainContribution(1.0, norm2=1e12, steps=8)
    still = [PlainContribution(1.0, norm2=0.0) for _ in range(3)]
    rounds = [alike, unequal, [idle, *alike], [*alike, huge], [sick, *alike], [*unequal, sick, huge], still]
    return [*rounds, [idle, idle], [sick, sick, sick], alike[:1], [idle], alike]

"""The contract of fault policies."""

from __future__ import annotations

import math
from itertools import combinations

from cadenza.faults import FaultPolicy, Poison
from cadenza.testing.contracts.promises import Contract

__all__ = ["check_fault_policy"]


def check_fault_policy(policy: FaultPolicy) -> None:
    """Raise AssertionError if a policy breaks a promise of `cadenza.faults.FaultPolicy`.

    >>> from cadenza.faults import shrink
    >>> check_fault_policy(shrink(min_workers=2))
    """
    contract = Contract(policy, FaultPolicy)
    contract.is_whole()
    contract.holds(bool(policy.name), "it has a name for messages")
    contract.holds(isinstance(policy.tolerant, bool), f"tolerant is True or False; it is {policy.tolerant!r}")
    _check_enough(contract, policy)
    _check_patience(contract, policy)
    contract.holds(
        policy.poison is None or isinstance(policy.poison, Poison),
        f"poison is a cadenza.faults.Poison or None; it is {policy.poison!r}",
    )


def _check_enough(contract: Contract, policy: FaultPolicy) -> None:
    last = frozenset(range(6))
    contract.holds(policy.enough(last, last), "a round in which nobody is missing may be held; 6 of 6 were refused")
    contract.holds(not policy.enough(frozenset(), last), "nobody cannot hold a round; 0 of 6 were enough")
    sizes = range(len(last))
    for here in (frozenset(chosen) for size in sizes for chosen in combinations(sorted(last), size)):
        enough = policy.enough(here, last)
        contract.holds(enough == policy.enough(set(here), set(last)), "all workers come to one answer about one set")
        for more in last - here:
            kept = not enough or policy.enough(here | {more}, last)
            contract.holds(kept, f"who is enough stays so when one more comes; not {sorted(here)} with {more}")


def _check_patience(contract: Contract, policy: FaultPolicy) -> None:
    if not policy.tolerant:
        return
    for name in ("grace_s", "factor", "first_s"):
        value = getattr(policy.patience, name)
        contract.holds(math.isfinite(value) and value > 0, f"patience.{name} is a positive number; it is {value!r}")

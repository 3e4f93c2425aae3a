"""The contract of topologies that change from round to round."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy

from cadenza.testing.contracts.promises import Contract
from cadenza.topology import RoundTopology

__all__ = ["check_round_topology"]

_ROUNDS = (*range(20), 1000, 10**9)


def check_round_topology(topology: RoundTopology, *, sizes: Sequence[int] = range(1, 10)) -> None:
    """Raise AssertionError if a topology breaks a promise of `cadenza.topology.RoundTopology`.

    Args:
        topology: What cuts the ranks.
        sizes: The numbers of ranks for which it is made.

    >>> class Alone:
    ...     def groups(self, round: int, ranks: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    ...         return tuple((rank,) for rank in ranks)
    ...     def __repr__(self) -> str:
    ...         return "Alone()"
    >>> check_round_topology(Alone())
    """
    contract = Contract(topology, RoundTopology)
    contract.is_whole()
    for size in sizes:
        for ranks in (range(size), [3 + 2 * i for i in range(size)]):  # a process group need not begin with rank 0
            for round_ in _ROUNDS:
                _check_round(contract, topology, round_, ranks)


def _check_round(contract: Contract, topology: RoundTopology, round_: int, ranks: Sequence[int]) -> None:
    groups = topology.groups(round_, list(ranks))
    case = f"not so in round {round_} of ranks {list(ranks)}: {groups}"
    kinds = {type(part) for part in (groups, *groups)}
    contract.holds(kinds == {tuple}, f"groups are a tuple of tuples; {case}")
    contract.holds(all(groups), f"every group has a rank; {case}")
    told = sorted(rank for group in groups for rank in group)
    contract.holds(told == sorted(ranks), f"every rank stands in one group; {case}")
    again = deepcopy(topology).groups(round_, tuple(ranks))
    contract.holds(groups == again, f"all ranks cut alike; {case}, then {again}")

"""The contracts of fragmentations, fault policies and topologies: for each promise a piece that breaks it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from cadenza import fragments
from cadenza.faults import RaiseError
from cadenza.testing import (
    check_fault_policy,
    check_fragmentation,
    check_round_topology,
)
from cadenza.topology import RoundTopology

dice = random.Random(0)


@dataclass(frozen=True)
class Cut:
    cut: Callable[[list[str]], list[list[str]]]
    single: bool = False

    def split(self, parameters: Sequence[tuple[str, int]]) -> list[list[str]]:
        return self.cut([name for name, _ in parameters])


FRAGMENTATIONS = {
    "all": (Cut(lambda names: [names[:-1]] if names[:-1] else []), "exactly one fragment"),
    "once": (Cut(lambda names: [names, names] if names else []), "exactly one fragment"),
    "empty": (Cut(lambda names: [names]), "no fragment is empty"),
    "order": (Cut(lambda names: [names[::-1]] if names else []), "keep their order"),
    "alike": (Cut(lambda names: [dice.sample(names, len(names))] if names else []), "cut alike"),
    "single": (Cut(lambda names: [[name] for name in names], single=True), "single means one fragment"),
    "members": (object(), "all members; single, split"),
}


@pytest.mark.parametrize(("broken", "words"), FRAGMENTATIONS.values(), ids=FRAGMENTATIONS)
def test_broken_fragmentations_are_found(broken: Any, words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        check_fragmentation(broken)


class Odd(RaiseError):
    def enough(self, here: Any, last: Any) -> bool:
        return here == last or len(here) % 2 == 1


class Nobody(RaiseError):
    def enough(self, here: Any, last: Any) -> bool:
        return True


class Never(RaiseError):
    def enough(self, here: Any, last: Any) -> bool:
        return False


class Impatient(RaiseError):
    tolerant = True  # type: ignore[assignment]
    patience = SimpleNamespace(grace_s=0.0, factor=1.0, first_s=1.0)  # type: ignore[assignment]


class PoisonInWords(RaiseError):
    poison = "leave_out"  # type: ignore[assignment]


POLICIES = {
    "more stays enough": (Odd(), "stays so when one more comes"),
    "nobody": (Nobody(), "nobody cannot hold a round"),
    "everybody": (Never(), "nobody is missing"),
    "patience": (Impatient(), "patience.grace_s is a positive number"),
    "poison": (PoisonInWords(), "poison is a cadenza.faults.Poison or None"),
    "members": (object(), "all members; name, tolerant"),
}


@pytest.mark.parametrize(("broken", "words"), POLICIES.values(), ids=POLICIES)
def test_broken_fault_policies_are_found(broken: Any, words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        check_fault_policy(broken)


@dataclass(frozen=True)
class Grouping:
    cut: Callable[[int, Sequence[int]], Any]

    def groups(self, round: int, ranks: Sequence[int]) -> Any:
        return self.cut(round, ranks)


TOPOLOGIES = {
    "all": (Grouping(lambda round, ranks: (tuple(ranks[1:]),)), "every group has a rank|stands in one group"),
    "once": (Grouping(lambda round, ranks: (tuple(ranks), tuple(ranks))), "stands in one group"),
    "empty": (Grouping(lambda round, ranks: (tuple(ranks), ())), "every group has a rank"),
    "kind": (Grouping(lambda round, ranks: [list(ranks)]), "tuple of tuples"),
    "alike": (
        Grouping(lambda round, ranks: (tuple(dice.sample(list(ranks), len(ranks))),)),
        "cut alike",
    ),
    "any ranks": (Grouping(lambda round, ranks: (tuple(range(len(ranks))),)), "stands in one group"),
    "members": (object(), "all members; groups"),
}


@pytest.mark.parametrize(("broken", "words"), TOPOLOGIES.values(), ids=TOPOLOGIES)
def test_broken_round_topologies_are_found(broken: RoundTopology, words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        check_round_topology(broken)


def test_a_piece_with_an_address_in_its_fields_is_found() -> None:
    @dataclass(frozen=True)
    class WithAddress(fragments.Whole):
        text: str = "<object at 0x7f00>"

    with pytest.raises(AssertionError, match="the same in every process"):
        check_fragmentation(WithAddress())


def test_the_message_names_the_piece_and_where_its_promises_stand() -> None:
    @dataclass(frozen=True)
    class Nothing(fragments.Whole):
        def split(self, parameters: Any) -> list[list[str]]:
            return []

    with pytest.raises(AssertionError, match=r"Nothing\(\) breaks a promise of cadenza\.fragments\.Fragmentation: "):
        check_fragmentation(Nothing())

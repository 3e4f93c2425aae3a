"""The contract of weightings: for each promise a piece that breaks it, and the words that say so."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from cadenza.testing import (
    check_weighting,
)
from cadenza.weighting import Uniform, Weighed

dice = random.Random(0)


class Negative(Uniform):
    def weigh(self, contributions: Any, state: Any) -> Weighed:
        return Weighed(tuple(-1.0 for _ in contributions))


class TooFew(Uniform):
    def weigh(self, contributions: Any, state: Any) -> Weighed:
        return Weighed((1.0,))


class IgnoresWeights(Uniform):
    def weigh(self, contributions: Any, state: Any) -> Weighed:
        return Weighed(tuple(1 / len(contributions) for _ in contributions))


class DividesByZero(Uniform):
    def weigh(self, contributions: Any, state: Any) -> Weighed:
        total = sum(member.weight for member in contributions) or float("nan")
        return Weighed(tuple(member.weight / total for member in contributions))


class WritesTheState(Uniform):
    def weigh(self, contributions: Any, state: Any) -> Weighed:
        state["rounds"] = state.get("rounds", 0.0) + 1.0
        return super().weigh(contributions, state)


class KeepsATensor(Uniform):
    def weigh(self, contributions: Any, state: Any) -> Weighed:
        return replace(super().weigh(contributions, state), state={"mean": torch.zeros(1)})  # type: ignore[dict-item]


class Guesses(Uniform):
    def weigh(self, contributions: Any, state: Any) -> Weighed:
        return replace(super().weigh(contributions, state), state={"guess": dice.random()})


class RefusesForNothing(Uniform):
    def weigh(self, contributions: Any, state: Any) -> Weighed:
        return replace(super().weigh(contributions, state), refuse=True)


class LeavesOutAStranger(Uniform):
    def weigh(self, contributions: Any, state: Any) -> Weighed:
        return replace(super().weigh(contributions, state), left_out=frozenset({99}))


class LeavesOutWhoCounts(Uniform):
    def weigh(self, contributions: Any, state: Any) -> Weighed:
        return replace(super().weigh(contributions, state), left_out=frozenset({0}))


class CountsBelowNothing(Uniform):
    def own(self, samples: float) -> float:
        return samples - 1.0


WEIGHTINGS = {
    "not negative": (Negative(), "finite and not negative"),
    "a share for each": (TooFew(), "every member has a share"),
    "weight 0": (IgnoresWeights(), "has the share 0"),
    "nobody has data": (DividesByZero(), "finite and not negative"),
    "the state is left alone": (WritesTheState(), "leaves the state"),
    "JSON": (KeepsATensor(), "written as JSON"),
    "alike": (Guesses(), "all members come to the same"),
    "refusal": (RefusesForNothing(), "refused only because"),
    "positions": (LeavesOutAStranger(), "positions of members"),
    "left out": (LeavesOutWhoCounts(), "has the share 0"),
    "own": (CountsBelowNothing(), "own gives a finite number"),
    "members": (object(), "all members; needs_samples"),
}


@pytest.mark.parametrize(("broken", "words"), WEIGHTINGS.values(), ids=WEIGHTINGS)
def test_broken_weightings_are_found(broken: Any, words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        check_weighting(broken)

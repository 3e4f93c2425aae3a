"""The contract of schedules: for each promise a piece that breaks it, and the words that say so."""

from __future__ import annotations

import random
from typing import Any

import pytest

from cadenza.schedules import Adaptive, Every
from cadenza.testing import (
    check_schedule,
)

dice = random.Random(0)


class ForgetsState(Every):
    def after_round(self, n: int, state: Any, drift: float | None) -> Any:
        return {"next": n + 1}


class ChangesState(Every):
    def after_round(self, n: int, state: Any, drift: float | None) -> Any:
        state["next"] = n
        return super().after_round(n, state, drift)


class Rolls(Every):
    def is_due(self, n: int, state: Any) -> bool:
        return dice.random() < 0.5


class BoastsOfItsGap(Every):
    @property
    def shortest_gap(self) -> int:
        return 100


class FollowsDriftInSecret(Adaptive):
    @property
    def uses_drift(self) -> bool:
        return False


class LiesAboutItsCycle(Every):
    @property
    def cycle(self) -> tuple[int, int]:
        return self.period, (self.offset + 1) % self.period


class TakesNoTurns(Every):
    def staggered(self, index: int, count: int) -> Every:
        Every(self.period).staggered(index, count)
        return self


class TakesAnyTurn(Every):
    def staggered(self, index: int, count: int) -> Every:
        return Every(self.period, (index + 1) * self.period // max(count, 1) % self.period)


class SavesASet(Every):
    def start(self) -> Any:
        return {**super().start(), "seen": {1}}

    def after_round(self, n: int, state: Any, drift: float | None) -> Any:
        return {**super().after_round(n, state, drift), "seen": {1}}


class NeverAgain(Every):
    def is_due(self, n: int, state: Any) -> bool:
        return n == state["next"]

    def after_round(self, n: int, state: Any, drift: float | None) -> Any:
        return {"next": state.get("next", 0) + self.period}


SCHEDULES = {
    "one answer": (Rolls(4), "one answer to one question"),
    "the state is left alone": (ChangesState(4), "after_round"),
    "next": (ForgetsState(4), "next"),
    "shortest gap": (BoastsOfItsGap(4), "no gap is below shortest_gap"),
    "drift": (FollowsDriftInSecret(8, 0.1, 2, 16, 2.0), "drift changes nothing"),
    "cycle": (LiesAboutItsCycle(4), "cycle"),
    "turns": (TakesNoTurns(4), "take turns"),
    "impossible turns": (TakesAnyTurn(4), "take turns|refused with a ValueError"),
    "JSON": (SavesASet(4), "written as JSON"),
    "missed rounds": (NeverAgain(4), "missed"),
    "longest gap": (Every(500), "within 400 steps"),
    "members": (object(), "all members; start, is_due"),
}


@pytest.mark.parametrize(("schedule", "words"), SCHEDULES.values(), ids=SCHEDULES)
def test_broken_schedules_are_found(schedule: Any, words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        check_schedule(schedule)

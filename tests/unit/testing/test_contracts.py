"""The contracts find what is wrong: for each promise a piece that breaks it, and the words that say so."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cadenza import codecs, fragments, outer
from cadenza.codecs.integers import Integers
from cadenza.faults import RaiseError
from cadenza.schedules import Adaptive, Every
from cadenza.testing import (
    check_codec,
    check_fault_policy,
    check_fragmentation,
    check_outer,
    check_round_topology,
    check_schedule,
    check_weighting,
)
from cadenza.topology import RoundTopology
from cadenza.weighting import Uniform, Weighed

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


Update = Callable[[torch.Tensor, torch.Tensor, dict[str, torch.Tensor], Any], None]


@dataclass(frozen=True)
class Scripted:
    """An outer update that does what a function says, and is plain SGD otherwise."""

    script: Update
    state: tuple[str, ...] = ("momentum",)
    plain: bool = False
    needs_inner_lr: bool = False
    needs_own: bool = False
    needs_anchor_mean: bool = False
    diverges: bool = False
    clip: float | None = None

    def init(self, anchor: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: torch.zeros_like(anchor) for name in self.state}

    def update(self, anchor: torch.Tensor, delta: torch.Tensor, state: Any, **told: Any) -> None:
        self.script(anchor, delta, state, told)


def step(anchor: torch.Tensor, delta: torch.Tensor, state: Any, told: Any) -> None:
    anchor.sub_(delta, alpha=0.5)


def wrong_way(anchor: torch.Tensor, delta: torch.Tensor, state: Any, told: Any) -> None:
    anchor.add_(delta)


def by_the_norm(anchor: torch.Tensor, delta: torch.Tensor, state: Any, told: Any) -> None:
    anchor.sub_(delta / delta.norm())


def replaces_state(anchor: torch.Tensor, delta: torch.Tensor, state: Any, told: Any) -> None:
    state["momentum"] = state["momentum"] + delta
    anchor.sub_(delta)


SECRET = {"rounds": 0}


def keeps_secrets(anchor: torch.Tensor, delta: torch.Tensor, state: Any, told: Any) -> None:
    SECRET["rounds"] += 1
    anchor.sub_(delta, alpha=1 / SECRET["rounds"])


def uses_own(anchor: torch.Tensor, delta: torch.Tensor, state: Any, told: Any) -> None:
    if told.get("own") is None:
        raise ValueError("own is missing")
    anchor.sub_(delta).sub_(told["own"], alpha=0.1)


def uses_own_if_there(anchor: torch.Tensor, delta: torch.Tensor, state: Any, told: Any) -> None:
    anchor.sub_(delta)
    if told.get("own") is not None:
        anchor.sub_(told["own"], alpha=0.1)


def spoils_own(anchor: torch.Tensor, delta: torch.Tensor, state: Any, told: Any) -> None:
    anchor.sub_(delta)
    if told.get("own") is not None:
        told["own"].zero_()


def explodes(anchor: torch.Tensor, delta: torch.Tensor, state: Any, told: Any) -> None:
    anchor.sub_(delta).div_(0.0)


class GrowsState(Scripted):
    def init(self, anchor: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"momentum": torch.zeros(2 * anchor.numel())}


OUTERS = {
    "direction": (Scripted(wrong_way), "towards the mean"),
    "slices": (Scripted(by_the_norm), "slices make the update of the whole"),
    "state in place": (Scripted(replaces_state), "changes the state in place"),
    "no state of its own": (Scripted(keeps_secrets), "restored from its state|slices"),
    "state of the anchor's size": (GrowsState(step), "of the anchor's size"),
    "finite": (Scripted(explodes), "finite anchor"),
    "plain is exact": (Scripted(step, state=(), plain=True), "plain means exactly"),
    "plain has no state": (
        Scripted(lambda anchor, delta, state, told: anchor.sub_(delta), plain=True),
        "no state and no clipping",
    ),
    "needs what it says": (Scripted(step, needs_inner_lr=True), "with needs_inner_lr"),
    "own is needed": (Scripted(step, needs_own=True), "with needs_own"),
    "anchor_mean is needed": (Scripted(step, needs_anchor_mean=True), "with needs_anchor_mean"),
    "own in secret": (Scripted(uses_own_if_there), "without needs_own"),
    "diverges in secret": (Scripted(uses_own, needs_own=True), "without diverges"),
    "own is left alone": (Scripted(spoils_own), "leaves own"),
    "clip": (replace(outer.nesterov(), clip=-1.0), "clip is None or a norm above 0"),
    "members": (object(), "all members; plain, needs_inner_lr"),
}


@pytest.mark.parametrize(("broken", "words"), OUTERS.values(), ids=OUTERS)
def test_broken_outer_updates_are_found(broken: Any, words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        check_outer(broken)


def test_an_outer_update_that_says_what_it_does_is_accepted() -> None:
    check_outer(Scripted(uses_own, needs_own=True, diverges=True))  # type: ignore[arg-type]


class Shorter(Integers):
    def encoded_bytes(self, numel: int) -> int:
        return super().encoded_bytes(numel) + (numel > 0)

    def encode(self, values: torch.Tensor, out: torch.Tensor) -> None:
        Integers(self.block).encode(values, out[:-1] if len(out) else out)

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        Integers(self.block).decode(data[:-1] if len(data) else data, out)

    def decode_add(self, data: torch.Tensor, out: torch.Tensor, weight: float) -> None:
        Integers(self.block).decode_add(data[:-1] if len(data) else data, out, weight)


class Overwrites(Integers):
    def encode(self, values: torch.Tensor, out: torch.Tensor) -> None:
        super().encode(values, out)
        values.zero_()


class AddsWithoutWeight(Integers):
    def decode_add(self, data: torch.Tensor, out: torch.Tensor, weight: float) -> None:
        super().decode_add(data, out, 1.0)


class Claims(Integers):
    exact = True  # type: ignore[misc]


class Shifts(Integers):
    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        super().decode(data, out)
        out.add_(0.125)

    def decode_add(self, data: torch.Tensor, out: torch.Tensor, weight: float) -> None:
        super().decode_add(data, out, weight)
        out.add_(0.125 * weight)


class TakesMuchScratch(Integers):
    def encode(self, values: torch.Tensor, out: torch.Tensor) -> None:
        super().encode(values * 1.0, out)


class WaitsForTheDevice(Integers):
    def encode(self, values: torch.Tensor, out: torch.Tensor) -> None:
        if len(values) and values[0].item() is None:
            return
        super().encode(values, out)


class Forgets(Integers):
    """Sends nothing at all, so that error feedback never makes up for it."""

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        out.zero_()

    def decode_add(self, data: torch.Tensor, out: torch.Tensor, weight: float) -> None:
        out.add_(0.0)


class LargerBlocks(Integers):
    """Says that it can be cut at 16, but has one scale for 256."""

    @property
    def _inner(self) -> Integers:
        return Integers(256)

    def encoded_bytes(self, numel: int) -> int:
        return self._inner.encoded_bytes(numel)

    def encode(self, values: torch.Tensor, out: torch.Tensor) -> None:
        self._inner.encode(values, out)

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        self._inner.decode(data, out)

    def decode_add(self, data: torch.Tensor, out: torch.Tensor, weight: float) -> None:
        self._inner.decode_add(data, out, weight)


class ShapedOnly(Integers):
    shaped = True  # type: ignore[misc]


CODECS = {
    "every byte": (Shorter(256), "every one of encoded_bytes"),
    "values are left alone": (Overwrites(256), "leaves the values alone"),
    "weights": (AddsWithoutWeight(256), "weight times what decode gives"),
    "exact": (Claims(256), "exact codec returns the values"),
    "zeros and signs": (Shifts(256), "negative of x|zero comes back"),
    "scratch": (TakesMuchScratch(256), "scratch memory"),
    "waiting": (WaitsForTheDevice(256), "waits for a device"),
    "error feedback": (Forgets(256), "error feedback makes up"),
    "blocks": (LargerBlocks(16), "cut at multiples of block"),
    "shapes": (ShapedOnly(256), "shaped codec is sparse"),
    "members": (object(), "all members; name, exact"),
}


@pytest.mark.parametrize(("codec", "words"), CODECS.values(), ids=CODECS)
def test_broken_codecs_are_found(codec: Any, words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        check_codec(codec)


@dataclass(frozen=True)
class Matrices:
    """A shaped codec: it must be told the shapes, though it makes little of them."""

    shapes: tuple[tuple[int, ...], ...] = ()
    shaped: bool = True
    inner: Any = field(default_factory=lambda: codecs.topk(1.0, chunk=128, bits=8))
    name: str = "matrices"
    exact: bool = False
    sparse: bool = True
    aligned: bool = False
    block: int = 128
    feedback: float | None = None

    def for_shapes(self, shapes: Sequence[tuple[int, ...]]) -> Matrices:
        return replace(self, shapes=tuple(shapes))

    def split(self, row_bytes: int) -> list[tuple[int, Matrices]]:
        total = sum(torch.Size(shape).numel() for shape in self.shapes)
        counts = [min(8192, total - start) for start in range(0, total, 8192)]
        return [(count, self.for_shapes([(count,)])) for count in counts]

    def encoded_bytes(self, numel: int) -> int:
        size: int = self.inner.encoded_bytes(numel)
        return size

    def encode(self, values: torch.Tensor, out: torch.Tensor) -> None:
        assert sum(torch.Size(shape).numel() for shape in self.shapes) == values.numel()
        self.inner.encode(values, out)

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        self.inner.decode(data, out)

    def decode_add(self, data: torch.Tensor, out: torch.Tensor, weight: float) -> None:
        self.inner.decode_add(data, out, weight)


def test_a_shaped_codec_is_given_shapes() -> None:
    check_codec(Matrices())


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

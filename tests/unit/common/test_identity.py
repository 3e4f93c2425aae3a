"""Two pieces that do something else have another identity: every field of every piece is compared, or says why not."""

from __future__ import annotations

import copy
import functools
import importlib
import pkgutil
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from typing import Any

import pytest
import torch

import cadenza
from cadenza import LevelPlan, Strategy, codecs, outer, weighting
from cadenza.codecs.base import Codec
from cadenza.codecs.dct import Grid
from cadenza.common.identity import identity
from cadenza.common.milestones import Milestones

ROOMS = ("schedules", "topology", "fragments", "weighting", "codecs", "outer", "faults", "strategy")


def falling(rounds: int) -> float:
    return 1 / (1 + rounds)


# One of each dataclass that the rooms define; a new piece is added here.
SAMPLES: list[Any] = [
    cadenza.every(16),
    cadenza.changing({1: 4, 100: 8}),
    cadenza.changing(lambda n: 4 + n // 100, minimum=4),
    cadenza.adaptive(16, target_drift=0.1, minimum=4, maximum=64),
    cadenza.schedules.auto(),
    cadenza.schedules.moments(exp_avg=4),
    cadenza.topology.Level(((0, 1), (2, 3))),
    cadenza.Topology.from_sizes([2, 4], ranks=range(4)),
    cadenza.topology.random_pairs(),
    cadenza.whole(),
    cadenza.by_layers(2),
    cadenza.by_bytes(100),
    weighting.uniform(),
    weighting.samples(),
    weighting.by_function(lambda: 1.0),
    weighting.outliers(),
    weighting.edit_norms(),
    weighting.PlainContribution(),
    weighting.Weighed((0.5, 0.5)),
    codecs.fp32(),
    codecs.int8(),
    codecs.e3m0(),
    codecs.auto(),
    codecs.topk(),
    codecs.topk(mean_of="senders"),
    codecs.dct().for_shapes([(4, 2)]),
    Grid(4, 2, 4, 2),
    codecs.error_feedback(codecs.int8()),
    codecs.error_feedback(codecs.topk(mean_of="senders")),
    outer.mean(),
    outer.slowmo(),
    outer.eager(),
    outer.nesterov(clip=1.0, schedule={0: 0.5}),
    outer.sgd(schedule=falling),
    outer.sign(),
    outer.optimizer(torch.optim.AdamW, lr=0.1, betas=(0.9, 0.95)),
    outer.noloco(),
    cadenza.raise_error(),
    cadenza.skip_round(),
    cadenza.shrink(),
    cadenza.faults.Patience(),
    cadenza.faults.Poison(),
    LevelPlan(16),
    Strategy(levels=(LevelPlan(16),)),
    Milestones(((1, 4),), before=2),
]


def defined_dataclasses() -> Iterator[type]:
    for room in ROOMS:
        package = importlib.import_module(f"cadenza.{room}")
        modules = [package]
        if hasattr(package, "__path__"):
            found = pkgutil.iter_modules(package.__path__, f"{package.__name__}.")
            modules += [importlib.import_module(info.name) for info in found]
        for module in modules:
            for value in vars(module).values():
                if isinstance(value, type) and is_dataclass(value) and value.__module__ == module.__name__:
                    yield value


def test_every_dataclass_of_the_rooms_is_walked_over() -> None:
    assert set(defined_dataclasses()) <= {type(sample) for sample in SAMPLES}


def another(value: Any) -> Any:
    """Return a value of the same kind that is not equal."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, str):
        return f"{value}x"
    if isinstance(value, tuple):
        return (*value, *value[:1]) if value else (1,)
    if isinstance(value, frozenset):
        return value | {99}
    if isinstance(value, dict):
        return {**value, "more": 1.0}
    if isinstance(value, torch.dtype):
        return torch.float16
    if isinstance(value, type):
        return torch.optim.Adagrad
    if is_dataclass(value) and fields(value):
        return changed(value, fields(value)[0].name)
    return {weighting.Uniform: weighting.samples(), cadenza.fragments.Whole: cadenza.by_bytes(1)}.get(
        type(value), cadenza.shrink() if isinstance(value, cadenza.faults.RaiseError) else outer.nesterov()
    )


def changed(piece: Any, name: str) -> Any:
    """Return a copy with another value in one field, whatever the piece would say to it."""
    other = copy.copy(piece)
    object.__setattr__(other, name, another(getattr(piece, name)))
    return other


FIELDS = [(sample, f) for sample in SAMPLES for f in fields(sample)]


@pytest.mark.parametrize(("piece", "one"), FIELDS, ids=[f"{type(p).__name__}.{f.name}" for p, f in FIELDS])
def test_a_piece_with_another_value_in_one_field_has_another_identity(piece: Any, one: Any) -> None:
    other = changed(piece, one.name)
    if reason := one.metadata.get("local"):
        assert identity(other) == identity(piece)
        assert len(reason) > 10
    else:
        assert identity(other) != identity(piece)


def test_only_these_fields_are_each_workers_own() -> None:
    local = {f"{type(piece).__name__}.{f.name}" for piece, f in FIELDS if "local" in f.metadata}
    expected = {"LevelPlan.name", "Strategy.offload", "SkipRound.patience", "Shrink.patience", "TorchOptimizer.kept"}
    assert local == expected | {"Shrink.commit_at"}


def test_all_samples_have_identities_of_their_own_that_survive_a_copy() -> None:
    told = [tuple(identity(sample)) for sample in SAMPLES]
    assert len(set(told)) == len(told)
    assert told == [tuple(identity(copy.copy(sample))) for sample in SAMPLES]
    assert not any("0x" in line for lines in told for line in lines)


def test_an_anchor_that_only_one_rank_keeps_is_found() -> None:
    kept = Strategy(levels=(LevelPlan(4, keep_anchor=True),)).identity
    differing = set(kept) ^ set(Strategy(levels=(LevelPlan(4),)).identity)
    assert differing == {"strategy.levels[0].keep_anchor: True", "strategy.levels[0].keep_anchor: False"}


def test_a_field_that_was_added_is_told_only_where_it_is_set() -> None:
    plain, other = identity(LevelPlan(16)), identity(LevelPlan(16, through_host=True))
    assert set(other) - set(plain) == {"strategy.through_host: True"}
    assert not set(plain) - set(other)
    plain, other = identity(outer.nesterov()), identity(outer.nesterov(rises_beyond=4))
    assert set(other) - set(plain) == {"strategy.rises_beyond: 4"}
    assert not set(plain) - set(other), "a state that was saved before is that of an outer step without it"


def test_floats_that_differ_in_the_last_bit_differ() -> None:
    assert identity(0.1 + 0.2) != identity(0.3)


class Mood(Enum):
    GOOD = 1
    BAD = 2


class Own:
    """A piece that is no dataclass."""

    def __init__(self, size: int, *, inside: object = None) -> None:
        self.size = size
        self.inside = inside


class Slotted:
    __slots__ = ("size",)

    def __init__(self, size: int) -> None:
        self.size = size


@dataclass(frozen=True)
class Holder:
    held: Any
    probed: Any = field(default=None, metadata={"probe": (1, 2)})


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Own(1), Own(2)),
        (Own(1, inside=Own(1)), Own(1, inside=Own(2))),
        (Slotted(1), Slotted(2)),
        (Mood.GOOD, Mood.BAD),
        (torch.float32, torch.float16),
        (torch.tensor([1.0]), torch.tensor([2.0])),
        (torch.tensor([1.0]), torch.tensor([[1.0]])),
        ({"a": 1}, {"a": 2}),
        ({"a": Own(1)}, {"b": Own(1)}),
        ({}, {"a": Own(1)}),
        ((), (Own(1),)),
        ((Own(1), Own(2)), (Own(2), Own(1))),
        (frozenset({1, 2}), frozenset({1, 3})),
        (None, 0),
        (1, True),
        (1, 1.0),
        ("1", 1),
        (functools.partial(pow, 2), functools.partial(pow, 3)),
        (functools.partial(pow, exp=2), functools.partial(pow, exp=3)),
        (Own, Slotted),
        (max, min),
        (torch.optim.Adam, torch.optim.AdamW),
    ],
)
def test_what_differs_is_told_apart(one: Any, other: Any) -> None:
    assert identity(Holder(one)) != identity(Holder(other))
    assert identity(Holder(one)) == identity(Holder(copy.copy(one)))


def test_functions_of_one_name_are_told_apart_by_what_they_give() -> None:
    one, other, same = (eval(f"lambda n: {factor} * n", {}) for factor in (1, 2, 2))
    assert identity(Holder(None, probed=one)) != identity(Holder(None, probed=other))
    assert identity(Holder(None, probed=same)) == identity(Holder(None, probed=other))
    assert identity(Holder(one)) == identity(Holder(other))  # nothing says what to ask them


def test_a_function_that_raises_is_undefined_there() -> None:
    def only_one(n: int) -> int:
        return {1: 5}[n]

    lines = identity(Holder(None, probed=only_one), "h")
    assert lines[-2:] == ["h.probed(1): 5", "h.probed(2): undefined"]


def test_a_piece_that_holds_itself_ends() -> None:
    own = Own(1)
    own.inside = own
    assert "strategy.inside: itself" in identity(own)


def test_groups_of_many_ranks_are_one_line() -> None:
    plan = LevelPlan(4, groups=tuple((2 * i, 2 * i + 1) for i in range(500)))
    assert len(identity(plan)) < 20


def test_a_users_codec_counts_by_its_values() -> None:
    class Shifted:
        def __init__(self, by: float) -> None:
            self.by = by

        def __getattr__(self, name: str) -> Any:
            return getattr(codecs.int8(), name)

    def plan(by: float) -> list[str]:
        codec: Codec = Shifted(by)  # type: ignore[assignment]
        return identity(LevelPlan(4, codec=codec))

    assert plan(1.0) != plan(2.0)
    assert plan(1.0) == plan(1.0)

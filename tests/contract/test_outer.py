"""What every outer update promises. A new one is added to OUTERS below, and is held to all of it."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch

from cadenza.common.identity import identity
from cadenza.outer import Outer, eager, mean, nesterov, optimizer, sgd, sign, slowmo
from cadenza.testing import check_outer

NUMEL = 1003  # no multiple of any vector's length


def falling(rounds: int) -> float:
    return 1 / (1 + rounds)


# Without weight decay, which moves an anchor that no worker has moved.
OUTERS: dict[str, Outer] = {
    "mean": mean(),
    "slowmo": slowmo(),
    "slowmo, slower": slowmo(alpha=0.5, beta=0.4),
    "nesterov": nesterov(),
    "nesterov, milestones": nesterov(lr=0.4, momentum=0.8, clip=1.0, schedule={0: 0.5, 3: 2.0}),
    "nesterov, no momentum": nesterov(momentum=0.0),
    "eager": eager(lr=0.5),
    "sgd": sgd(),
    "sgd, momentum": sgd(lr=0.5, momentum=0.9, schedule=falling),
    "sign": sign(lr=0.5),
    "Adam": optimizer(torch.optim.Adam, lr=0.1),
    "AdamW": optimizer(torch.optim.AdamW, lr=0.1, weight_decay=0.0, amsgrad=True, schedule=falling),
    "SGD": optimizer(torch.optim.SGD, lr=0.7, momentum=0.9, dampening=0.1),
    "Adagrad": optimizer(torch.optim.Adagrad, lr=0.1, initial_accumulator_value=0.3),
    "RMSprop": optimizer(torch.optim.RMSprop, lr=0.1, momentum=0.5, centered=True),
    "NAdam": optimizer(torch.optim.NAdam, lr=0.1),
    "RAdam": optimizer(torch.optim.RAdam, lr=0.1),
    "Rprop": optimizer(torch.optim.Rprop, lr=0.1),
}
EVERY_OUTER = pytest.mark.parametrize("outer", [pytest.param(outer, id=name) for name, outer in OUTERS.items()])


def values(seed: int) -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed))


def of_one_worker(outer: Outer, delta: torch.Tensor) -> dict[str, Any]:
    """What an update is told that sees more than the mean: that of one worker, whose difference has not changed."""
    own = delta.clone()
    return {"own": own, "now": own, "members": 1} if outer.needs_own else {}


@EVERY_OUTER
def test_keeps_its_contract(outer: Outer) -> None:
    check_outer(outer)


@pytest.mark.parametrize("name", [name for name, outer in OUTERS.items() if getattr(outer, "schedule", None) is None])
def test_an_anchor_that_joins_in_a_later_round_starts_like_any_other(name: str) -> None:
    outer = OUTERS[name]
    early, late = values(0), values(0)
    early_state, late_state = outer.init(early), outer.init(late)
    for n in range(3):
        outer.update(early, values(n), early_state, rounds=n, inner_lr=0.1, **of_one_worker(outer, values(n)))
        outer.update(late, values(n), late_state, rounds=n + 40, inner_lr=0.1, **of_one_worker(outer, values(n)))
    assert torch.equal(early, late)


@EVERY_OUTER
def test_where_nothing_moved_a_fresh_anchor_stays(outer: Outer) -> None:
    anchor = values(0)
    state = outer.init(anchor)
    for n in range(3):
        still = torch.zeros(NUMEL)
        outer.update(anchor, still, state, rounds=n, inner_lr=0.1, **of_one_worker(outer, still))
    assert torch.equal(anchor, values(0))


@EVERY_OUTER
def test_a_fresh_anchor_moves_towards_the_mean(outer: Outer) -> None:
    anchor, delta = values(0), values(1)
    outer.update(anchor, delta.clone(), outer.init(anchor), rounds=0, inner_lr=0.1, **of_one_worker(outer, delta))
    moved = values(0) - anchor
    assert (moved * delta >= 0).all()
    assert moved.norm() > 0


@EVERY_OUTER
def test_only_the_mean_is_plain(outer: Outer) -> None:
    assert outer.plain == (outer == mean())


@EVERY_OUTER
def test_the_inner_learning_rate_is_asked_for_where_it_is_needed(outer: Outer) -> None:
    anchor = values(0)
    if outer.needs_inner_lr:
        with pytest.raises(ValueError, match="learning rate"):
            outer.update(anchor, values(1), outer.init(anchor), rounds=0)
        assert torch.equal(anchor, values(0))
    else:
        outer.update(anchor, values(1), outer.init(anchor), rounds=0, **of_one_worker(outer, values(1)))


def test_identities_tell_outer_updates_apart_and_are_the_same_in_every_process() -> None:
    descriptions = ["; ".join(identity(outer)) for outer in OUTERS.values()]
    assert len(set(descriptions)) == len(descriptions)
    assert descriptions == ["; ".join(identity(deepcopy(outer))) for outer in OUTERS.values()]
    assert not any("0x" in description for description in descriptions)

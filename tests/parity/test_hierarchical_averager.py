"""HierarchicalModelAverager beside torch's: groups, the step at which each level fires, values, warnings and errors."""

from __future__ import annotations

import logging
from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.distributed as dist

from support.compare import assert_models_agree, assert_same_on_ranks, warned
from support.models import CASES
from support.ranks import RankPool, outcome
from support.sides import OURS, TORCH, Side

Levels = list[tuple[int, int]]

HIERARCHIES: list[Levels] = [
    [(2, 2), (4, 4)],
    [(2, 1), (4, 2), (8, 4)],
    [(3, 2), (6, 4)],
    [(2, 2), (3, 4)],
    [(4, 4)],
    [(2, 4), (4, 4)],
    [(1, 2), (4, 4)],
    [(2, 2), (4, 2), (8, 4)],
]


def describe(side: Side, levels: Levels, members: list[int] | None = None) -> dict[str, Any]:
    """The groups that an averager makes, and which of them it would use at every step."""
    group = dist.new_group(members) if members else None
    before = dist.get_pg_count()
    averager = side.HierarchicalModelAverager(OrderedDict(levels), warmup_steps=0, process_group=group)
    groups = averager.period_process_group_dict
    found = {
        "groups made": dist.get_pg_count() - before,
        "periods": list(groups),
        "ranks": [dist.get_process_group_ranks(g) for g in groups.values()],
        "last is the whole group": groups[levels[-1][0]] is averager.process_group,
        "step": averager.step,
        "warm-up": averager.warmup_steps,
    }
    chosen = []
    for step in range(30):
        averager.step = step
        due = averager._find_process_group()
        chosen.append(None if due is None else [period for period, g in groups.items() if g is due])
    return {**found, "due": chosen}


@pytest.mark.parametrize("levels", HIERARCHIES)
def test_groups_and_the_level_due_at_each_step_agree(ranks: RankPool, levels: Levels) -> None:
    assert ranks.run(4, describe, OURS, levels) == ranks.run(4, describe, TORCH, levels)


def test_a_hierarchy_within_a_part_of_the_world_agrees(ranks: RankPool) -> None:
    """Torch's group creation is collective over the world, so the part must hold every rank that calls it."""
    members = [3, 1, 2, 0]
    theirs = ranks.run(4, describe, TORCH, [(2, 2), (4, 4)], members)
    assert ranks.run(4, describe, OURS, [(2, 2), (4, 4)], members) == theirs


def train_side_by_side(case_name: str, levels: Levels, steps: int, warmup_steps: int) -> None:
    case, rank = CASES[case_name], dist.get_rank()
    theirs, ours = case.model(rank), case.model(rank)
    optimizers = [torch.optim.SGD(case.groups(m), lr=0.05, momentum=0.9) for m in (theirs, ours)]
    averagers = [
        side.HierarchicalModelAverager(OrderedDict(levels), warmup_steps=warmup_steps) for side in (TORCH, OURS)
    ]
    for step in range(steps):
        due = averagers[1]._find_process_group() if step >= warmup_steps else None
        size = dist.get_world_size(due) if due is not None else 1
        for model, optim, averager in zip((theirs, ours), optimizers, averagers, strict=True):
            case.backward(model, rank, step)
            optim.step()
            averager.average_parameters(optim.param_groups)
        if case_name == "conv_channels_last":  # torch's averaging loses it
            theirs.to(memory_format=torch.channels_last)
        assert averagers[0].step == averagers[1].step == step + 1
        # With ours set to torch's after every step, a round of two is the same bits also in a world of four.
        assert_models_agree(theirs, ours, f"step {step}", exact=case.exact and size <= 2)
        if due is not None:
            averaged = [p for p in ours.parameters() if p.grad is not None]
            assert_same_on_ranks(f"step {step}", averaged, due)
        ours.load_state_dict(theirs.state_dict())
        for optim in optimizers:
            optim.zero_grad()


@pytest.mark.parametrize("case", list(CASES))
def test_parameters_agree_after_every_step(ranks: RankPool, transport: dict[str, str], case: str) -> None:
    ranks.run(4, train_side_by_side, case, [(2, 2), (4, 4)], 18, 3, env=transport)


@pytest.mark.parametrize("levels", [HIERARCHIES[1], HIERARCHIES[3], HIERARCHIES[5]])
def test_parameters_agree_with_other_hierarchies(ranks: RankPool, levels: Levels) -> None:
    ranks.run(4, train_side_by_side, "mlp", levels, 20, 5)


@pytest.mark.parametrize("levels", [[(2, 2)], [(2, 1), (4, 2)]])
def test_parameters_agree_on_two_ranks(ranks: RankPool, levels: Levels) -> None:
    ranks.run(2, train_side_by_side, "tied_transformer", levels, 20, 5)


CONSTRUCTIONS: list[tuple[Any, int]] = [
    (None, 0),
    ([], 0),
    ([(0, 2)], 0),
    ([(-1, 2)], 0),
    ([(4, 1)], 0),
    ([(4, 3)], 0),
    ([(2, 2), (4, 4)], 0),
    ([(4, 2)], -1),
    ([(1, 2)], 0),
    ([(1, 2)], 4),
    ([(4, 2)], 7),
]


def construct_all(side: Side) -> list[Any]:
    def construct(levels: Levels | None, warmup_steps: int) -> int:
        sizes = None if levels is None else OrderedDict(levels)
        return side.HierarchicalModelAverager(sizes, warmup_steps).warmup_steps

    found: list[Any] = []
    warnings = [warned(lambda c=c: found.append(outcome(construct, *c))) for c in CONSTRUCTIONS]
    return list(zip(found, warnings, strict=True))


def test_warnings_and_errors_of_the_constructor_agree(ranks: RankPool) -> None:
    theirs, ours = ranks.run(2, construct_all, TORCH), ranks.run(2, construct_all, OURS)
    for rank in range(2):
        for arguments, their, our in zip(CONSTRUCTIONS, theirs[rank], ours[rank], strict=True):
            assert text_of(our) == text_of(their), arguments


def text_of(told: Any) -> Any:
    """Our errors are ValueErrors under a name of their own: compare the texts."""
    (kind, *rest), warnings = told
    return kind, rest[-1], warnings


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((record.levelname, record.getMessage()))


def log_of(side: Side) -> list[tuple[str, str]]:
    logger = logging.getLogger(side.HierarchicalModelAverager.__module__)
    lines = Lines()
    logger.setLevel(logging.INFO)
    logger.addHandler(lines)
    side.HierarchicalModelAverager(OrderedDict([(2, 2), (4, 4)]))
    return lines.lines


def test_what_is_logged_agrees(ranks: RankPool) -> None:
    theirs = ranks.run(4, log_of, TORCH)
    assert ranks.run(4, log_of, OURS) == theirs
    assert theirs[0][0] == ("INFO", "Model averaging hierarchy:")

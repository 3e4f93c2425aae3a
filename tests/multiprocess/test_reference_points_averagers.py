"""Points 1 to 9 of the reference: the averagers. KEEP points hold on torch too; MEND points show how torch fails."""

from __future__ import annotations

import logging
import re
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from cadenza.errors import CadenzaError, NotInitializedError, TopologyError
from support.compare import warned
from support.ranks import RankPool, outcome
from support.sides import OURS, TORCH, Side

BOTH = pytest.mark.parametrize("side", [TORCH, OURS])

WARMUP_TEXT = "Arg ``warmup_steps`` must be a non-negative number."
PERIOD_TEXT = "Arg ``period`` must be a positive value."


def parameter_of_rank() -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(torch.tensor([float(dist.get_rank())]))
    parameter.grad = torch.ones(1)
    return parameter


def firing_steps(averager: Any, steps: int) -> list[int]:
    """The steps at which the averager changed a parameter that is different on every rank."""
    fired = []
    for step in range(steps):
        parameter = parameter_of_rank()
        averager.average_parameters([parameter])
        assert averager.step == step + 1
        if parameter.item() != dist.get_rank():
            fired.append(step)
    return fired


# 1


def build_base(side: Side) -> tuple[tuple[Any, ...], int, bool]:
    class Counting(side.ModelAverager):  # type: ignore[name-defined]
        def average_parameters(self, params: Any) -> None:
            self.step += 1

    built = Counting()
    return outcome(side.ModelAverager)[:2], built.step, built.process_group is dist.group.WORLD


@BOTH
def test_point_1_the_base_is_abstract_and_its_step_starts_at_zero(ranks: RankPool, side: Side) -> None:
    assert ranks.run(1, build_base, side) == [(("error", "TypeError"), 0, True)]


def build_without_group(side: Side) -> list[Any]:
    layer = torch.nn.Linear(1, 1)
    calls: list[tuple[Any, ...]] = [
        (side.PeriodicModelAverager, 4),
        (side.HierarchicalModelAverager, {4: 1}),
        (side.average_parameters, layer.parameters(), None),
        (side.average_parameters_or_parameter_groups, layer.parameters(), None),
    ]
    return [outcome(*call) for call in calls]


def test_point_1_before_init_process_group_the_error_names_it(ranks: RankPool) -> None:
    [theirs] = ranks.run(1, build_without_group, TORCH, init=False)
    assert theirs[0][1] == "TypeError"
    assert "init_process_group" not in theirs[0][2]
    [ours] = ranks.run(1, build_without_group, OURS, init=False)
    for told in ours:
        assert told[:2] == ("error", "NotInitializedError")
        assert "init_process_group" in told[2]
    assert issubclass(NotInitializedError, CadenzaError)
    assert issubclass(NotInitializedError, RuntimeError)


def use_after_destroy() -> list[Any]:
    averager = OURS.PeriodicModelAverager(4)
    subgroup = dist.new_group([0, 1])
    on_subgroup = OURS.PeriodicModelAverager(4, process_group=subgroup)
    parameter = parameter_of_rank()
    dist.destroy_process_group(subgroup)
    first = outcome(on_subgroup.average_parameters, [parameter])
    dist.destroy_process_group()
    return [first, outcome(averager.average_parameters, [parameter]), outcome(OURS.PeriodicModelAverager, 4)]


def test_point_1_a_destroyed_group_is_named_too(ranks: RankPool) -> None:
    for told in ranks.run(2, use_after_destroy):
        assert [t[:2] for t in told] == [("error", "NotInitializedError")] * 3
        assert "destroy" in told[0][2]


# 2


def build_periodic(side: Side, period: Any, warmup_steps: Any) -> tuple[Any, ...]:
    return outcome(lambda: side.PeriodicModelAverager(period, warmup_steps).period)


@BOTH
@pytest.mark.parametrize(
    ("period", "warmup_steps", "text"),
    [(0, 0, PERIOD_TEXT), (-3, 0, PERIOD_TEXT), (4, -1, WARMUP_TEXT), (0, -1, WARMUP_TEXT)],
)
def test_point_2_bad_periods_and_warm_ups_are_refused_in_torchs_words_and_order(
    ranks: RankPool, side: Side, period: int, warmup_steps: int, text: str
) -> None:
    assert ranks.run(1, build_periodic, side, period, warmup_steps) == [("error", "ValueError", text)]


def build_with_period_one(side: Side) -> list[tuple[str, str, str]]:
    return warned(side.PeriodicModelAverager, 1)


@BOTH
def test_point_2_a_period_of_one_warns(ranks: RankPool, side: Side) -> None:
    [[(category, text, _)]] = ranks.run(1, build_with_period_one, side)
    assert category == "UserWarning"
    assert text.startswith("When period is 1, no need to use model averaging")


@pytest.mark.parametrize("period", [2.5, 4.0, "4", None, [4]])
def test_point_2_a_period_that_is_no_integer_is_a_type_error(ranks: RankPool, period: Any) -> None:
    [(kind, name, text)] = ranks.run(1, build_periodic, OURS, period, 0)
    assert (kind, name) == ("error", "TypeError")
    assert "period" in text
    assert repr(period) in text


@pytest.mark.parametrize("period", [2.5, 4.0])
def test_point_2_torch_still_accepts_a_period_that_is_no_integer(ranks: RankPool, period: float) -> None:
    assert ranks.run(1, build_periodic, TORCH, period, 0) == [("ok", period)]


@BOTH
@pytest.mark.parametrize("period", [np.int64(4), np.int32(4)])
def test_point_2_integers_of_other_libraries_are_integers(ranks: RankPool, side: Side, period: Any) -> None:
    assert ranks.run(1, build_periodic, side, period, np.int64(3)) == [("ok", 4)]


# 3


def fire_periodic(side: Side, period: int, warmup_steps: int, steps: int) -> list[int]:
    return firing_steps(side.PeriodicModelAverager(period, warmup_steps), steps)


@BOTH
def test_point_3_it_fires_at_the_end_of_the_warm_up_and_every_period_after(ranks: RankPool, side: Side) -> None:
    assert ranks.run(2, fire_periodic, side, 4, 13, 24) == [[13, 17, 21]] * 2
    assert ranks.run(2, fire_periodic, side, 5, 0, 12) == [[0, 5, 10]] * 2


def fail_and_retry(side: Side) -> list[Any]:
    averager = side.PeriodicModelAverager(2)
    without_gradient = torch.nn.Parameter(torch.ones(1))
    failed = outcome(averager.average_parameters, [without_gradient])[0]
    after_failure = averager.step
    parameter = parameter_of_rank()
    averager.average_parameters([parameter])
    return [failed, after_failure, averager.step, parameter.item()]


@BOTH
def test_point_3_a_failed_averaging_does_not_advance_the_step(ranks: RankPool, side: Side) -> None:
    assert ranks.run(2, fail_and_retry, side) == [["error", 0, 1, 0.5]] * 2


# 4


def build_hierarchical(side: Side, levels: list[tuple[Any, Any]], warmup_steps: int = 0) -> list[Any]:
    """The outcome and how many groups were made on the way."""
    before = dist.get_pg_count()
    told = outcome(
        lambda: list(side.HierarchicalModelAverager(OrderedDict(levels), warmup_steps).period_process_group_dict)
    )
    return [told, dist.get_pg_count() - before]


REFUSALS: list[tuple[list[tuple[int, int]], int, str]] = [
    ([], 0, "Arg ``period_group_size_dict`` must not be empty."),
    ([(0, 4)], 0, "The minimum period in arg ``period_group_size_dict`` must be a positive value."),
    ([(-2, 2), (4, 4)], 0, "The minimum period in arg ``period_group_size_dict`` must be a positive value."),
    (
        [(2, 4), (4, 2)],
        0,
        "The last value in arg ``period_group_size_dict`` 2 must be equal to the size of arg ``process_group`` 4.",
    ),
    ([(2, 2), (4, 4)], -1, WARMUP_TEXT),
]


@BOTH
@pytest.mark.parametrize(("levels", "warmup_steps", "text"), REFUSALS)
def test_point_4_bad_hierarchies_are_refused_in_torchs_words(
    ranks: RankPool, side: Side, levels: list[tuple[int, int]], warmup_steps: int, text: str
) -> None:
    for told, _ in ranks.run(4, build_hierarchical, side, levels, warmup_steps):
        assert told[0] == "error"
        assert told[2] == text
        assert told[1] in ("ValueError", "TopologyError")
    assert issubclass(TopologyError, ValueError)


def test_point_4_everything_is_validated_before_any_group_is_made(ranks: RankPool) -> None:
    theirs = ranks.run(4, build_hierarchical, TORCH, [(2, 2), (4, 4)], -1)
    assert [made > 0 for _, made in theirs] == [True] * 4
    for levels, warmup_steps, _ in REFUSALS:
        assert [made for _, made in ranks.run(4, build_hierarchical, OURS, levels, warmup_steps)] == [0] * 4


@pytest.mark.parametrize("levels", [[(2.5, 4)], [("2", 4)], [(2, 2.0), (4, 4)], [(2, "2"), (4, 4)]])
def test_point_4_periods_and_sizes_that_are_no_integers_are_type_errors(
    ranks: RankPool, levels: list[tuple[Any, Any]]
) -> None:
    for told, made in ranks.run(4, build_hierarchical, OURS, levels):
        assert told[:2] == ("error", "TypeError")
        assert made == 0


def warn_hierarchical(side: Side) -> list[tuple[str, str, str]]:
    return warned(side.HierarchicalModelAverager, OrderedDict([(1, dist.get_world_size())]))


@BOTH
def test_point_4_a_last_period_of_one_warns(ranks: RankPool, side: Side) -> None:
    for [(category, text, _)] in ranks.run(2, warn_hierarchical, side):
        assert category == "UserWarning"
        assert text.startswith("When the maximum period in arg ``period_group_size_dict`` is 1")


# 5


def describe_groups(side: Side) -> list[Any]:
    whole = dist.new_group([0, 1, 2, 3])
    before = dist.get_pg_count()
    averager = side.HierarchicalModelAverager(OrderedDict([(2, 1), (4, 2), (8, 4)]), process_group=whole)
    groups = averager.period_process_group_dict
    return [
        type(groups),
        list(groups),
        [dist.get_process_group_ranks(group) for group in groups.values()],
        groups[8] is whole,
        dist.get_pg_count() - before,
    ]


@BOTH
def test_point_5_periods_map_to_contiguous_subgroups_and_the_last_to_the_group_itself(
    ranks: RankPool, side: Side
) -> None:
    for rank, told in enumerate(ranks.run(4, describe_groups, side)):
        pair = [0, 1] if rank < 2 else [2, 3]
        assert told == [OrderedDict, [2, 4, 8], [[rank], pair, [0, 1, 2, 3]], True, 6]


# 6


def find_groups(side: Side, levels: list[tuple[int, int]], steps: list[int]) -> list[Any]:
    averager = side.HierarchicalModelAverager(OrderedDict(levels))
    periods = {group: period for period, group in averager.period_process_group_dict.items()}
    found = []
    for step in steps:
        averager.step = step
        found.append(periods.get(averager._find_process_group()))
    return found


@BOTH
def test_point_6_the_largest_period_that_divides_the_step_is_found_or_none(ranks: RankPool, side: Side) -> None:
    found = ranks.run(4, find_groups, side, [(2, 2), (4, 4)], [0, 1, 2, 3, 4, 5, 6, 8])
    assert found == [[4, None, 2, None, 4, None, 2, 4]] * 4


def test_point_6_periods_out_of_order_are_refused_and_the_pair_named(ranks: RankPool) -> None:
    unsorted = [(4, 2), (2, 4)]
    assert ranks.run(4, find_groups, TORCH, unsorted, [4]) == [[2]] * 4  # the largest period is 4
    for told, made in ranks.run(4, build_hierarchical, OURS, unsorted):
        assert told[:2] == ("error", "TopologyError")
        assert re.search(r"\b4\b.*\b2\b", told[2])
        assert made == 0


@pytest.mark.parametrize(
    ("world", "levels", "pair"),
    [(4, [(2, 2), (4, 1), (8, 4)], ("2", "1")), (6, [(2, 2), (4, 3), (8, 6)], ("2", "3"))],
    ids=["descending", "not dividing"],
)
def test_point_6_sizes_that_do_not_nest_are_refused_and_the_pair_named(
    ranks: RankPool, world: int, levels: list[tuple[int, int]], pair: tuple[str, str]
) -> None:
    theirs = ranks.run(world, build_hierarchical, TORCH, levels)
    assert [told[0] for told, _ in theirs] == ["ok"] * world
    for told, made in ranks.run(world, build_hierarchical, OURS, levels):
        assert told[:2] == ("error", "TopologyError")
        assert all(size in told[2] for size in pair)
        assert made == 0


# 7


def fire_hierarchical(side: Side, period: int, warmup_steps: int, steps: int) -> list[int]:
    averager = side.HierarchicalModelAverager(OrderedDict([(period, dist.get_world_size())]), warmup_steps)
    return firing_steps(averager, steps)


@BOTH
def test_point_7_the_hierarchical_rule_counts_from_step_zero_not_from_the_warm_up(ranks: RankPool, side: Side) -> None:
    assert ranks.run(2, fire_hierarchical, side, 4, 13, 26) == [[16, 20, 24]] * 2


# 8


def mean_at_each_step(side: Side) -> dict[int, float]:
    averager = side.HierarchicalModelAverager(OrderedDict([(2, 2), (4, 4), (8, 8)]), warmup_steps=10)
    means = {}
    for step in range(25):
        parameter = parameter_of_rank()
        averager.average_parameters([parameter])
        if parameter.item() != dist.get_rank():
            means[step] = parameter.item()
    return means


@BOTH
def test_point_8_pairs_fours_and_everyone_take_their_turns(ranks: RankPool, side: Side) -> None:
    for rank, means in enumerate(ranks.run(8, mean_at_each_step, side)):
        pair, four = rank // 2 * 2 + 0.5, rank // 4 * 4 + 1.5
        expected = {10: pair, 14: pair, 18: pair, 22: pair, 12: four, 20: four, 16: 3.5, 24: 3.5}
        assert means == expected


# 9


def log_of(side: Side) -> list[tuple[str, str]]:
    lines: list[tuple[str, str]] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append((record.levelname, record.getMessage()))

    logger = logging.getLogger(side.HierarchicalModelAverager.__module__)
    logger.setLevel(logging.INFO)
    logger.addHandler(Lines())
    side.HierarchicalModelAverager(OrderedDict([(2, 2), (4, 4)]))
    return lines


@BOTH
def test_point_9_the_hierarchy_is_logged_a_line_a_level(ranks: RankPool, side: Side) -> None:
    line = "\tEach group that has {} processes average parameters every {} iterations, if no higher-level averaging."
    expected = [
        ("INFO", "Model averaging hierarchy:"),
        ("INFO", line.format(2, 2)),
        ("INFO", line.format(4, 4)),
    ]
    assert ranks.run(4, log_of, side) == [expected] * 4

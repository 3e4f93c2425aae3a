"""Levels as plain data: which ranks come together, and what is refused."""

from __future__ import annotations

import math
import socket

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cadenza.errors import TopologyError
from cadenza.topology import Level, Topology, check_nesting, host_name

nested_sizes = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(
    lambda factors: [math.prod(factors[: i + 1]) for i in range(len(factors))]
)


@given(nested_sizes, st.integers(1, 3), st.randoms())
@settings(deadline=None, derandomize=True)
def test_levels_from_sizes_hold_every_rank_once_and_nest(sizes: list[int], times: int, dice: object) -> None:
    ranks = list(range(100, 100 + sizes[-1] * times))
    dice.shuffle(ranks)  # type: ignore[attr-defined]
    topology = Topology.from_sizes(sizes, ranks=ranks)
    assert len(topology.levels) == len(sizes)
    for size, level in zip(sizes, topology.levels, strict=True):
        assert {len(group) for group in level.groups} == {size}
        assert [rank for group in level.groups for rank in group] == ranks, "runs, in the order given"


def test_sizes_are_cut_from_any_iterable_of_ranks() -> None:
    assert Topology.from_sizes([2], ranks=iter([5, 3, 9, 1])).levels[0].groups == ((5, 3), (9, 1))


@pytest.mark.parametrize(
    ("sizes", "within", "words"),
    [
        ([4, 6], 12, "6 is not a multiple of 4"),
        ([2, 4], 6, "the number of ranks, 6, is not a multiple of 4"),
        ([8], 4, "the number of ranks, 4, is not a multiple of 8"),
        ([4, 2], 4, "2 is not a multiple of 4"),
        ([0], 4, "at least one rank"),
        ([-2, 4], 4, "at least one rank"),
        ([], 4, "at least one group size"),
    ],
)
def test_sizes_that_do_not_nest_are_refused_with_the_offending_pair(sizes: list[int], within: int, words: str) -> None:
    with pytest.raises(TopologyError, match=words):
        check_nesting(sizes, within=within)
    with pytest.raises(TopologyError, match=words):
        Topology.from_sizes(sizes, ranks=range(within))


@pytest.mark.parametrize("size", [2.0, "2", True, None])
def test_a_size_that_is_no_whole_number_is_a_type_error(size: object) -> None:
    with pytest.raises(TypeError, match="whole number of ranks"):
        check_nesting([size], within=4)  # type: ignore[list-item]


def test_a_level_knows_the_group_of_each_rank() -> None:
    level = Level(((0, 2), (1, 3), (7,)))
    assert [level.group_of(rank) for rank in (0, 3, 7)] == [(0, 2), (1, 3), (7,)]
    assert level.ranks == {0, 1, 2, 3, 7}


def test_a_rank_outside_a_level_is_named() -> None:
    with pytest.raises(TopologyError, match="Rank 5 is not in this level"):
        Level(((0, 1),)).group_of(5)


@pytest.mark.parametrize("groups", [(), ((),), ((0, 1), ())])
def test_a_level_without_ranks_is_refused(groups: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(TopologyError, match="at least one group"):
        Level(groups)


@pytest.mark.parametrize("groups", [((0, 1), (1, 2)), ((3, 3),)])
def test_a_rank_in_two_groups_of_a_level_is_refused(groups: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(TopologyError, match=r"ranks \[[13]\] stand in several"):
        Level(groups)


def test_levels_that_do_not_nest_are_refused_with_the_group_that_is_torn() -> None:
    with pytest.raises(TopologyError, match=r"the group \(1, 2\) lies in several groups"):
        Topology((Level(((0,), (1, 2), (3,))), Level(((0, 1), (2, 3)))))


def test_levels_over_different_ranks_are_refused_with_the_missing_ones() -> None:
    with pytest.raises(TopologyError, match=r"ranks \[4\] are missing"):
        Topology((Level(((0, 1), (2, 3))), Level(((0, 1, 2, 3, 4),))))


def test_a_topology_without_levels_is_refused() -> None:
    with pytest.raises(TopologyError, match="at least one level"):
        Topology(())


def test_hosts_become_a_level_of_hosts_and_one_of_everyone() -> None:
    topology = Topology.from_hosts({3: "south", 0: "north", 1: "south", 2: "north"})
    assert [level.groups for level in topology.levels] == [((0, 2), (1, 3)), ((0, 1, 2, 3),)]


def test_a_single_host_is_one_level() -> None:
    assert [level.groups for level in Topology.from_hosts({1: "here", 0: "here"}).levels] == [((0, 1),)]


def test_hosts_may_hold_different_numbers_of_ranks() -> None:
    topology = Topology.from_hosts({0: "a", 1: "b", 2: "b", 3: "b"})
    assert topology.levels[0].groups == ((0,), (1, 2, 3))


def test_no_hosts_at_all_are_refused() -> None:
    with pytest.raises(TopologyError, match="at least one group"):
        Topology.from_hosts({})


def test_the_launchers_node_number_comes_before_the_host_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "alpha")
    monkeypatch.delenv("GROUP_RANK", raising=False)
    monkeypatch.delenv("SLURM_NODEID", raising=False)
    assert host_name() == "alpha"
    monkeypatch.setenv("SLURM_NODEID", "3")
    in_slurm = host_name()
    monkeypatch.setenv("GROUP_RANK", "3")
    under_torchrun = host_name()
    assert len({"alpha", in_slurm, under_torchrun}) == 3
    monkeypatch.setattr(socket, "gethostname", lambda: "beta")
    assert host_name() == under_torchrun
    monkeypatch.setenv("GROUP_RANK", "0")
    assert host_name() != under_torchrun, "node 0 is a node, too"

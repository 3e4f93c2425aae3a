"""Levels on real ranks: from a device mesh, from hosts, and the groups that they become."""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from cadenza.engine.in_place_mean import average
from cadenza.engine.packing import Fragment
from cadenza.topology import Topology, hosts_of
from support.ranks import RankPool, outcome

Groups = list[tuple[tuple[int, ...], ...]]


def groups_of(topology: Topology) -> Groups:
    return [level.groups for level in topology.levels]


def from_mesh(shape: tuple[int, ...], names: tuple[str, ...] | None, dims: list[Any] | None) -> Groups:
    return groups_of(Topology.from_mesh(init_device_mesh("cpu", shape, mesh_dim_names=names), dims))


def test_a_mesh_of_one_dimension_is_one_level(ranks: RankPool) -> None:
    assert ranks.run(3, from_mesh, (3,), None, None) == [[((0, 1, 2),)]] * 3


def test_the_last_dimension_of_a_mesh_is_the_innermost_level(ranks: RankPool) -> None:
    assert ranks.run(4, from_mesh, (2, 2), ("site", "host"), None) == [[((0, 1), (2, 3)), ((0, 1, 2, 3),)]] * 4


def test_dims_choose_the_order_of_the_levels(ranks: RankPool) -> None:
    expected = [((0, 2), (1, 3)), ((0, 2, 1, 3),)]
    for result in ranks.run(4, from_mesh, (2, 2), ("site", "host"), ["site", "host"]):
        assert [{frozenset(group) for group in level} for level in result] == [
            {frozenset(group) for group in level} for level in expected
        ]


@pytest.mark.parametrize("dims", [["replicate"], [0]])
def test_ranks_along_a_dimension_left_out_do_not_come_together(ranks: RankPool, dims: list[Any]) -> None:
    results = ranks.run(4, from_mesh, (2, 2), ("replicate", "shard"), dims)
    assert results == [[((0, 2),)], [((1, 3),)], [((0, 2),)], [((1, 3),)]]


def test_two_of_three_dimensions_make_levels_within_the_third(ranks: RankPool) -> None:
    results = ranks.run(4, from_mesh, (2, 1, 2), ("site", "host", "shard"), ["host", "site"])
    assert results[0] == results[2] == [((0,), (2,)), ((0, 2),)]
    assert results[1] == results[3] == [((1,), (3,)), ((1, 3),)]


@pytest.mark.parametrize(
    ("dims", "words"),
    [
        (["rack"], "no dimension 'rack'; it has ('site', 'host')"),
        ([2], "no dimension 2"),
        (["site", "site"], "stands once"),
        (["site", 0], "stands once"),
        ([], "at least one level"),
    ],
)
def test_dimensions_that_a_mesh_does_not_have_are_refused(ranks: RankPool, dims: list[Any], words: str) -> None:
    for result in ranks.run(2, from_mesh_outcome, dims):
        assert result[:2] == ("error", "TopologyError")
        assert words in result[2]


def from_mesh_outcome(dims: list[Any]) -> tuple[Any, ...]:
    return outcome(from_mesh, (2, 1), ("site", "host"), dims)


def mesh_of_the_first_two() -> tuple[Any, ...]:
    mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=("host",))
    return outcome(lambda: groups_of(Topology.from_mesh(mesh)))


def test_a_rank_outside_the_mesh_is_told_so(ranks: RankPool) -> None:
    inside, _, outside = ranks.run(3, mesh_of_the_first_two)
    assert inside == ("ok", [((0, 1),)])
    assert outside == ("error", "TopologyError", "This rank is not part of the mesh.")


def from_hosts_by_node_number(nodes: list[str]) -> Groups:
    os.environ["GROUP_RANK"] = nodes[dist.get_rank()]
    return groups_of(Topology.from_hosts())


def test_ranks_of_one_launcher_are_one_host(ranks: RankPool) -> None:
    assert ranks.run(4, from_hosts_by_node_number, ["0", "1", "0", "1"]) == [[((0, 2), (1, 3)), ((0, 1, 2, 3),)]] * 4
    assert ranks.run(3, from_hosts_by_node_number, ["5", "5", "5"]) == [[((0, 1, 2),)]] * 3


def from_hosts_by_name(names: list[str]) -> tuple[Groups, dict[int, str]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("GROUP_RANK")
        patch.setattr(socket, "gethostname", lambda: names[dist.get_rank()])
        return groups_of(Topology.from_hosts()), hosts_of()


def test_without_a_launcher_ranks_with_one_host_name_are_one_host(ranks: RankPool) -> None:
    names = ["alpha", "beta", "beta", "alpha"]
    expected = ([((0, 3), (1, 2)), ((0, 1, 2, 3),)], dict(enumerate(names)))
    assert ranks.run(4, from_hosts_by_name, names) == [expected] * 4


def from_hosts_within_a_subgroup() -> Groups | None:
    rank = dist.get_rank()
    os.environ["GROUP_RANK"] = str(rank // 2)
    group = dist.new_group([1, 2, 3])
    if rank == 0:
        return None
    return groups_of(Topology.from_hosts(within=group))


def test_hosts_are_asked_within_a_group(ranks: RankPool) -> None:
    assert ranks.run(4, from_hosts_within_a_subgroup) == [None, *[[((1,), (2, 3)), ((1, 2, 3),)]] * 3]


def average_at_each_level(nodes: list[str]) -> list[tuple[float, bool]]:
    """The mean of the ranks at each level, and whether its group is the world."""
    os.environ["GROUP_RANK"] = nodes[dist.get_rank()]
    seen = []
    for level in Topology.from_hosts().levels:
        values = torch.full((1000,), float(dist.get_rank()))
        group = level.process_group()
        average(Fragment([values]), group)
        assert len(set(values.tolist())) == 1
        seen.append((values[0].item(), group is dist.group.WORLD))
    return seen


def test_values_are_averaged_inside_the_group_of_a_level(ranks: RankPool) -> None:
    results = ranks.run(4, average_at_each_level, ["7", "8", "7", "8"])
    assert results == [[(mean, False), (1.5, True)] for mean in (1.0, 2.0, 1.0, 2.0)]


def test_a_group_of_one_rank_keeps_its_values(ranks: RankPool) -> None:
    results = ranks.run(3, average_at_each_level, ["0", "1", "1"])
    assert [levels[0][0] for levels in results] == [0.0, 1.5, 1.5]


def replicas_of_a_mesh() -> tuple[float, list[int]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    [level] = Topology.from_mesh(mesh, ["replicate"]).levels
    group = level.process_group()
    values = torch.full((10,), float(dist.get_rank()))
    average(Fragment([values]), group)
    return values[0].item(), dist.get_process_group_ranks(group)


def test_replicas_of_a_mesh_average_and_shards_stay_apart(ranks: RankPool) -> None:
    assert ranks.run(4, replicas_of_a_mesh) == [(1.0, [0, 2]), (2.0, [1, 3]), (1.0, [0, 2]), (2.0, [1, 3])]


def group_within_a_group() -> tuple[bool, list[int]] | None:
    whole = dist.new_group([0, 2])
    if dist.get_rank() == 1:
        return None
    [level] = Topology.from_sizes([2], ranks=[0, 2]).levels
    return level.process_group(whole) is whole, dist.get_process_group_ranks(level.process_group())


def test_a_level_as_large_as_the_group_is_that_group(ranks: RankPool) -> None:
    assert ranks.run(3, group_within_a_group) == [(True, [0, 2]), None, (True, [0, 2])]

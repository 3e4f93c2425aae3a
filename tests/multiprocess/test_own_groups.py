"""The process groups of Cadenza's own: their backends, and that making them needs only their members."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import cadenza
from cadenza import LevelPlan, Strategy
from cadenza.common import process_groups
from cadenza.common.process_groups import backend_beside, backend_for, control_device, without_splitting
from cadenza.engine import attach
from cadenza.participants.fixed import FixedParticipants
from cadenza.transports import process_group_of
from cadenza.transports.c10d_group import C10dGroup, group_of
from support.ranks import RankPool

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("config", "given", "expected"),
    [
        ("cuda:nccl", "nccl", "cpu:gloo,cuda:nccl"),
        ("cpu:gloo,cuda:nccl", "cpu:gloo,cuda:nccl", "cpu:gloo,cuda:nccl"),
        ("cpu:gloo,cuda:gloo", "gloo", "gloo"),
        ("xpu:xccl", "xccl", "cpu:gloo,xpu:xccl"),
    ],
)
def test_small_messages_have_a_backend_on_the_cpu(config: str, given: str, expected: str) -> None:
    group: Any = object()
    with mock.patch.multiple(process_groups.dist, get_backend_config=lambda _: config, get_backend=lambda _: given):
        assert backend_beside(group, through_host=False) == expected
        assert backend_beside(group, through_host=True) == "cpu:gloo"
    with mock.patch.object(process_groups.dist, "get_backend_config", return_value=expected):
        assert expected == "gloo" or control_device(group) == CPU


def look_at_levels() -> list[tuple[list[int], str | None, str | None]]:
    """The members and backends of every transport of a strategy that crosses sites through the host."""
    levels = (LevelPlan(2, groups=2), LevelPlan(4, through_host=True))
    participants = FixedParticipants(Strategy(levels=levels), group_of(None))
    stage = participants.levels[1].stage
    assert stage is not None
    found = []
    for transport in (stage.inside, stage.across, participants.levels[1].transport):
        group = process_group_of(transport)
        found.append((list(transport.members), backend_for(group, CPU), backend_for(group, CUDA)))
    dist.barrier()
    return found


def test_only_the_level_that_asks_for_it_goes_through_the_host(ranks: RankPool) -> None:
    for rank, (inside, across, whole) in enumerate(ranks.run(4, look_at_levels)):
        assert inside == (sorted({rank, rank ^ 1}), "gloo", "gloo")
        assert across == (sorted({rank, rank ^ 2}), "gloo", None)
        assert whole == ([0, 1, 2, 3], "gloo", None)


def make_groups_of_a_bound_world() -> tuple[list[object], bool]:
    """Which devices the world was bound to while groups were made; and that it is bound again."""
    world = dist.group.WORLD
    assert world is not None
    seen: list[object] = []
    new_group = dist.new_group

    def looking(*args: Any, **options: Any) -> Any:
        seen.append(world.bound_device_id)
        return new_group(*args, **options)

    if dist.get_rank() == 0:
        new_group([0])  # an unequal number of groups is made up for
    world.bound_device_id = CUDA
    with mock.patch.object(dist, "new_group", looking):
        C10dGroup(world).connect([0, 1])
    bound = world.bound_device_id == CUDA
    world.bound_device_id = None
    dist.barrier()
    return seen, bound


def test_no_communicator_is_split_off_that_of_the_world(ranks: RankPool) -> None:
    zero, one = ranks.run(2, make_groups_of_a_bound_world)
    assert zero == ([None], True)
    assert one == ([None, None], True)


def fail_to_make_a_group() -> bool:
    world = dist.group.WORLD
    assert world is not None
    world.bound_device_id = CUDA
    with pytest.raises(ValueError, match="no"), without_splitting():
        raise ValueError("no")
    bound = world.bound_device_id == CUDA
    world.bound_device_id = None
    return bound


def test_a_world_stays_bound_when_making_a_group_fails(ranks: RankPool) -> None:
    assert ranks.run(1, fail_to_make_a_group) == [True]


def attach_with_offloading_on_one_rank() -> str:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    cadenza.attach(model, optimizer, cadenza.diloco(4, offload=dist.get_rank() == 1)).close()
    return "attached"


def test_on_the_cpu_each_rank_may_offload_or_not(ranks: RankPool) -> None:
    assert ranks.run(2, attach_with_offloading_on_one_rank) == ["attached"] * 2


def test_on_a_device_all_ranks_offload_or_none_does() -> None:
    view: Any = SimpleNamespace(parameters=lambda: {"weight": SimpleNamespace(device=CUDA)})
    near, far = (attach._terms(cadenza.diloco(4, offload=offload), view) for offload in (True, False))
    assert set(near) ^ set(far) == {"rounds are held on cpu", "rounds are held on cuda"}

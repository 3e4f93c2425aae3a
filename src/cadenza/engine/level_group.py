"""A level at work: its plan, this rank's group of it, and what the group does together besides rounds of parameters."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from cadenza.common.process_groups import store_of, timeout_of
from cadenza.engine.exchange import Stage
from cadenza.engine.in_place_mean import run_round
from cadenza.engine.packing import Fragment, wire_dtype
from cadenza.errors import NotInitializedError, TopologyError
from cadenza.strategy import Groups, LevelPlan, Strategy
from cadenza.topology import Level, RoundTopology, Topology
from cadenza.transports import Transport, connect

__all__ = ["LevelGroup", "build_levels"]


@dataclass
class LevelGroup:
    """This rank's group at one level; it is Cadenza's own, so that nobody else's collectives cross it."""

    plan: LevelPlan
    name: str
    group_ref: Callable[[], dist.ProcessGroup | None]
    transport: Transport
    stage: Stage | None = None

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group, which nothing here keeps alive: its sockets close when torch destroys it."""
        group = self.group_ref()
        if group is None:
            raise NotInitializedError("The process group was destroyed; finish() the synchronizer before that.")
        return group

    @property
    def alone(self) -> bool:
        """Whether this rank is the only member."""
        return len(self.transport.members) == 1

    @property
    def this_rank(self) -> int:
        """This process's global rank."""
        return self.transport.members[self.transport.position]

    def abandon(self) -> None:
        """Let go of the level's connections."""
        self.transport.abandon()
        if self.stage is not None:
            self.stage.across.abandon()

    @torch.no_grad()
    def average(self, tensors: Mapping[str, torch.Tensor], *, step: int) -> None:
        """Replace tensors by their plain mean, in place."""
        if tensors and not self.alone:
            fragment = _fragment(tensors)
            run_round(fragment, self.transport, step=step)

    @torch.no_grad()
    def take_largest(self, counters: Mapping[str, torch.Tensor]) -> None:
        """Give integer tensors the largest value that any member has."""
        if not counters or self.alone:
            return
        mine = torch.cat([counter.reshape(-1).to("cpu", torch.int64) for counter in counters.values()])
        replies = self.transport.exchange(bytes(mine.view(torch.uint8).tolist()))()
        largest = torch.stack([torch.frombuffer(bytearray(reply), dtype=torch.int64) for reply in replies]).amax(0)
        parts = largest.split([counter.numel() for counter in counters.values()])
        for counter, part in zip(counters.values(), parts, strict=True):
            counter.copy_(part.view(counter.shape))

    @torch.no_grad()
    def take_from_first(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Give tensors the values that the first member has, in place."""
        averageable = {name: tensor for name, tensor in tensors.items() if wire_dtype(tensor.dtype) is not None}
        fragment = _fragment(averageable)
        fragment.refuse_mesh_overlap(self.transport.members, self.this_rank)
        if fragment.problem is not None:
            raise TopologyError(fragment.problem)
        if self.alone:
            return
        for name, tensor in tensors.items():
            if name not in averageable:
                memory = tensor.contiguous()
                dist.broadcast(memory, src=self.transport.members[0], group=self.group)
                tensor.copy_(memory)
        for bucket in fragment.buckets(self.transport.capacity):
            memory = torch.empty(bucket.numel, dtype=bucket.dtype, device=bucket.device)
            bucket.pack(memory)
            dist.broadcast(memory, src=self.transport.members[0], group=self.group)
            bucket.unpack(memory)


def build_levels(strategy: Strategy, group: dist.ProcessGroup, topology: Topology | None) -> list[LevelGroup]:
    """Make this rank's group of every level; all ranks call this together."""
    ranks = dist.get_process_group_ranks(group)
    if topology is None:
        topology = Topology(tuple(_partition(plan.groups, ranks, group) for plan in strategy.levels))
        if left_out := sorted(set(ranks) ^ topology.levels[0].ranks):
            raise TopologyError(
                f"Every rank stands in one group of every level; ranks {left_out} are left out, or do not exist."
            )
    if len(topology.levels) != len(strategy.levels):
        raise TopologyError(
            f"The topology has {len(topology.levels)} levels and the strategy {len(strategy.levels)}; they must match."
        )
    timeout = timedelta(seconds=timeout_of(group))
    _count_groups_alike(group, timeout)
    levels: list[LevelGroup] = []
    for i, (plan, partition) in enumerate(zip(strategy.levels, topology.levels, strict=True)):
        own = _new_group(partition.group_of(dist.get_rank()), timeout)
        stage = _stage(partition, topology.levels[i - 1], levels[-1], timeout) if i else None
        levels.append(LevelGroup(plan, plan.name or f"level {i}", weakref.ref(own), connect(own), stage))
    return levels


def _count_groups_alike(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Make as many groups on every rank: torch names a group by its ranks and by how many groups there are."""
    store, rank = store_of(group), dist.get_rank()
    visit = store.add(f"cadenza/group_visits/{rank}", 1)
    mine = len(dist.distributed_c10d._world.pg_names)
    store.set(f"cadenza/groups/{visit}/{rank}", str(mine))
    counts = [int(store.get(f"cadenza/groups/{visit}/{other}")) for other in dist.get_process_group_ranks(group)]
    for _ in range(max(counts) - mine):
        _new_group([rank], timeout)


def _new_group(ranks: Sequence[int], timeout: timedelta) -> dist.ProcessGroup:
    group = dist.new_group(list(ranks), timeout=timeout, use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)
    return group


def _stage(outer: Level, inner: Level, inside: LevelGroup, timeout: timedelta) -> Stage | None:
    """Return the way of the outer level through the inner one, if the inner groups are several and of one size."""
    rank = dist.get_rank()
    mine = outer.group_of(rank)
    groups = [group for group in inner.groups if group[0] in mine]
    sizes = {len(group) for group in groups}
    if len(groups) == 1 or len(sizes) > 1 or sizes == {1}:
        _new_group([rank], timeout)  # torch names groups by their number: every rank makes as many
        return None
    position = inner.group_of(rank).index(rank)
    return Stage(inside.transport, connect(_new_group([group[position] for group in groups], timeout)))


def _partition(groups: Groups, ranks: Sequence[int], within: dist.ProcessGroup) -> Level:
    if groups == "all":
        return Level((tuple(ranks),))
    if groups == "host":
        return Topology.from_hosts(within=within).levels[0]
    if isinstance(groups, int):
        return Topology.from_sizes([groups], ranks=ranks).levels[0]
    if isinstance(groups, RoundTopology):
        raise TopologyError(f"The groups of {groups!r} change from round to round, which this engine cannot do.")
    return Level(groups)


def _fragment(tensors: Mapping[str, torch.Tensor]) -> Fragment:
    names = list(tensors)
    return Fragment(list(tensors.values()), label=lambda i: names[i])

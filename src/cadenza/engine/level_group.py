"""A level at work: its plan, this rank's group of it, and what the group does together besides rounds of parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from cadenza.engine.exchange import Stage
from cadenza.engine.in_place_mean import run_round
from cadenza.engine.packing import Fragment, wire_dtype
from cadenza.errors import TopologyError
from cadenza.strategy import Groups, LevelPlan, Strategy
from cadenza.topology import Level, Topology
from cadenza.transports import Transport
from cadenza.transports.group import Group

__all__ = ["LevelGroup", "build_levels"]


@dataclass
class LevelGroup:
    """This rank's group at one level; it is Cadenza's own, so that nobody else's collectives cross it."""

    plan: LevelPlan
    name: str
    transport: Transport
    stage: Stage | None = None

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
                self.transport.broadcast(memory, source=0)
                tensor.copy_(memory)
        for bucket in fragment.buckets(self.transport.capacity):
            memory = torch.empty(bucket.numel, dtype=bucket.dtype, device=bucket.device)
            bucket.pack(memory)
            self.transport.broadcast(memory, source=0)
            bucket.unpack(memory)


def build_levels(strategy: Strategy, group: Group, topology: Topology | None) -> list[LevelGroup]:
    """Make this rank's group of every level; all ranks call this together."""
    if topology is None:
        topology = Topology(tuple(_partition(plan.groups, group) for plan in strategy.levels))
        if left_out := sorted(set(group.ranks) ^ topology.levels[0].ranks):
            raise TopologyError(
                f"Every rank stands in one group of every level; ranks {left_out} are left out, or do not exist."
            )
    if len(topology.levels) != len(strategy.levels):
        raise TopologyError(
            f"The topology has {len(topology.levels)} levels and the strategy {len(strategy.levels)}; they must match."
        )
    levels: list[LevelGroup] = []
    for i, (plan, partition) in enumerate(zip(strategy.levels, topology.levels, strict=True)):
        transport = group.connect(partition.group_of(group.rank))
        stage = _stage(partition, topology.levels[i - 1], levels[-1], group) if i else None
        levels.append(LevelGroup(plan, plan.name or f"level {i}", transport, stage))
    return levels


def _stage(outer: Level, inner: Level, inside: LevelGroup, group: Group) -> Stage | None:
    """Return the way of the outer level through the inner one, if the inner groups are several and of one size."""
    mine = outer.group_of(group.rank)
    groups = [part for part in inner.groups if part[0] in mine]
    sizes = {len(part) for part in groups}
    if len(groups) == 1 or len(sizes) > 1 or sizes == {1}:
        return None
    position = inner.group_of(group.rank).index(group.rank)
    return Stage(inside.transport, group.connect([part[position] for part in groups]))


def _partition(groups: Groups, within: Group) -> Level:
    if groups == "all":
        return Level((within.ranks,))
    if groups == "host":
        return Topology.from_hosts(within.host_names()).levels[0]
    if isinstance(groups, int):
        return Topology.from_sizes([groups], ranks=within.ranks).levels[0]
    return Level(groups)


def _fragment(tensors: Mapping[str, torch.Tensor]) -> Fragment:
    names = list(tensors)
    return Fragment(list(tensors.values()), label=lambda i: names[i])

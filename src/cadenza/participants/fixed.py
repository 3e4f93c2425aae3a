"""Workers that are always the same: the ranks of a process group, cut into the groups of every level.

Whoever fails ends the training of all, so nobody has to ask who is there: all verbs of a round are immediate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar, cast

from cadenza.errors import TopologyError
from cadenza.participants.base import Admission, FailedRound, SharedState
from cadenza.participants.level_group import LevelGroup, Stage
from cadenza.participants.round_id import RoundId
from cadenza.strategy import Groups, Strategy
from cadenza.topology import Level, RoundTopology, Topology
from cadenza.transports import Transport
from cadenza.transports.group import Group

__all__ = ["FixedParticipants"]

Result = TypeVar("Result")


class FixedParticipants:
    """The ranks of a group, all of which hold every round of theirs; all of them make this together.

    Args:
        strategy: Whose levels they form.
        group: The ranks that train together.
        topology: The groups of each level, if the strategy's own `groups` do not say it.
    """

    always_together = True
    atomic = False
    behind = False
    over = False
    idle = False
    last_phases = (0,)
    held = 0

    def __init__(self, strategy: Strategy, group: Group, topology: Topology | None = None) -> None:
        self.levels: Sequence[LevelGroup] = _build_levels(strategy, group, topology)
        self._group = group
        self._changing: dict[tuple[int, ...], LevelGroup] = {}

    @property
    def members(self) -> tuple[int, ...]:
        return tuple(self.levels[-1].transport.members)

    def group(self, level: int, round: int) -> LevelGroup:
        known = self.levels[level]
        if not known.plan.regroups:
            return known
        groups = cast(RoundTopology, known.plan.groups)
        partition = _checked(groups.groups(round, self._group.ranks), self._group.ranks, round)
        mine = partition.group_of(self._group.rank)
        if mine not in self._changing:  # its members have met in the same rounds, so it is new to all of them
            self._changing[mine] = LevelGroup(
                known.plan, known.name, self._group.connect(mine, through_host=known.plan.through_host)
            )
        return self._changing[mine]

    def resume(self, held: int, marks: Sequence[str]) -> None:
        """Nobody counts."""

    def missed(self, round: RoundId) -> bool:
        return False

    def start(self, state: SharedState) -> None:
        state.take_from_first(self.levels[-1].transport)

    def awaited(self) -> RoundId | None:
        return None

    def summons(self, step: int) -> RoundId | None:
        return None

    def follow(self, own: RoundId, *, after: RoundId) -> RoundId | None:
        return own

    def admit(
        self, round: RoundId, digest: str, *, settled: bool = False, last: bool = False
    ) -> Admission | FailedRound:
        return Admission()

    def catch_up(self, state: SharedState) -> FailedRound | None:
        return None

    def agree(self, round: RoundId, exchange: Callable[[], Result]) -> Result | FailedRound:
        return exchange()

    def commit(self, round: RoundId, wire_s: float, shares: Sequence[float] = ()) -> None:
        """Nobody counts: a round that has landed here has landed everywhere, or training has ended."""

    def prepare_last_round(self) -> None:
        """All are there."""

    def end(self, *, together: bool) -> None:
        """Nobody comes later."""

    def close(self) -> None:
        for level in (*self.levels, *self._changing.values()):
            level.abandon()


def _build_levels(strategy: Strategy, group: Group, topology: Topology | None) -> list[LevelGroup]:
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
        transport = group.connect(partition.group_of(group.rank), through_host=plan.through_host)
        staged = i > 0 and not plan.codec.shaped
        across = _across(partition, topology.levels[i - 1], levels[-1].transport, group) if staged else None
        stage = None
        if across is not None:
            stage = Stage(levels[-1].transport, group.connect(across, through_host=plan.through_host))
        levels.append(LevelGroup(plan, plan.name or f"level {i}", transport, stage))
    return levels


def _across(outer: Level, inner: Level, inside: Transport, group: Group) -> list[int] | None:
    """Return who has this rank's place in each inner group of the outer one, if these are several and of one size."""
    mine = outer.group_of(group.rank)
    groups = [members for members in inner.groups if members[0] in mine]
    sizes = {len(members) for members in groups}
    if len(groups) == 1 or len(sizes) > 1 or sizes == {1}:
        return None
    # Positions are the transport's, which orders ranks by number, whatever the order in which groups were written.
    return [sorted(members)[inside.position] for members in groups]


def _partition(groups: Groups, group: Group) -> Level:
    if groups == "site":
        raise TopologyError(
            'groups="site" belongs to faults=shrink() or skip_round(), where cadenza.join(site=…) says who is where. '
            'Under raise_error() use "host", a number of ranks, explicit groups, or attach(topology=…).'
        )
    if groups == "host":
        return Topology.from_hosts(group.host_names()).levels[0]
    if isinstance(groups, int):
        return Topology.from_sizes([groups], ranks=group.ranks).levels[0]
    if isinstance(groups, tuple):
        return Level(groups)
    return Level((group.ranks,))  # "all", or groups that change: among whom rounds may be held


def _checked(groups: tuple[tuple[int, ...], ...], ranks: Sequence[int], round: int) -> Level:
    level = Level(groups)
    if wrong := sorted(level.ranks ^ set(ranks)):
        raise TopologyError(
            f"The groups of round {round} must hold every rank once; ranks {wrong} are left out, or do not exist: "
            f"{groups}."
        )
    return level

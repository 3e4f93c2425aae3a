"""`attach` a strategy to a model: the check before anything is sent, the participants, the synchronizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from cadenza.common.checksums import checksum
from cadenza.common.identity import identity
from cadenza.common.process_groups import resolve
from cadenza.engine.attached import refuse_second, remember
from cadenza.engine.foreign import refuse_torchft
from cadenza.engine.model_view import ModelView
from cadenza.engine.optimizers import plain_optimizers
from cadenza.engine.preflight import compare
from cadenza.engine.surprises import warn_of_surprises
from cadenza.engine.synchronizer import Synchronizer
from cadenza.errors import DisagreementError, NotInitializedError, UsageError
from cadenza.observers import Observer
from cadenza.participants.base import Participants
from cadenza.participants.elastic import ElasticParticipants
from cadenza.participants.fixed import FixedParticipants
from cadenza.participants.island import Island
from cadenza.participants.membership import Membership, join
from cadenza.strategy import Strategy, check_is_strategy
from cadenza.topology import Topology
from cadenza.transports.c10d_group import C10dGroup
from cadenza.transports.group import Group, current_group
from cadenza.version import __version__

__all__ = ["attach"]

_MEND = "Give every rank the same model, strategy and version"
_STAGES = (
    "; if ranks hold different stages of a pipeline, let only those compare that hold the same one: pass "
    'process_group=mesh["dp"].get_group(), the group of the dimension that the topology was made of, beside topology=…'
)


def attach(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    strategy: Strategy,
    *,
    observers: Sequence[Observer] = (),
    topology: Topology | None = None,
    process_group: dist.ProcessGroup | Group | None = None,
    membership: Membership | None = None,
    auto: bool = False,
    scaler: torch.amp.GradScaler | None = None,
) -> Synchronizer:
    """Run a strategy on a model: all ranks call this, with the same model and strategy, after `init_process_group`.

    The model's class and its parameters' names stay as they are. All ranks start from the values of the first.

    Args:
        model: The model, also wrapped in DistributedDataParallel, sharded by FSDP2, or compiled.
        optimizer: The inner optimizer, or several, also in a wrapper that has it as `.optimizer`.
        strategy: What to do, for instance `cadenza.diloco()`.
        observers: What gets a `RoundReport` for every round.
        topology: With whom, if the strategy's own `groups` do not say it: one level for each of the strategy's.
        process_group: The ranks that train together; None means everyone. Workers that are threads
            (`cadenza.testing.workers`) have a group of their own, which is found without it.
        membership: Under `skip_round` and `shrink`, this worker's place in the job (`cadenza.join`), instead of a
            process group: none needs to be initialised. By default it is made from the environment.
        auto: Call `step()` by itself after every step of the (last) optimizer, for loops that a framework owns.
        scaler: With `auto`, the GradScaler, at whose `update` the clock ticks instead: it may skip optimizer steps.

    >>> import torch, torch.distributed as dist, cadenza
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> sync = cadenza.attach(model, optimizer, cadenza.local_sgd(period=4))
    >>> for _ in range(8):
    ...     model(torch.ones(2)).backward()
    ...     optimizer.step(); optimizer.zero_grad()
    ...     sync.step()
    >>> sync.finish()
    >>> dist.destroy_process_group()
    """
    check_is_strategy(strategy)
    view = ModelView(model, plain_optimizers(optimizer))
    refuse_second(view)
    warn_of_surprises(view, strategy)
    participants = (
        _elastic(view, strategy, membership, given={"topology": topology, "process_group": process_group})
        if strategy.faults.tolerant
        else _fixed(view, strategy, membership, topology=topology, process_group=process_group)
    )
    sync = Synchronizer(view, strategy, participants, observers=observers, auto=auto, scaler=scaler)
    remember(sync)
    return sync


def _fixed(
    view: ModelView,
    strategy: Strategy,
    membership: Membership | None,
    *,
    topology: Topology | None,
    process_group: dist.ProcessGroup | Group | None,
) -> Participants:
    if membership is not None:
        raise ValueError(
            "membership belongs to faults=skip_round() or shrink(); this strategy raises at the first fault."
        )
    for made_by in (process_group, *(ddp.process_group for ddp in view.ddps)):
        refuse_torchft(made_by)
    group = _group(process_group)
    mend = _MEND if topology is None or topology.levels[-1].ranks >= set(group.ranks) else _MEND + _STAGES
    compare(group, terms=_terms(strategy, view), model=view.describe(), mend=mend)
    view.refuse_what_cannot_work(strategy)
    view.refuse_ddp_elsewhere(group.ranks)
    return FixedParticipants(strategy, group, topology)


def _elastic(
    view: ModelView, strategy: Strategy, membership: Membership | None, *, given: Mapping[str, object]
) -> Participants:
    if membership is not None:
        _refuse_used(membership)
    try:
        island = membership.island if membership is not None else Island()
        terms = _elastic_terms(view, strategy, island, given)
        membership = membership or join()
        return ElasticParticipants(membership, strategy.faults, strategy.levels, terms, sharded=view.sharded)
    except BaseException:
        if membership is not None:
            membership.close()  # or the others would wait, at every round, for a worker that never comes
        raise


def _refuse_used(membership: Membership) -> None:
    if membership.closed:
        raise NotInitializedError(
            "This membership has ended, with the synchronizer that it was for: pass a new one, membership="
            "cadenza.join(…), under another name of the job (CADENZA_JOB, or join(job=…)) if that one has finished."
        )
    if membership.taken:
        raise UsageError(
            "This membership belongs to another synchronizer: one is for one model. Join once more for this one, under "
            "a job's name of its own: membership=cadenza.join(job=…)."
        )


def _elastic_terms(view: ModelView, strategy: Strategy, island: Island, given: Mapping[str, object]) -> str:
    """Return what must be the same on all workers; raise if this one cannot train so."""
    replica = island.ranks if island.size > 1 else ()
    view.refuse_what_cannot_work(strategy, replica=replica)
    if named := [name for name, value in given.items() if value is not None]:
        raise ValueError(
            f"{named[0]} belongs to faults=raise_error(): under skip_round and shrink workers come and go, and meet "
            "through membership=cadenza.join(…)."
        )
    held = "in shards" if view.sharded else "whole"
    ranks = [f"replicas of {island.size} ranks, which hold the model {held}"] if replica else []
    terms = "; ".join([*_terms(strategy, view), *view.describe(), *ranks])
    _compare_mates(island, view, terms)
    return terms


def _compare_mates(island: Island, view: ModelView, terms: str) -> None:
    """Raise, on all ranks of a replica, if they do not hold one model."""
    if len(set(island.loop.exchange(terms))) > 1:
        raise DisagreementError(f"The ranks of this replica have different models or strategies. {_MEND}.")
    whole = [] if view.sharded else [tensor.detach() for tensor in view.parameters().values()]
    mark = checksum(*(tensor.cpu().contiguous() for tensor in whole)) if island.size > 1 else 0
    if len(set(island.loop.exchange(str(mark)))) > 1:
        raise DisagreementError(
            "The ranks of this replica hold different values of the model, though none of it is sharded: one replica "
            "is one model. Wrap it in DistributedDataParallel over the replica's ranks, shard it by FSDP2, or give "
            "every rank a place of its own (cadenza.join without replica=)."
        )


def _group(given: dist.ProcessGroup | Group | None) -> Group:
    """Return the ranks that train together: those of a process group, or the threads among which this one is."""
    found = current_group() if given is None else given
    if found is None or isinstance(found, dist.ProcessGroup) or not hasattr(found, "host_names"):
        return C10dGroup(resolve(found))  # type: ignore[arg-type]
    return found


def _terms(strategy: Strategy, view: ModelView) -> list[str]:
    """Return what must be the same on all workers besides the model."""
    devices = {"cpu" if strategy.offload else parameter.device.type for parameter in view.parameters().values()}
    return [*identity(strategy), f"Cadenza {__version__}", f"rounds are held on {' and '.join(sorted(devices))}"]

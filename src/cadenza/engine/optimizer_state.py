"""The inner optimizer's state at periods of its own: what a `StateSchedule` names is averaged over all, in place."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from cadenza.engine.finiteness import problem_of
from cadenza.engine.header import Header
from cadenza.engine.in_place_mean import average_in_place
from cadenza.engine.packing import Fragment
from cadenza.engine.replica import Replica
from cadenza.errors import NotFiniteError, UnsupportedTensorError

__all__ = ["average_due_state"]


@torch.no_grad()
def average_due_state(replica: Replica, n: int) -> int:
    """Average the entries of the optimizer's state that are due after local step `n` over all; return the bytes sent.

    It is their plain mean, over those who still have data. What is wrong is raised on all ranks, with nothing changed.
    """
    schedule = replica.strategy.optimizer_state
    keys = () if isinstance(schedule, str) else schedule.due(n)
    if not keys:
        return 0
    state, transport = replica.state, replica.participants.levels[-1].transport
    tensors = replica.view.optimizer_tensors(list(replica.view.parameters()), keys)
    names = list(tensors)
    fragment = Fragment(list(tensors.values()), label=lambda i: f"optimizer state {names[i]}", names=names)
    norm2 = fragment.norm2()
    missing = _missing(keys, tensors, replica)
    problem = missing or problem_of(fragment, norm2, state.clock, fragment.first_not_finite)
    if problem and len(transport.members) == 1:
        raise UnsupportedTensorError(problem) if missing else NotFiniteError(problem)
    weight = 0.0 if state.counts.exhausted else 1.0
    header = Header(state.moment, fragment.digest, able=True, weight=weight, norm2=norm2)
    return average_in_place(fragment, transport, header, problem=problem).exchanged.bytes_sent


def _missing(keys: Collection[str], found: Mapping[str, torch.Tensor], replica: Replica) -> str | None:
    """Say which entries no parameter has; a misspelled one would never be averaged."""
    there = {name.rpartition("/")[2] for name in found}
    missing = [key for key in keys if key not in there]
    if not missing:
        return None
    every = replica.view.optimizer_tensors(list(replica.view.parameters()))
    known = sorted({name.rpartition("/")[2] for name in every})
    return (
        f"the optimizer's state has no {' and no '.join(missing)} to average at step {replica.state.clock}; it has "
        f"{' and '.join(known) or 'nothing that has a mean'}. Name what your optimizer keeps, such as "
        "optimizer_state=cadenza.schedules.moments(momentum_buffer=96)."
    )

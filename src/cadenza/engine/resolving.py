"""What happens between launch and landing: exchange, agree and, where nothing stands against it, the outer step.

It needs no parameters, so it runs in a background thread where the strategy has a delay, and the training loop only
packs at the launch and unpacks at the landing. It may change the anchor there: a fragment has at most one round in
flight, and nobody else reads the anchor before that has landed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from cadenza.common.checksums import checksum
from cadenza.common.norms import norm_squared
from cadenza.engine.differences import take_differences
from cadenza.engine.finiteness import problem_of
from cadenza.engine.flat_mean import FlatRound, average_flat
from cadenza.engine.header import Header
from cadenza.engine.inside import header_of_replica
from cadenza.engine.layout import SpareMemory
from cadenza.engine.level_state import LevelState
from cadenza.engine.measuring import Meter
from cadenza.engine.opening import Scales
from cadenza.engine.outer_inputs import OuterInputs
from cadenza.engine.pending import PendingRound
from cadenza.engine.round_result import RoundResult
from cadenza.participants.base import FailedRound, Participants
from cadenza.participants.level_group import LevelGroup

__all__ = ["Resolver", "take_outer_step"]

_logger = logging.getLogger("cadenza")
_UNEQUAL = (
    "%s, fragment %d: the workers' anchors were not the same to the last bit at step %d, so all have taken that of "
    "worker %d, and will wherever it happens again. Machines of unlike kinds round differently in an optimizer of "
    "torch as the outer update; cadenza.outer.nesterov, sgd and slowmo round alike on all, and spare you the bytes."
)
_ABSURD = 1e6  # times as large as what went into it, or as 1: no outer step makes that of a model
_TAKEN_BACK = (
    "The outer step at step %d gave values that cannot be right (fragment %d): all go on from the anchor before it, "
    "and the outer update begins anew."
)


@dataclass
class Resolver:
    """Takes a launched round to its result.

    Attributes:
        pending: The round; its values are used up.
        group: Who meets, and how.
        state: What the level remembers of the fragment.
        header: What the others are told, but for the norm, which is found here.
        problem: What keeps this worker from taking part, if something does.
        scales: What each contribution counts.
        measures_drift: Whether to measure the drift.
        participants: Who agrees on the result.
        spare: Memory to use.
        faulty: Whether this worker's own values were found to be bad.
    """

    pending: PendingRound
    group: LevelGroup
    state: LevelState
    header: Header
    problem: str | None
    scales: Scales
    measures_drift: bool
    participants: Participants
    spare: SpareMemory
    faulty: bool = False

    @torch.no_grad()
    def resolve(self) -> RoundResult | FailedRound:
        """Exchange the values and, once that has succeeded, make the new anchor of them."""
        pending, plan = self.pending, self.group.plan
        pending.layout.settle()
        anchored = plan.anchored
        spread = self.measures_drift and not anchored
        meter = Meter(self.measures_drift, plan.outer.clip is not None, plan.codec.exact)
        if anchored:
            meter.anchors = self.state.anchors
            origins, norm2, anchor_mark = self._take_differences(meter)
        else:
            origins, norm2, anchor_mark = self._copy_values(pending.keeps_progress or spread)
            meter.origins = origins if spread else None
        work = FlatRound(
            pending.values,
            self.state.codecs,
            self.scales,
            residuals=self.state.residuals,
            exact=pending.anchor_means,
            inner_lrs=pending.inner_lrs,
            meter=meter,
            make_equal=partial(self._make_anchors_equal, meter),
            more=pending.side.exchange if pending.side is not None else None,
        )
        header = replace(self.header, norm2=norm2, atomic=self.participants.atomic, anchor=anchor_mark)
        if header.atomic and work.residuals:
            header = replace(header, fed_back=sum(residual.norm for residual in work.residuals))
        if plan.outer.needs_inner_lr:
            header = replace(header, lr_mark=work.lr_mark)
        result = self.participants.agree(pending.id, lambda: self._exchange(work, header))
        if isinstance(result, FailedRound):
            return result
        result.exchanged.raw_bytes = round(result.exchanged.raw_bytes * pending.layout.filled)
        pending.origins, pending.inner_lrs = origins if pending.keeps_progress else None, work.inner_lrs
        self._finish(result)
        return result

    def _exchange(self, work: FlatRound, header: Header) -> RoundResult:
        """Average the values, unless something keeps this worker, or a rank of its replica, from taking part."""
        header, problem = self._checked(header)
        if header.faulty:
            work.meter.forget()
        describe = self.pending.layout.fragment.describe
        return average_flat(work, self.group, header, problem=problem, describe=describe)

    def _take_differences(self, meter: Meter) -> tuple[Sequence[torch.Tensor] | None, float, int]:
        """Turn the packed values into differences from the anchor.

        Returns:
            Copies of the values if they are needed, the squared norm of the differences, and what marks the anchor.
        """
        pending, anchors, packed = self.pending, self.state.anchors, self.pending.values
        values = self.spare.borrow(pending.layout) if pending.keeps_progress else packed
        pending.layout.settle()  # what was borrowed may still be copied to a device
        sketch = meter.start_sketch(packed)
        marked = self.group.agrees and not self.group.alone
        starts = pending.layout.as_written(anchors)
        rounded = any(start is not anchor for start, anchor in zip(starts, anchors, strict=True))
        norm2, mark = take_differences(starts, packed, values, sketch=sketch, marked=marked and not rounded)
        if marked and rounded:
            mark = checksum(*anchors)
        if self.state.carried is not None:
            meter.forget()
            for flat, lost in zip(values, self.state.carried, strict=True):
                flat.add_(lost)
            norm2 = norm_squared(*values)
        pending.values = values
        outer = self.group.plan.outer
        if outer.needs_own or (pending.restarts and self.participants.atomic):
            pending.own = [flat.clone() for flat in values]
        if outer.needs_anchor_mean:
            pending.anchor_means = [anchor.clone() for anchor in anchors]
        return packed if pending.keeps_progress else None, norm2, mark

    def _copy_values(self, needed: bool) -> tuple[Sequence[torch.Tensor] | None, float, int]:
        values = self.pending.values
        return self.spare.copy(values, self.pending.layout) if needed else None, norm_squared(*values), 0

    def _checked(self, header: Header) -> tuple[Header, str | None]:
        """Find out whether this worker can take part; where a round may fail, its bad values become zeros."""
        fragment, step = self.pending.layout.fragment, self.pending.step
        problem = self.problem or problem_of(fragment, header.norm2, step, self._culprit)
        header, problem = header_of_replica(header, problem, self.group.island)
        if problem is None or not self.participants.atomic:
            return header, problem
        self.faulty = True
        for flat in self.pending.values:
            flat.zero_()
        return replace(header, weight=0.0, norm2=0.0, faulty=True), None

    def _culprit(self) -> str | None:
        """Name the first parameter whose values are not finite."""
        slices = self.pending.layout.slices(self.pending.values)
        return next((f"parameter {name}" for name, part in slices if not part.isfinite().all()), None)

    def _make_anchors_equal(self, meter: Meter, source: int) -> None:
        """Take one member's anchor, as the others do: they were not the same bits."""
        pending, transport = self.pending, self.group.transport
        meter.forget()
        moved = self.state.take_from(transport, source=source)
        if not self.faulty:  # whose values were bad sends zeros
            for flat, step in zip(pending.values, moved, strict=True):
                flat.add_(step)
        if not self.state.warned:
            self.state.warned = True
            _logger.warning(_UNEQUAL, self.group.name, pending.fragment, pending.step, transport.members[source])

    def _finish(self, result: RoundResult) -> None:
        pending, plan = self.pending, self.group.plan
        if self.measures_drift:
            pending.drift = result.measured.drift
        if plan.anchored and not pending.restarts:
            either = self.group.island.rounds.any if self.participants.atomic else None
            take_outer_step(pending, self.state, result, guarded=either)
            self.spare.give_back(pending.values)
            pending.values = ()
        if result.own_left_out:
            pending.origins, pending.alpha, pending.own_left_out = None, 0.0, True


@torch.no_grad()
def take_outer_step(
    pending: PendingRound,
    state: LevelState,
    result: RoundResult,
    now: Sequence[torch.Tensor] = (),
    *,
    guarded: Callable[[bool], bool] | None = None,
) -> None:
    """Make the new anchor of the mean difference; without one where nobody had anything to add.

    Where it is `guarded`, an outer step whose result is not finite, or absurd, is taken back, on all members alike: it
    tells whether that holds on one of the ranks of this worker's replica.
    """
    if result.weightless:
        state.take(pending.values)
        return
    inputs = OuterInputs(
        pending.inner_lrs,
        members=len(result.members),
        mean2=result.measured.mean2,
        own=pending.own,
        now=now,
        anchor_means=pending.anchor_means,
    )
    if guarded is None:
        state.update(pending.values, inputs)
        return
    kept = [anchor.clone() for anchor in state.anchors]
    limit2 = _ABSURD**2 * (norm_squared(*kept, *pending.values) + sum(map(torch.numel, kept)))
    state.update(pending.values, inputs)
    if guarded(not norm_squared(*state.anchors) <= limit2):
        state.go_back_to(kept)
        _logger.warning(_TAKEN_BACK, pending.step, pending.fragment)

"""Landing a round: its result is written into the parameters, and what depends on them is brought up to date."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from cadenza.engine.buffers import average_buffers
from cadenza.engine.collectives import average_tensors
from cadenza.engine.layout import Layout
from cadenza.engine.level_state import LevelState
from cadenza.engine.outer_inputs import OuterInputs
from cadenza.engine.pending import PendingRound
from cadenza.engine.replica import Replica
from cadenza.engine.reporting import Reporter
from cadenza.engine.resolving import take_outer_step
from cadenza.engine.round_result import RoundResult
from cadenza.participants.base import FailedRound
from cadenza.participants.level_group import LevelGroup
from cadenza.participants.round_id import RoundId

__all__ = ["Landing"]


class Landing:
    """Lands the rounds of a replica."""

    def __init__(self, replica: Replica, reporter: Reporter) -> None:
        self._replica, self._reporter = replica, reporter
        self._strategy, self._participants, self._state = replica.strategy, replica.participants, replica.state

    def land(self, pending: PendingRound) -> float | None:
        """Write a round's result into the parameters; return its drift, if it is known."""
        started = time.perf_counter()
        state = self._replica.level_state(pending.level, pending.fragment)
        group = self._participants.group(pending.level, state.rounds)
        result = pending.result()
        if isinstance(result, FailedRound):
            self.fail(pending, result)
            return None
        if pending.restarts:
            landed = self._take_late_step(pending, state, result)
        else:
            landed = state.anchors if group.plan.anchored else pending.values
            pending.write(landed)
        self.bring_up_to_date(pending, landed, result, group)
        for used in (pending.values, pending.origins or ()):
            self._replica.spare.give_back(used)
        self._participants.commit(pending.id, result.wire_s, result.weighed.shares)
        pending.stall_s += time.perf_counter() - started
        self._state.pace.note_stall(pending.level, pending.fragment, pending.stall_s)
        self._reporter.landed(pending, result, group, self._state.clock)
        return pending.drift

    @torch.no_grad()
    def take_first_step(self, level: int, fragment: int, layout: Layout, members: int) -> None:
        """Take an outer step on this worker's own difference: no round was sent yet that could land at this launch."""
        state = self._replica.level_state(level, fragment)
        layout.settle()
        sent, mean = ([torch.zeros_like(anchor) for anchor in state.anchors] for _ in range(2))
        before = [anchor.clone() for anchor in state.anchors]
        inner_lrs = self._replica.view.inner_lrs() if state.plan.outer.needs_inner_lr else {}
        state.update(mean, OuterInputs(inner_lrs, members=members, own=sent, now=state.progress(layout)))
        id = RoundId(self._state.clock, self._state.phase, fragment, level)
        PendingRound(id, level, self._state.clock, layout, origins=before).write(state.anchors)

    def fail(self, pending: PendingRound, failed: FailedRound) -> None:
        """Report a round that failed; a worker whose own values were the reason starts anew from the anchor."""
        pending.give_back()
        if pending.own_left_out or failed.own_fault:
            self._replica.view.reset_optimizer_state(pending.layout.names)
            pending.layout.unpack(self._replica.level_state(0, pending.fragment).anchors)
        self._reporter.failed(pending, failed, self._participants.levels[pending.level], self._state.clock)

    @torch.no_grad()
    def _take_late_step(self, pending: PendingRound, state: LevelState, result: RoundResult) -> Sequence[torch.Tensor]:
        """Take the outer step now, and move the parameters by as much as the anchor has moved."""
        if pending.own_left_out:  # what it has learned since then is not to be trusted either
            pending.layout.unpack(state.anchors)
        pending.layout.settle()
        pending.origins = self._replica.spare.copy(state.anchors, pending.layout)
        now = state.progress(pending.layout) if state.plan.outer.needs_own else ()
        either = self._participants.levels[pending.level].island.loop.any if self._participants.atomic else None
        take_outer_step(pending, state, result, now, guarded=either)
        pending.write(state.anchors)
        return state.anchors

    def bring_up_to_date(
        self,
        pending: PendingRound,
        landed: Layout | Sequence[torch.Tensor],
        result: RoundResult,
        group: LevelGroup,
    ) -> None:
        """Bring what depends on the parameters up to date: inner anchors, buffers, optimizer state, counts."""
        number, fragment, state = pending.level, pending.fragment, self._state
        level_state = self._replica.level_state(number, fragment)
        level_state.note_round(result.headers)
        level_state.learn_times(result.headers)
        pending.decision = level_state.decision
        level_state.weighting_state = dict(result.weighed.state)
        if group.plan.regroups:
            level_state.fold_shares()
        self._move_inner_anchors(pending, landed)
        self._average_more(pending, group, result)
        if pending.own_left_out:
            self._replica.view.reset_optimizer_state(pending.layout.names)
            level_state.forget_own_losses()
        state.counts.note_round(number, fragment, samples=pending.samples, step=pending.step)
        state.balance.learn(result.headers, result.position)
        if number == len(self._strategy.levels) - 1:
            state.counts.all_exhausted = all(header.exhausted for header in result.headers)
            if not pending.alpha and not pending.late and group.agrees:
                state.counts.met_at[fragment] = state.clock

    def _move_inner_anchors(self, pending: PendingRound, landed: Layout | Sequence[torch.Tensor]) -> None:
        for inner in range(pending.level):
            state = self._replica.level_state(inner, pending.fragment)
            if state.plan.anchored:
                state.fit(pending.layout, self._participants.levels[inner])
                pending.layout.settle()
                state.set_anchor(landed)

    def _average_more(self, pending: PendingRound, group: LevelGroup, result: RoundResult) -> None:
        """Average, with the weights of the parameters, or reset what the strategy says beside them."""
        view, strategy, names = self._replica.view, self._strategy, pending.layout.names
        if pending.side is not None:
            pending.side.write()
        elif not self._participants.atomic:
            result.exchanged.bytes_sent += self._average_now(pending, group, result)
        if strategy.optimizer_state == "reset":
            view.reset_optimizer_state(names)
        elif strategy.optimizer_state != "average" and group.plan.outer.needs_inner_lr:
            view.reset_momentum(names)

    def _average_now(self, pending: PendingRound, group: LevelGroup, result: RoundResult) -> int:
        """Average buffers and optimizer state in place; return how many bytes were sent."""
        transport, step, weight, sent = group.transport, self._state.moment, result.own_share, 0
        if pending.fragment == 0:
            sent += average_buffers(self._replica, transport, weight=weight)
        if self._strategy.optimizer_state == "average":
            tensors = self._replica.view.optimizer_tensors(pending.layout.names)
            # Who has taken no step yet has no state.
            sent += average_tensors(
                transport, tensors, step=step, what="optimizer state", weight=weight, may_be_none=True
            )
        return sent

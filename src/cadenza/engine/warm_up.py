"""Averaging gradients: during the warm-up, or in every step where all workers stay one replica.

DDP does it by itself, over all ranks or, with a hook, over more than its own; others call `average_gradients`.
"""

from __future__ import annotations

import logging
from collections.abc import Collection

import torch
from torch.nn.parallel import DistributedDataParallel

from cadenza.engine.buffers import average_buffers
from cadenza.engine.collectives import average_tensors, differing
from cadenza.engine.ddp import covers, fall_silent, speak, widen
from cadenza.engine.gradient_rounds import GradientRounds
from cadenza.engine.header import Header
from cadenza.engine.opening import open_round
from cadenza.engine.replica import Replica
from cadenza.errors import CadenzaError
from cadenza.participants.round_id import RoundId
from cadenza.transports import process_group_of

__all__ = ["WarmUp", "resume_gradient_averaging"]

_logger = logging.getLogger("cadenza")


class WarmUp:
    """The steps in which gradients are averaged, and the step into local training."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._steps = replica.strategy.warmup_steps
        self._always = replica.strategy.average_gradients
        self._rounds = None if replica.participants.always_together else GradientRounds(replica)

    @property
    def over(self) -> bool:
        """Whether the next step is a local one."""
        return self._replica.state.clock >= self._steps

    @property
    def by_ddp(self) -> bool:
        """Whether DDP averages the gradients, so that nobody has to ask for it."""
        return self._rounds is None and self._replica.view.by_ddp

    def begin(self) -> None:
        """Make gradients be averaged over all, or go over to local steps at once."""
        outermost = self._replica.participants.levels[-1]
        if not self._steps:
            self.end()
            return
        for ddp in _ddps_of_all(self._replica):
            speak(ddp)
            if not covers(ddp, outermost.transport.members):
                widen(ddp, process_group_of(outermost.transport), while_true=lambda: not self.over)

    def average_gradients(self, of: Collection[torch.Tensor] | None = None) -> None:
        """Average the gradients over all workers, unless DDP has done it or this is a local step.

        `of` are the parameters whose gradients are averaged; all of them by default.
        """
        if (self.over and not self._always) or self.by_ddp:
            return
        replica = self._replica
        if self._rounds is not None:
            self._rounds.average(of)
            replica.state.gradients_averaged = True
            return
        chosen = None if of is None else {id(parameter) for parameter in of}
        gradients = {
            name: p.grad
            for name, p in replica.view.parameters().items()
            if p.grad is not None and (chosen is None or id(p) in chosen)
        }
        everybody = replica.participants.levels[-1].transport
        average_tensors(everybody, gradients, step=replica.state.moment, what="gradient of")
        replica.state.gradients_averaged = True

    def come_to(self, round: RoundId) -> bool:
        """Come to a round that the others hold, if it is one of the warm-up's; return whether it is."""
        if self._rounds is None or round.step > self._steps:
            return False
        self._rounds.come_to(round)
        return True

    def finish(self) -> bool:
        """End training within the warm-up; return whether all hold equal values now."""
        if self._rounds is not None:
            return self._rounds.make_alike()
        # Gradients were averaged, but each has seen batches of its own.
        average_buffers(self._replica, self._replica.participants.levels[-1].transport, weight=1.0)
        return True

    def count_step(self) -> bool:
        """Count a step; return whether rounds may run after it."""
        state = self._replica.state
        inside = state.clock <= self._steps
        if not inside and not self._always:
            return True
        if not self.by_ddp and not state.gradients_averaged:
            raise CadenzaError(
                f"Step {state.clock} belongs to {self._period()}, in which gradients are averaged: call "
                "sync.average_gradients() after backward() and before optimizer.step()."
            )
        self.end_step()
        if state.clock == self._steps:
            self.end()
        return not inside

    def end_step(self) -> None:
        """Note that a step was taken, if it belongs to the warm-up."""
        state = self._replica.state
        state.gradients_averaged = False
        if self._rounds is not None and state.clock <= self._steps:
            self._rounds.end_step()

    def end(self) -> None:
        """Go over to local steps: DDP over all ranks falls silent, anchors are taken."""
        members = self._replica.participants.levels[-1].members
        for ddp in _ddps_of_all(self._replica):
            if not self._always and covers(ddp, members):
                fall_silent(ddp)
        if self._steps and self._rounds is not None:
            self._rounds.make_alike()
        elif self._steps:
            self._start_alike()
        self._replica.know_all()
        self._replica.fit_levels()

    def _start_alike(self) -> None:
        """Let all ranks begin local training from the same values, also if something was left out of the averaging."""
        replica = self._replica
        outermost = replica.participants.levels[-1]
        parameters = replica.view.parameters()
        different = differing(outermost.transport, parameters)
        if different is None:
            return
        _logger.warning(
            "At the end of the warm-up (step %d) the ranks hold different values, of %s for example: some gradients "
            "were not averaged. All go on from the mean. Pass all optimizers to attach(), or call "
            "sync.average_gradients() before each optimizer's step.",
            replica.state.clock,
            different,
        )
        average_tensors(outermost.transport, parameters, step=replica.state.moment, what="parameter")

    def refuse_to_drain(self) -> None:
        """Let all ranks raise, also those that wait for this worker's gradients, unless it is DDP that waits."""
        state = self._replica.state
        problem = (
            f"this worker ran out of data at step {state.clock} of {self._period()}, in which every worker has "
            "gradients to average. Give it more data, or the strategy a shorter warm-up."
        )
        outermost = self._replica.participants.levels[-1]
        if not self.by_ddp and self._rounds is None and not outermost.alone:
            outermost.transport.next_round()
            header = Header(state.moment, bytes(16), able=False)
            open_round(outermost.transport, header, problem=problem, describe=list)
        raise CadenzaError(problem[0].upper() + problem[1:])

    def _period(self) -> str:
        return "a run of averaged gradients" if self._always else f"the warm-up ({self._steps} steps)"


def _ddps_of_all(replica: Replica) -> list[DistributedDataParallel]:
    """Return each DistributedDataParallel that may average over all workers; one inside a replica is left alone."""
    return replica.view.ddps if replica.participants.levels[-1].island.size == 1 else []


def resume_gradient_averaging(replica: Replica) -> None:
    """Let DDP be as it has to be at the clock's step, after a state was restored."""
    members = replica.participants.levels[-1].transport.members
    for ddp in _ddps_of_all(replica):
        if replica.strategy.average_gradients or not covers(ddp, members):
            continue
        if replica.state.clock < replica.strategy.warmup_steps:
            speak(ddp)
        else:
            fall_silent(ddp)

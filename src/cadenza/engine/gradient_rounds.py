"""Averaging gradients among workers that come and go: every step of the warm-up holds an atomic round of its own.

Its name is the step that the gradients are for; attempts, and a step's further optimizers, count its phase. Gradients
change once all have agreed. If somebody dies on the way, those who are left try again at once. Who comes, or comes
back, takes the parameters at which the others took these gradients, and the mean: its next step is theirs. After the
last step of the warm-up one more round gives all of them the same values.
"""

from __future__ import annotations

import logging
import math
import struct
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from cadenza.common.checksums import checksum
from cadenza.common.norms import norm_squared
from cadenza.engine.gradients import Gradients
from cadenza.engine.inside import values_of_replica
from cadenza.engine.opening import Scales
from cadenza.engine.replica import Replica
from cadenza.engine.side_values import SideValues
from cadenza.errors import TransportError
from cadenza.participants.base import Admission, FailedRound
from cadenza.participants.level_group import LevelGroup
from cadenza.participants.round_id import RoundId
from cadenza.transports import Transport
from cadenza.weighting import outliers

__all__ = ["GradientRounds"]

_logger = logging.getLogger("cadenza")
_ATTEMPTS = 4  # at one round, each with those who are left
_ALIKE = 1 << 16  # phases from here on make all alike, after the gradients of their step
_SUM = struct.Struct("<QQ??")

Result = TypeVar("Result")


@dataclass
class _Mean:
    """The gradients on which a round has agreed, for a step and one of its calls; None where nobody had finite ones."""

    step: int
    call: int
    gradients: dict[str, torch.Tensor] | None


class GradientRounds:
    """Holds the rounds of a warm-up under `skip_round` and `shrink`."""

    def __init__(self, replica: Replica) -> None:
        self._replica, self._state, self._participants = replica, replica.state, replica.participants
        self._steps = replica.strategy.warmup_steps
        poison = replica.strategy.faults.poison
        self._scales = Scales(outliers(explosion=poison.explosion if poison is not None else None))
        self._mean: _Mean | None = None
        self._apart = False  # whether this worker has taken steps with gradients of its own
        self._calls = 0  # in this step: each optimizer may have one
        self._alike = RoundId(0)  # the last round that was to make all alike
        self._met_at = 0  # the last step after which one did

    def average(self, of: Collection[torch.Tensor] | None) -> None:
        """Average the gradients over those who are there; they stay as they are if no round can be held."""
        call, self._calls = self._calls, self._calls + 1
        tried = self._name(self._state.clock + 1, call * _ATTEMPTS)
        round: RoundId | None = tried
        idle, failed = False, None
        while not self._take_mean(call, of):
            if self._participants.behind:
                idle = True  # its gradients are those of other parameters
                round = self._called(after=tried) or round
            if round is None or round.step > self._steps:
                break
            tried, failed = round, self.come_to(round, of, idle=idle)
            if failed is None and tried.phase >= _ALIKE:  # the others end here, and so does this step: it is theirs
                self._state.clock = tried.step - 1
                self._mean = _Mean(tried.step, tried.phase // _ATTEMPTS, None)
                continue
            if self._state.clock >= self._steps:
                return
            round = self._name(self._state.clock + 1, call * _ATTEMPTS) if failed is None else self._again(tried)
        else:
            return
        if failed is not None and not self._apart:  # it is told once, until a round is held
            text = "Step %d of the warm-up: the gradients stay this worker's own until a round is held: %s."
            _logger.warning(text, tried.step, failed.reason)
        self._apart = True

    def come_to(
        self, round: RoundId, of: Collection[torch.Tensor] | None = (), *, idle: bool = True
    ) -> FailedRound | None:
        """Hold a round of the warm-up, and have its mean; return why it failed, if it did.

        Args:
            round: Which one.
            of: The parameters whose gradients are averaged; None means all.
            idle: Whether this worker has no gradients that count.
        """
        if round.phase >= _ALIKE:
            return self._make_alike(round)
        own = {} if idle else {name: p.grad for name, p in self._chosen(of).items() if p.grad is not None}
        gradients = Gradients(self._replica, own, idle=idle)
        parameters, apart = self._replica.layout_of(self._replica.view.parameters()), idle or self._apart

        def exchange() -> Sequence[torch.Tensor] | None:
            group = self._everybody()
            result = gradients.exchange(group, self._scales, step=round.step, apart=apart)
            if not any(header.steps for header in result.headers):
                return None
            return self._one_of(parameters.pack(), group.transport, apart=apart)

        values = self._hold(round, gradients.digest.hex(), exchange)
        if isinstance(values, FailedRound):
            return values
        if values is not None:
            parameters.unpack(values)
            self._replica.anchor_here()
        self._mean = _Mean(round.step, round.phase // _ATTEMPTS, gradients.means())
        self._state.clock, self._apart = round.step - 1, False
        return None

    def end_step(self) -> None:
        """Note that a step of the warm-up was taken: whoever comes takes the parameters as they are now."""
        self._calls, self._mean = 0, None
        self._replica.anchor_here()

    def make_alike(self) -> bool:
        """Give all who are there the same values, unless they have them; return whether they have them now."""
        last, clock = self._alike, self._state.clock
        if self._met_at == clock:
            return True
        first = last.phase + 1 if last.step == clock else _ALIKE
        for phase in range(first, first + _ATTEMPTS):
            if self._make_alike(self._name(clock, phase)) is None:
                return True
            if self._participants.over:
                break
        return False

    # ---- one round -------------------------------------------------------------------------------------------------

    def _hold(
        self, round: RoundId, digest: str, exchange: Callable[[], Result], *, last: bool = False
    ) -> Result | FailedRound:
        """Come together, let those who are behind catch up, exchange, and agree; to the last one all are awaited."""
        found = self._participants.admit(round, digest, last=last)
        if isinstance(found, Admission):
            found = self._participants.catch_up(self._replica) or found
        if isinstance(found, FailedRound):
            return found
        started = time.perf_counter()
        result = self._participants.agree(round, exchange)
        if not isinstance(result, FailedRound):
            self._participants.commit(round, time.perf_counter() - started)
        return result

    def _make_alike(self, round: RoundId) -> FailedRound | None:
        self._alike = round
        layout = self._replica.layout_of(self._replica.view.parameters())

        def exchange() -> tuple[Sequence[torch.Tensor], SideValues]:
            transport, side = self._everybody().transport, self._replica.side_values((), buffers=True)
            transport.next_round()
            values = self._one_of(layout.pack(), transport, apart=self._apart)
            side.exchange(transport, [1.0] * len(transport.members))
            return values, side

        found = self._hold(round, layout.fragment.digest.hex(), exchange, last=True)
        if isinstance(found, FailedRound):
            return found
        values, side = found
        layout.unpack(values)
        side.write()
        self._state.clock = self._met_at = round.step
        self._apart = False
        self._replica.anchor_here()
        return None

    def _one_of(self, flats: Sequence[torch.Tensor], transport: Transport, *, apart: bool) -> Sequence[torch.Tensor]:
        """Return the values that most members have: finite ones, and of members that are not apart, if there are such.

        They are the first such member's, in the memory that is given.
        """
        if len(transport.members) == 1:
            return flats
        part, finite = checksum(*flats), math.isfinite(norm_squared(*flats))
        mark, finite = values_of_replica(part, finite, self._participants.levels[-1].island)
        replies = transport.exchange(_SUM.pack(part, mark, finite, not apart))()
        told = [_SUM.unpack(reply) for reply in replies]
        counts = Counter(mark for _, mark, *_ in told)
        if len(counts) == 1:
            return flats
        source = max(range(len(told)), key=lambda i: (*told[i][2:], counts[told[i][1]], -i))
        text = (
            "Step %d: the workers hold different values in the warm-up, and go on from those of worker %d. It is so "
            "after one has come, or a round was not held; otherwise some gradients were not averaged: pass all "
            "optimizers to attach(), or call sync.average_gradients() before each one's step."
        )
        _logger.warning(text, self._state.clock, transport.members[source])
        for flat in flats:
            transport.broadcast(flat, source=source)
        if checksum(*flats) != told[source][0]:
            raise TransportError("The values of another worker arrived damaged.")
        return flats

    def _everybody(self) -> LevelGroup:
        outermost = self._participants.levels[-1]
        return LevelGroup(outermost.plan, outermost.name, outermost.transport, island=outermost.island)

    def _name(self, step: int, phase: int) -> RoundId:
        return RoundId(step, phase, level=len(self._participants.levels) - 1)

    # ---- which round, and whose gradients --------------------------------------------------------------------------

    def _called(self, *, after: RoundId) -> RoundId | None:
        """Return the later round at which the others are."""
        called = self._participants.summons(self._state.clock)
        return called if called is not None and called > after else None

    def _again(self, failed: RoundId) -> RoundId | None:
        """Return the next attempt at a round, unless there were enough, or the others are beyond it."""
        again = self._name(failed.step, failed.phase + 1)
        ours = failed.step == self._state.clock + 1 and not self._participants.behind
        return again if ours and again.phase % _ATTEMPTS else None

    def _chosen(self, of: Collection[torch.Tensor] | None) -> dict[str, torch.nn.Parameter]:
        ids = None if of is None else {id(parameter) for parameter in of}
        return {name: p for name, p in self._replica.view.parameters().items() if ids is None or id(p) in ids}

    def _take_mean(self, call: int, of: Collection[torch.Tensor] | None) -> bool:
        """Give the gradients the mean, if there is one for this call."""
        mean = self._mean
        if mean is None or mean.step != self._state.clock + 1 or call > mean.call:
            return False
        if call < mean.call:  # what this call is for has come with the others' parameters
            for parameter in self._chosen(of).values():
                parameter.grad = None
            return True
        self._mean = None
        for name, parameter in self._chosen(of).items() if mean.gradients is not None else ():
            value = mean.gradients.get(name)  # type: ignore[union-attr]
            if value is None or parameter.grad is None:
                parameter.grad = value
            elif parameter.grad is not value:
                parameter.grad.copy_(value)
        return True

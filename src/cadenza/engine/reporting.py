"""What observers are told of a round."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

from cadenza.common.wording import name_workers
from cadenza.engine.exchange import Exchanged
from cadenza.engine.pending import PendingRound
from cadenza.engine.round_result import RoundResult
from cadenza.observers import Observer, notify
from cadenza.participants.base import FailedRound
from cadenza.participants.level_group import LevelGroup
from cadenza.reports import RoundReport

__all__ = ["Reporter"]

_logger = logging.getLogger("cadenza")


class Reporter:
    """Tells observers of rounds, landed or failed.

    Attributes:
        bytes_beside: What was sent beside rounds; the next one that lands counts it.
    """

    def __init__(self, observers: Sequence[Observer]) -> None:
        self.observers = list(observers)
        self.bytes_beside = 0
        self._looks_at_drift = True
        self._last: dict[int, int] = {}  # at which step each fragment's last round has landed

    def landed(self, pending: PendingRound, result: RoundResult, group: LevelGroup, clock: int) -> None:
        """Tell of a round that has landed."""
        reason = ""
        if result.left_out:
            workers = name_workers(result.left_out)
            reason = f"the contribution of {workers} was left out: not finite, or far larger than the others'"
            _logger.warning("Worker %d: %s", result.members[result.position], reason)
        self._look_at_drift(pending, result, clock)
        result.exchanged.bytes_sent += self.bytes_beside
        self.bytes_beside = 0
        self._tell(
            pending,
            group,
            clock,
            result.exchanged,
            wire_s=result.wire_s,
            drift=pending.drift,
            weights=tuple(result.weights),
            participants=result.members,
            reason=reason,
        )

    def _look_at_drift(self, pending: PendingRound, result: RoundResult, clock: int) -> None:
        """Warn, once, of workers that have not moved apart: then there is nothing for rounds to do."""
        last, self._last[pending.fragment] = self._last.get(pending.fragment), clock
        alone = sum(weight > 0 for weight in result.weights) < 2  # others have only caught up
        if not self._looks_at_drift or pending.drift != 0 or alone or result.weightless or pending.step == last:
            return
        self._looks_at_drift = False
        _logger.warning(
            "The workers held exactly the same values at the round of step %d. Does something else average them in "
            "every step, such as a DistributedDataParallel made by a framework after attach(), do all train on the "
            "same data, or is the learning rate 0? Then rounds cost time and change nothing.",
            pending.step,
        )

    def failed(self, pending: PendingRound, failed: FailedRound, group: LevelGroup, clock: int) -> None:
        """Tell of a round that has failed, and changed nothing."""
        self._tell(
            pending,
            group,
            clock,
            Exchanged(),
            weights=(),
            participants=(),
            reason=failed.reason,
            absent=failed.absent,
            kind="failed",
        )

    def _tell(self, pending: PendingRound, group: LevelGroup, clock: int, done: Exchanged, **figures: Any) -> None:
        report = RoundReport(
            step=pending.step,
            level=pending.level,
            level_name=group.name,
            fragment=pending.fragment,
            fragment_name=f"fragment {pending.fragment}",
            bytes_sent=done.bytes_sent,
            encoded_bytes=done.encoded_bytes,
            raw_bytes=done.raw_bytes,
            stall_s=pending.stall_s,
            delay=clock - pending.step,
            codec=pending.codec or group.plan.codec.name,
            decision=pending.decision,
            codec_error=math.sqrt(done.error2 / done.norm2) if done.norm2 else None,
            **{"wire_s": 0.0, "drift": None, **figures},
        )
        notify(self.observers, report)

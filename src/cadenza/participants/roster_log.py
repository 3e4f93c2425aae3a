"""What is written into the log of a round's roster, by its leader."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from cadenza.common.wording import name_workers
from cadenza.participants.roster import Roster
from cadenza.participants.round_id import RoundId

__all__ = ["RosterLog"]

_logger = logging.getLogger("cadenza")


class RosterLog:
    """Logs what others than the members should know of a round.

    Args:
        worker: This worker, which logs the rosters that it leads.
        leaves_out: Whether rounds go on without who is late; then that is worth a warning once for each worker.

    >>> RosterLog(worker=0).write(Roster((0, 1), leader=0), RoundId(20), last=(0, 1))  # nothing that is worth a word
    """

    def __init__(self, worker: int, *, leaves_out: bool = False) -> None:
        self._worker, self._leaves_out = worker, leaves_out
        self._told: set[int] = set()
        self._unreached: set[int] = set()

    def write(self, roster: Roster, round: RoundId, *, last: Sequence[int]) -> None:
        """Log a roster, if this worker leads; `last` are the members of the round before."""
        if self._worker != roster.leader:
            return
        if roster.absent and set(roster.absent) & set(last):
            text = "Step %d: the round is held without %s."
            _logger.log(self._level(roster.absent), text, round.step, name_workers(roster.absent))
        for worker, seconds in (roster.late or {}).items():
            text = "Step %d: worker %d is back; it was %.2f s late for a round."
            _logger.log(self._level([worker]), text, round.step, worker, seconds)
        for worker, reason in (roster.turned_away or {}).items():
            _logger.warning("Step %d: worker %d was turned away: %s.", round.step, worker, reason)
        for worker, others in (roster.unreached or {}).items():
            if worker not in self._unreached:
                text = "Step %d: worker %d is left out: no connection can be made between it and %s."
                _logger.warning(text, round.step, worker, name_workers(others))
        if roster.given_up:
            text = "Step %d: rounds up to number %d, which nobody who is here has seen, are given up."
            _logger.warning(text, round.step, roster.given_up)
        self._unreached = set(roster.unreached or ())
        if roster.behind and round.step:
            text = "Step %d: %s caught up with the others."
            _logger.log(self._level(roster.behind), text, round.step, name_workers(roster.behind))

    def _level(self, late: Sequence[int]) -> int:
        """Return how loud to be about workers that are late."""
        usual = self._leaves_out and self._told.issuperset(late)
        self._told.update(late)
        return logging.INFO if usual else logging.WARNING

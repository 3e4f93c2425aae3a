"""How a worker that comes when the others have begun waits for a round of theirs."""

from __future__ import annotations

import time
from collections.abc import Callable

from cadenza.common.wording import name_workers
from cadenza.errors import NobodyLeftError, StoreLostError, TransportError
from cadenza.faults import Patience
from cadenza.participants.ending import FINISHED
from cadenza.participants.membership import Membership
from cadenza.participants.round_id import RoundId
from cadenza.participants.store import StoreConnection

__all__ = ["Latecomer"]

_LOOK_S = 0.02  # between two looks for a round


class Latecomer:
    """Waits for a round of the others, as long as anybody may hold one."""

    def __init__(self, membership: Membership, patience: Patience, connection: StoreConnection) -> None:
        self._membership, self._patience, self._connection = membership, patience, connection

    def await_round(self, summons: Callable[[], RoundId | None]) -> RoundId:
        """Wait until the others hold a round, and return it."""
        heartbeat, worker, patience_s = self._membership.heartbeat, self._membership.worker, self._patience.first_s
        alone_since = known_since = look_at = time.monotonic()
        while True:
            call = summons()
            if call is not None:
                heartbeat.waiting = False
                return call
            time.sleep(_LOOK_S)
            if time.monotonic() < look_at:
                continue
            look_at = time.monotonic() + heartbeat.tick_s  # what follows asks the store
            if self._is_known_to_someone():
                known_since = time.monotonic()
            elif time.monotonic() - known_since > self._patience.grace_s:
                here = name_workers({worker, *heartbeat.alive()})
                raise NobodyLeftError(
                    f"Of {here}, who are there, none has trained yet, and those who have are gone. Start all of them "
                    "anew, from a checkpoint and under another name (CADENZA_JOB, or join(job=…)): under this one the "
                    "store still knows the rounds that are lost."
                )
            if self._is_over():
                raise TransportError(f"Worker {worker} came too late: the others have finished.")
            if heartbeat.known() - heartbeat.silent() != {worker}:
                alone_since = time.monotonic()
            elif time.monotonic() - alone_since > patience_s:
                raise TransportError(f"Worker {worker} found nobody to train with within {patience_s:g} s.")

    def _is_known_to_someone(self) -> bool:
        """Say whether anyone who is there may have the state; this worker makes known that it has not."""
        heartbeat = self._membership.heartbeat
        heartbeat.waiting = True
        return not heartbeat.connected or any(not beat.waiting for beat in heartbeat.alive().values())

    def _is_over(self) -> bool:
        try:
            return self._connection.call(lambda store: store.check([FINISHED]))
        except StoreLostError:
            return False

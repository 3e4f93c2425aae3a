"""Who is there: a thread beats for this worker, and listens to the others' beats.

A beat is a number in the store that changes. A worker whose number has not changed for a lease, by this worker's own
clock, counts as gone; whoever is stopped, cut off or dead looks the same. Time in which this process itself stood still
does not count against the others. A process that has died is known at once, by its liveness connection.
"""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
import threading
import time
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from cadenza.errors import StoreLostError
from cadenza.participants.liveness import LivenessSockets
from cadenza.participants.round_id import RoundId
from cadenza.participants.signing import Signer
from cadenza.participants.store import StoreConnection, append

__all__ = ["Heartbeat"]

_logger = logging.getLogger("cadenza")

_BEATS = 5  # in a lease
_GONE = "gone"
_PROOF = 3  # changes of a beat that show that a worker is alive whose line has ended; two may have been under way
_GLANCE_S = 0.02  # between two looks for the next round


@dataclass
class _Beat:
    value: str = ""
    silent_s: float = 0.0
    doubt: int = 0  # changes that are still wanted since its liveness connection has ended

    @property
    def left(self) -> bool:
        return self.value.endswith(_GONE)

    def hear(self, value: str, elapsed: float) -> None:
        if value == self.value:
            self.silent_s += elapsed
            return
        if value.split(" ")[0] != self.value.split(" ")[0]:
            self.doubt = 0  # another process
        self.value, self.silent_s, self.doubt = value, 0.0, max(0, self.doubt - 1)


class Heartbeat:
    """The workers that have signed on, and which of them are alive.

    Attributes:
        incarnation: What tells this process from an earlier or later one in the same place.
        connected: Whether the store answers.
        latest: The latest round that anyone has come to, as of the last beat.
        replaced: Whether another process has taken this worker's place.
        losses: How often the store was lost: connections made before are of no use.
        eager: Whether the next round is to be known at once, not only at the next beat.
    """

    def __init__(self, connection: StoreConnection, worker: int, signer: Signer, *, lease_s: float) -> None:
        self.worker = worker
        self._signer = signer
        self.incarnation = secrets.token_hex(4)
        self.connected = False
        self.latest: RoundId | None = None
        self.replaced = False
        self.losses = 0
        self.eager = False
        self._lease_s = lease_s
        self._connection = connection
        self._beats: dict[int, _Beat] = {}
        self._incarnations: dict[int, str] = {}
        self._signed_on = False
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._number = 0
        self._seen_at = time.monotonic()
        self._life: LivenessSockets | None = None
        with contextlib.suppress(OSError):  # without them there is the lease
            self._life = LivenessSockets(connection.own_host(), self._line_ended)
        self._thread = threading.Thread(target=self._beat_on, name="cadenza heartbeat", daemon=True)

    @property
    def tick_s(self) -> float:
        """The time between two beats."""
        return self._lease_s / _BEATS

    def start(self) -> None:
        """Sign on, and begin to beat; raise StoreLostError if there is no store."""
        self._tick()
        self._thread.start()

    def known(self) -> set[int]:
        """Return the workers that have ever signed on, as of the last beat."""
        with self._lock:
            return set(self._beats) | {self.worker}

    def silent(self) -> set[int]:
        """Return those of which it is known that they do not beat any more."""
        with self._lock:
            return {w for w, beat in self._beats.items() if self._is_silent(beat)} - {self.worker}

    def gone(self) -> set[int]:
        """Return those that have signed off, or that their supervisor saw die."""
        with self._lock:
            return {worker for worker, beat in self._beats.items() if beat.left} - {self.worker}

    def doubted(self) -> set[int]:
        """Return those whose liveness connection has ended, while neither lease nor supervisor has said more yet.

        A round can go on without them; to give it up because of them would be too early.
        """
        with self._lock:
            return {w for w, b in self._beats.items() if b.doubt and b.silent_s <= self._lease_s and not b.left}

    def alive(self) -> dict[int, str]:
        """Return those that beat, this worker among them, each with what tells its process from others."""
        silent = self.silent()
        with self._lock:
            known = {worker: self._incarnations.get(worker, "") for worker in self._beats.keys() - silent}
        return known | {self.worker: self.incarnation}

    def is_current(self, worker: int, incarnation: str) -> bool:
        """Tell whether a process still is the one in its worker's place, as far as is known."""
        with self._lock:
            return self._incarnations.get(worker, incarnation) == incarnation

    def close(self) -> None:
        """Sign off."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(timeout=self.tick_s)
        if self.connected and not self.replaced:
            with contextlib.suppress(StoreLostError):
                self._connection.call(
                    lambda store: store.set(_key(self.worker), f"{self.incarnation} {_GONE}"), timeout_s=1
                )
        self._connection.close()
        if self._life is not None:
            self._life.close()

    def _is_silent(self, beat: _Beat) -> bool:
        return beat.silent_s > self._lease_s or beat.doubt > 0 or beat.left

    def _line_ended(self, worker: int, incarnation: str) -> None:
        with self._lock:
            if self._incarnations.get(worker) == incarnation:
                self._beats[worker].doubt = _PROOF

    def _beat_on(self) -> None:
        while not self._ended.wait(min(_GLANCE_S, self.tick_s) if self.eager else self.tick_s):
            try:
                if self.eager and self.connected and time.monotonic() - self._seen_at < self.tick_s:
                    self.glance()
                else:
                    self._tick()
            except (StoreLostError, ValueError) as error:  # or somebody has written nonsense into it
                if self.connected:
                    self.losses += 1
                    _logger.warning("%s Training goes on, rounds are skipped until it is back.", error)
                self.connected = self._signed_on = False

    def _tick(self) -> None:
        registry, latest, beats = self._connection.call(self._exchange)
        now = time.monotonic()
        elapsed, self._seen_at = min(now - self._seen_at, 2 * self.tick_s), now
        with self._lock:
            self._incarnations = {entry[0]: entry[1] for entry in registry}
            for worker, value in beats.items():
                self._beats.setdefault(worker, _Beat()).hear(value, elapsed)
            alive = {worker for worker, beat in self._beats.items() if not self._is_silent(beat)} - {self.worker}
        self._note(latest)
        if self._life is not None:
            told = {entry[0]: (entry[1], entry[2]) for entry in registry}
            self._life.watch({worker: told[worker] for worker in alive & told.keys() if told[worker][1]})
        self.replaced = self._incarnations.get(self.worker, self.incarnation) != self.incarnation
        if not self.connected and self._thread.is_alive():
            _logger.warning("Worker %d has reached the store again.", self.worker)
        self.connected = True

    def glance(self) -> None:
        """See which round is the latest."""
        self._note(bytes(self._connection.call(lambda store: store.get("latest"))).decode())

    def _note(self, latest: str) -> None:
        self.latest = RoundId.parse(latest) if latest else None

    def _exchange(self, store: dist.Store) -> tuple[list[list[Any]], str, dict[int, str]]:
        """Beat, and return who has signed on, the latest round and all beats."""
        self._number += 1
        store.set(_key(self.worker), f"{self.incarnation} {self._number}")
        if not self._signed_on:
            append(store, "latest", "")
            me = [self.worker, self.incarnation, self._life.address if self._life is not None else ""]
            if me not in self._registry(store):
                entry = self._signer.sign_text(json.dumps(me), "registry")
                append(store, "registry", entry + "\n")
            self._signed_on = True
        registry = self._registry(store)
        others = sorted({entry[0] for entry in registry})
        latest, *beats = (bytes(text).decode() for text in store.multi_get(["latest", *map(_key, others)]))
        return registry, latest, dict(zip(others, beats, strict=True))

    def _registry(self, store: dist.Store) -> list[list[Any]]:
        """Return who has signed on with this job's signature: number, incarnation, address of its liveness socket."""
        if not store.check(["registry"]):
            return []
        lines = bytes(store.get("registry")).decode().splitlines()
        entries = (self._signer.verified_text(line, "registry") for line in lines)
        return [json.loads(entry) for entry in entries if entry is not None]


def _key(worker: int) -> str:
    return f"beat/{worker}"

"""Who is there: a thread beats for this worker, and listens to the others' beats.

A beat is an entry in the store that changes, one for each worker (`cadenza.participants.beat`). A worker whose entry
has not changed for a lease, by this worker's own clock, counts as gone; whoever is stopped, cut off or dead looks the
same. Time in which this process itself stood still does not count against the others. A process that has died is known
at once, by its liveness connection.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Set

from cadenza.errors import StoreLostError
from cadenza.participants.beat import CLOCKS_S, Beat, Heard, beat_key
from cadenza.participants.liveness import LivenessSockets
from cadenza.participants.progress import Progress
from cadenza.participants.signed_store import SignedStore
from cadenza.participants.signing import Signer
from cadenza.participants.store import StoreConnection
from cadenza.participants.worker_index import WorkerIndex

__all__ = ["Heartbeat", "announce_death"]

_logger = logging.getLogger("cadenza")

_BEATS = 5  # in a lease
_MANY = 32  # workers; where there are more, the others' beats are read less often: each of them reads all
_MOST_LINES = 128  # liveness connections; where there are more workers, those that come next have one
_GLANCE_S = 0.02  # between two looks for the next round
_TOLD_S = 60.0  # between two warnings about entries that are ignored
_FORGET_S = 3600.0  # after so long in silence a worker's entry is deleted


class Heartbeat:
    """The workers that have signed on, and which of them are alive.

    Attributes:
        incarnation: What tells this process from an earlier or later one in the same place.
        connected: Whether the store answers.
        replaced: Whether another process has taken this worker's place.
        losses: How often the store was lost: connections made before are of no use.
        eager: Whether the next round is to be known at once, not only at the next beat.
        waiting: Whether this worker waits for others from whom it can take a state; they hear of it.
        preparing: Whether this worker cannot come to a round yet; they hear of it, and do not wait.
        exhausted: Whether this worker has run out of data; they hear of it, and do not wait for it to lead.
        site: Where this worker is; they hear of it.
        withheld: Says whether this worker does not beat now, as if it were stopped.

    Args:
        incarnation: That of the rank that beats for this one's replica, where this one only listens.
    """

    def __init__(
        self,
        connection: StoreConnection,
        worker: int,
        signer: Signer,
        *,
        lease_s: float,
        preparing: bool = False,
        incarnation: str | None = None,
    ) -> None:
        self.worker = worker
        self._signer = signer
        self._listens = incarnation is not None
        self.incarnation = incarnation or secrets.token_hex(8)
        self.withheld: Callable[[], bool] = lambda: False
        self.connected = False
        self.site = ""
        self.replaced = False
        self.losses = 0
        self.eager = False
        self._lease_s = lease_s
        self._connection = connection
        self.waiting, self.preparing, self.exhausted = False, preparing, False
        self._heard: dict[int, Heard] = {}
        self._prepared: dict[int, str] = {}  # which processes have been in a round
        self._index = WorkerIndex(signer)
        self._progress = {"": Progress(signer)}
        self._signed_on = False
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._seen_at = self._heard_at = time.monotonic()
        self._told, self._told_at = 0, -_TOLD_S
        self._life: LivenessSockets | None = None
        with contextlib.suppress(OSError):  # without them there is the lease
            self._life = LivenessSockets(connection.own_host(), self._line_ended)
        address = self._life.address if self._life is not None else ""
        self._mine = Beat(worker, self.incarnation, time.time_ns(), address=address)
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
            return set(self._heard) | {self.worker}

    def sites(self) -> dict[int, str]:
        """Return where each worker is that has ever signed on, as of the last beat."""
        with self._lock:
            return {worker: heard.last.site for worker, heard in self._heard.items()} | {self.worker: self.site}

    def progress(self, place: str = "") -> Progress:
        """Return how far the rounds of a circle have come, by its place in the store; it is followed from now on."""
        return self._progress.setdefault(place, Progress(self._signer, place))

    def silent(self) -> set[int]:
        """Return those of which it is known that they do not beat any more."""
        with self._lock:
            return {w for w, heard in self._heard.items() if self._is_silent(heard)}

    def gone(self) -> set[int]:
        """Return those that have signed off, or that their supervisor saw die."""
        with self._lock:
            return {worker for worker, heard in self._heard.items() if heard.left}

    def not_expected(self) -> set[int]:
        """Return those for whom a round does not wait: they do not beat any more, or are still preparing."""
        with self._lock:
            return {w for w, heard in self._heard.items() if self._is_silent(heard) or self._is_preparing(w, heard)}

    def note_met(self, workers: Mapping[int, tuple[str, str]]) -> None:
        """Know that workers have come to a round, each by its process and where it is, whatever their beats said.

        Rounds may be quicker than beats: who stood on a roster is known from then on, heard or not.
        """
        with self._lock:
            for worker, (incarnation, site) in workers.items():
                self._prepared[worker] = incarnation
                if incarnation and worker != self.worker and worker not in self._heard:
                    self._heard[worker] = Heard(Beat(worker, incarnation, started=0, site=site))

    def _is_preparing(self, worker: int, heard: Heard) -> bool:
        return heard.last.preparing and self._prepared.get(worker) != heard.last.incarnation

    def doubted(self) -> set[int]:
        """Return those whose liveness connection has ended, while neither lease nor supervisor has said more yet.

        A round can go on without them; to give it up because of them would be too early.
        """
        with self._lock:
            return {w for w, h in self._heard.items() if h.doubt and h.silent_s <= self._lease_s and not h.left}

    def alive(self) -> dict[int, Beat]:
        """Return the last beat of each other worker that beats."""
        with self._lock:
            return {w: heard.last for w, heard in self._heard.items() if not self._is_silent(heard)}

    def without_data(self) -> set[int]:
        """Return those that have told that they have run out of data, whether they still beat or not."""
        with self._lock:
            return {worker for worker, heard in self._heard.items() if heard.last.exhausted}

    def unreached(self) -> set[int]:
        """Return those that beat, and to which no connection could ever be made."""
        return self._life.unreached() if self._life is not None else set()

    def try_to_reach(self, workers: Set[int], seconds: float) -> set[int]:
        """Connect to workers anew; return those to which that was not possible within the time."""
        return self._life.try_anew(workers, seconds) if self._life is not None else set()

    def is_current(self, worker: int, incarnation: str) -> bool:
        """Tell whether a process still is the one in its worker's place, as far as is known."""
        if worker == self.worker:
            return incarnation == self.incarnation
        with self._lock:
            return worker not in self._heard or self._heard[worker].last.incarnation == incarnation

    def close(self) -> None:
        """Sign off."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(timeout=self.tick_s)
        if self.connected and not self.replaced and not self._listens:
            with contextlib.suppress(StoreLostError):
                self._connection.call(self._sign_off, timeout_s=1)
        self._connection.close()
        if self._life is not None:
            self._life.close()

    def give_up(self) -> None:
        """Sign off because this worker has failed: all others know at once."""
        if self._life is not None:
            self._life.close()
        self.close()

    def _sign_off(self, store: SignedStore) -> None:
        store.set(beat_key(self.worker), self._mine.next(state="gone").pack())
        self._follow(store, Progress.keep)

    def glance(self) -> None:
        """See which round is the latest."""
        self._connection.call(lambda store: self._follow(store, Progress.look))

    def _follow(self, store: SignedStore, how: Callable[[Progress, SignedStore], None]) -> None:
        for progress in list(self._progress.values()):
            how(progress, store)

    def _is_silent(self, heard: Heard) -> bool:
        return heard.silent_s > self._lease_s or heard.doubt > 0 or heard.left

    def _line_ended(self, worker: int, incarnation: str) -> None:
        with self._lock:
            if worker in self._heard and self._heard[worker].last.incarnation == incarnation:
                self._heard[worker].end_line()

    def _beat_on(self) -> None:
        while not self._ended.wait(min(_GLANCE_S, self.tick_s) if self.eager else self.tick_s):
            try:
                if self.eager and self.connected and time.monotonic() - self._seen_at < self.tick_s:
                    self.glance()
                else:
                    self._tick()
            except Exception as error:  # whatever it is: without this thread the worker would be given up
                if self.connected:
                    self.losses += 1
                    _logger.warning("%s Training goes on, rounds are skipped until it is back.", _named(error))
                self.connected = self._signed_on = False

    def _tick(self) -> None:
        pause_s = self.tick_s * max(1.0, len(self._heard) / _MANY)
        few = len(self._heard) <= _MANY
        hears = few or not self._signed_on or time.monotonic() - self._heard_at > pause_s - self.tick_s / 2
        beats = self._connection.call(lambda store: self._exchange(store, hears=hears))
        self._seen_at = now = time.monotonic()
        if hears:
            elapsed, self._heard_at = min(now - self._heard_at, 2 * pause_s), now
            with self._lock:
                for worker in beats.keys() | self._heard.keys():
                    self._hear(worker, beats.get(worker), elapsed)
        if self._life is not None:
            self._life.watch(self._neighbours())
        if not self.connected and self._thread.is_alive():
            _logger.warning("Worker %d has reached the store again.", self.worker)
        self.connected = True
        self._tell_ignored()

    def _hear(self, worker: int, beat: Beat | None, elapsed: float) -> None:
        old = beat is not None and self._signer.secret and not abs(time.time() - beat.at) <= CLOCKS_S
        if worker in self._heard:
            heard = self._heard[worker]
            if beat is not None and old and beat.follows(heard.last):
                self._signer.ignored += 1  # of its clock, or of long ago
                beat = None
            heard.hear(beat, elapsed)
        elif beat is not None:
            self._heard[worker] = Heard(beat, silent_s=2 * self._lease_s if old else 0.0)

    def _neighbours(self) -> dict[int, tuple[str, str]]:
        """Return the workers to which there is a line: all, or as many as come after this one."""
        alive = self.alive()
        others = sorted(alive, key=lambda worker: (worker < self.worker, worker))[:_MOST_LINES]
        return {w: (alive[w].incarnation, alive[w].address) for w in others if alive[w].address}

    def _exchange(self, store: SignedStore, *, hears: bool) -> dict[int, Beat]:
        """Beat, and return the others' beats if they are to be heard now."""
        if not self.withheld():
            self._beat(store)
        if not self._signed_on:
            store.has_strangers()
        with self._lock:
            forgotten = {w for w, heard in self._heard.items() if heard.silent_s > _FORGET_S}
            alive = {w for w, heard in self._heard.items() if not self._is_silent(heard)}
        self._follow(store, Progress.keep)
        if not hears:
            return {}
        others = self._index.update(store, alive | {self.worker}, forgotten) - {self.worker}
        self._signed_on = True
        ordered = sorted(others)
        found = zip(ordered, store.read_all([beat_key(worker) for worker in ordered]), strict=True)
        beats = {worker: self._understood(text) for worker, text in found}
        return {worker: beat for worker, beat in beats.items() if beat is not None and beat.worker == worker}

    def _beat(self, store: SignedStore) -> None:
        """Write this worker's entry, unless a later process has written there."""
        standing = self._understood(store.read(beat_key(self.worker)))
        if self._listens:
            self.replaced = standing is not None and standing.incarnation != self.incarnation
            return
        if standing is not None and standing.incarnation != self.incarnation and standing.started >= self._mine.started:
            if self._mine.number:
                self.replaced = True
                return
            self._mine = Beat(self.worker, self.incarnation, standing.started + 1, address=self._mine.address)
        told = {"waiting": self.waiting, "preparing": self.preparing, "exhausted": self.exhausted, "site": self.site}
        self._mine = self._mine.next(**told)
        store.set(beat_key(self.worker), self._mine.pack())

    def _understood(self, text: str | None) -> Beat | None:
        return self._signer.understood(lambda: Beat.unpack(text)) if text is not None else None

    def _tell_ignored(self) -> None:
        """Warn, once in a while, that entries are ignored."""
        ignored = self._signer.ignored + sum(heard.again for heard in self._heard.values())
        if ignored > self._told and time.monotonic() - self._told_at > _TOLD_S:
            _logger.warning(
                "%d entries of the store were ignored: they cannot be read, do not bear this job's signature, or were "
                "written long ago. Somebody else writes to the store%s.",
                ignored - self._told,
                ", or the clocks of two machines are far apart" if self._signer.secret else "",
            )
            self._told, self._told_at = ignored, time.monotonic()


def announce_death(store: SignedStore, signer: Signer, worker: int) -> None:
    """Write into the store that a worker was seen to die, so that nobody waits for its beat."""
    text = store.read(beat_key(worker))
    beat = signer.understood(lambda: Beat.unpack(text)) if text is not None else None
    if beat is not None:
        store.set(beat_key(worker), beat.next(state="gone").pack())


def _named(error: Exception) -> str:
    return str(error) if isinstance(error, StoreLostError) else f"The heart-beat failed ({error!r})."

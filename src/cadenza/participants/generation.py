"""The process group of one generation: made for one list of members, used while all of them answer, then let go.

A Gloo group is dead after one failure, and closes no socket as long as anybody refers to it. So a generation owns its
group, nobody else keeps a reference, and the next one is made from nothing.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from cadenza.common.process_groups import set_timeout
from cadenza.errors import TransportError
from cadenza.participants.forming import FORMING_S, Forming
from cadenza.participants.signed_store import SignedStore
from cadenza.participants.signed_transport import SignedTransport
from cadenza.participants.signing import Signer
from cadenza.participants.store import StoreConnection
from cadenza.participants.vote import Vote
from cadenza.transports import Transport
from cadenza.transports.c10d import C10dTransport, Seat

__all__ = ["Generation", "assemble"]

_DROP_S = 2.0
_OUR_REFERENCES = 2  # the list's, and that of the call that counts them


class Generation:
    """A process group of its own and the transport over it."""

    def __init__(self, group: dist.ProcessGroup, seat: Seat, *, place: str, signer: Signer) -> None:
        self._group: dist.ProcessGroup | None = group
        self.members = seat.members
        self.position = seat.position
        self._below = C10dTransport(group, seat)
        self.transport: Transport = SignedTransport(self._below, signer, place) if signer.secret else self._below

    @property
    def usable(self) -> bool:
        """Whether no collective has failed."""
        return self._group is not None

    def set_timeout(self, seconds: float) -> None:
        """Let collectives that are started from now on fail after so long."""
        set_timeout(self._open(), seconds)

    def rest(self) -> None:
        """Give back memory, while another generation is used."""
        self._below.free_lanes()

    def broadcast(self, tensor: torch.Tensor, *, source: int) -> None:
        """Give a flat tensor the values that the member `source` has."""
        group = self._open()
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = self.members.index(source), 0
        try:
            group.broadcast([tensor], options).wait()
        except RuntimeError as error:
            raise TransportError(f"A broadcast from worker {source} failed: {error}") from None

    def _open(self) -> dist.ProcessGroup:
        if self._group is None:  # let go by another thread, as where this worker's replica has lost a rank
            raise TransportError("The group was let go.")
        return self._group

    def close(self) -> None:
        """Let the group go: its sockets close, once what is pending has failed."""
        if self._group is None:
            return
        self.transport.abandon()
        held, self._group = [self._group], None
        gc.collect(1)  # what a failure has just left; a full collection takes tenths of a second beside torch
        if sys.getrefcount(held[0]) > _OUR_REFERENCES:
            gc.collect()
        closing = threading.Thread(target=held.clear, name="cadenza closing", daemon=True)
        closing.start()  # it waits for pending collectives, which end at their time-outs
        closing.join(_DROP_S)


def assemble(
    connection: StoreConnection,
    signer: Signer,
    *,
    place: str,
    members: Sequence[int],
    worker: int,
    timeout_s: float,
    missing: Callable[[], set[int]],
    reach: Callable[[set[int]], set[int]] = lambda workers: set(),
    mark: str = "",
) -> Generation:
    """Make the group of a list of members; all of them call this.

    Args:
        connection: A connection to the store.
        signer: The job's signer.
        place: A name that no other generation has.
        members: Who is in it.
        worker: Who we are.
        timeout_s: How long the others are waited for, and collectives take at most.
        missing: Says which members are known to be gone.
        reach: Connects to some members, and says to which of them that was not possible.
        mark: What no other roster has, also where places are called alike.

    Raises:
        UnreachedError: A member could not be reached.
        TransportError: A member did not come, or the store or the network failed.
    """

    def build(store: SignedStore) -> Generation:
        store = store.bound(mark)
        # Whoever makes a group waits for all: nobody begins before all have said that they will.
        counts = worker == members[0]
        vote = Vote(store, f"{place}/assembled", members=len(members), timeout_s=timeout_s, counts=counts)
        if not vote.ready(lambda: bool(missing())):
            raise TransportError(f"Not all of workers {list(members)} came together; gone: {sorted(missing())}.")
        seat = Seat(tuple(members), list(members).index(worker), store.unsigned(f"{place}/group"), timeout_s)
        group = Forming(store, place, seat, missing=missing, reach=reach).form()
        return Generation(group, seat, place=place, signer=signer)

    return connection.call(build, timeout_s=2 * timeout_s + FORMING_S + 5)

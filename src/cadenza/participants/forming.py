"""How members become a process group without ever waiting for one that is gone, or cannot be reached.

Gloo's constructor connects everyone with everyone, waits for five times its time-out and does not say for whom. So it
runs on a thread of its own, which is left there as soon as somebody is known to be gone or out of reach; the last word
has a vote, so that all members use the group, or none does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError

import torch.distributed as dist

from cadenza.common.process_groups import make_gloo_group, set_timeout
from cadenza.common.wording import name_workers
from cadenza.errors import TransportError
from cadenza.participants.group_store import GroupStore
from cadenza.participants.signed_store import SignedStore
from cadenza.participants.vote import Vote
from cadenza.transports.c10d import Seat

__all__ = ["FORMING_S", "Forming", "UnreachedError"]

_LOOK_S = 0.05  # between two looks at who is gone
_DOUBT_S = 1.0  # after so long members are asked whether they can be reached
FORMING_S = 10.0  # after so long a group is not made, even if all could be reached


class UnreachedError(TransportError):
    """Some members could not be reached.

    Attributes:
        workers: Which.
    """

    def __init__(self, workers: set[int]) -> None:
        super().__init__(
            f"{name_workers(workers).capitalize()} could not be reached from here. Every worker connects to every "
            "other: open the ports between their machines, and name the network that leads there (GLOO_SOCKET_IFNAME)."
        )
        self.workers = workers


class Forming:
    """A process group in the making.

    Args:
        store: The store.
        place: A name that no other group has.
        seat: Who is in it, and which of them we are.
        missing: Says which members are known to be gone.
        reach: Connects to some members, and says to which of them that was not possible.
    """

    def __init__(
        self,
        store: SignedStore,
        place: str,
        seat: Seat,
        *,
        missing: Callable[[], set[int]],
        reach: Callable[[set[int]], set[int]],
    ) -> None:
        self._seat = seat
        self._missing, self._reach = missing, reach
        self._addresses = GroupStore(store, f"{place}/group")
        self._renew_at = 0.0
        self._in_vain = False  # whether all addresses were there, and yet not all could be connected to
        members, counts = len(seat.members), seat.position == 0
        self._vote = Vote(store, f"{place}/connected", members=members, timeout_s=seat.timeout_s, counts=counts)

    def form(self) -> dist.ProcessGroup:
        """Return the group, which all members have then."""
        group = self._make()
        if group is not None and self._vote.ready(self._somebody_died):
            set_timeout(group, self._seat.timeout_s)
            return group
        self._vote.abort()
        if gone := self._missing():
            raise TransportError(f"{name_workers(gone).capitalize()} died while the members connected.")
        unready = self._unready()
        unreached = self._reach(unready) or (unready if self._in_vain else set())
        if unreached:
            raise UnreachedError(unreached)
        raise TransportError("Another worker could not connect to all members.")

    def _somebody_died(self) -> bool:
        """Tell whether a member is gone; meanwhile others may still look for this one's address."""
        if time.monotonic() >= self._renew_at:
            self._addresses.renew()
            self._renew_at = time.monotonic() + _LOOK_S
        return bool(self._missing())

    def _make(self) -> dist.ProcessGroup | None:
        """Return the group, or None as soon as there is no use in waiting for it."""
        addresses = self._addresses
        made: Future[dist.ProcessGroup] = Future()
        threading.Thread(target=self._connect, args=(made,), name="cadenza forming", daemon=True).start()
        asked, waited_s, seen_at = False, 0.0, time.monotonic()
        while True:
            try:
                return made.result(_LOOK_S)
            except FutureTimeoutError:
                pass
            except RuntimeError:  # Gloo's; whoever it cannot connect to is found out here
                self._in_vain = not addresses.lacking
                return None
            died = self._somebody_died()
            now = time.monotonic()
            waited_s, seen_at = waited_s + min(now - seen_at, 2 * _LOOK_S), now  # not while this process stood still
            hopeless = died or self._vote.decided or waited_s > FORMING_S
            if not hopeless and not asked and waited_s > _DOUBT_S:
                asked, hopeless = True, bool(self._reach(self._unready()))
            if hopeless:
                self._in_vain = not addresses.lacking
                addresses.leave()
                return None

    def _connect(self, made: Future[dist.ProcessGroup]) -> None:
        members = len(self._seat.members)
        try:
            made.set_result(make_gloo_group(self._addresses, self._seat.position, members, FORMING_S / 5))
        except BaseException as error:
            made.set_exception(error)

    def _unready(self) -> set[int]:
        """Return the other members that have not said that they are connected to all."""
        ready = {int(number) for who in self._vote.ready_members() if (number := who.partition(" ")[0]).isdecimal()}
        return set(self._seat.members) - ready - {self._seat.members[self._seat.position]}

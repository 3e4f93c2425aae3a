"""Workers that are threads of one process: they hand each other tensors instead of sending them.

`LoopbackHub` is what the threads of a job have in common, a `LoopbackGroup` is one thread's place in it, and a
`LoopbackTransport` connects some of them. Whatever a member hands over is never written to again, by anybody, so no
order in which the threads happen to run can change a result. Means have the same bits as over shared memory.

>>> import threading
>>> hub = LoopbackHub(2, timeout_s=10.0)
>>> def greet(rank: int) -> None:
...     transport = hub.group(rank).connect([0, 1])
...     heard[rank] = transport.exchange(f"I am {rank}".encode())()
>>> heard = {}
>>> threads = [threading.Thread(target=greet, args=(rank,)) for rank in range(2)]
>>> for thread in threads: thread.start()
>>> for thread in threads: thread.join()
>>> heard[0] == heard[1] == [b'I am 0', b'I am 1']
True
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from cadenza.common.streams import Moment, devices_of, keep_for_stream
from cadenza.errors import TopologyError, TransportError
from cadenza.transports.base import OUT_OF_STEP, Lane, bytes_of
from cadenza.transports.loopback_store import LoopbackStore
from cadenza.transports.means import mean_into, share
from cadenza.transports.shared_memory import LANES, lane_bytes

__all__ = ["LoopbackGroup", "LoopbackHub", "LoopbackTransport"]


class LoopbackHub:
    """What the workers of one job share, when they are threads of this process.

    Args:
        workers: How many they are; their ranks are 0, 1, …
        timeout_s: How long a worker waits for another.
        hosts: The name of the host on which each rank pretends to be; by default all are on one.

    >>> hub = LoopbackHub(1, timeout_s=10.0)
    >>> hub.group(0).connect([0]).exchange(b"hello")()
    [b'hello']
    """

    def __init__(self, workers: int, *, timeout_s: float, hosts: Sequence[str] | None = None) -> None:
        self.ranks = tuple(range(workers))
        self.timeout_s = timeout_s
        self.hosts = tuple(hosts or ["localhost"] * workers)
        if len(self.hosts) != workers:
            raise ValueError(f"hosts names a host for each of the {workers} workers; got {len(self.hosts)} names.")
        self.store = LoopbackStore(timeout_s=timeout_s)
        self._lock = threading.Lock()
        self._visits: Counter[tuple[tuple[int, ...], int]] = Counter()
        self._encounters: weakref.WeakSet[_Encounter] = weakref.WeakSet()
        self._awaited: dict[str, _Encounter] = {}  # those to which not all members have come yet
        self._gone: set[int] = set()

    def group(self, rank: int) -> LoopbackGroup:
        """Return the place of one of the threads."""
        if rank not in self.ranks:
            raise ValueError(f"This hub has ranks 0 to {len(self.ranks) - 1}; got {rank!r}.")
        return LoopbackGroup(self, rank)

    def leave(self, rank: int, *, failure: str | None = None) -> None:
        """Take a worker out: those who wait for it are let go at once, and if it failed, so are all at the store."""
        with self._lock:
            self._gone.add(rank)
            encounters = list(self._encounters)
        for encounter in encounters:
            encounter.leave(rank)
        if failure is not None:
            self.store.fail(failure)

    def meet(self, rank: int, ranks: tuple[int, ...]) -> tuple[_Encounter, LoopbackStore]:
        """Return what the given ranks share in their next transport, and its part of the store."""
        with self._lock:
            self._visits[ranks, rank] += 1
            place = f"transports/{','.join(map(str, ranks))}/{self._visits[ranks, rank]}"
            encounter = self._awaited.setdefault(place, _Encounter(ranks, self.timeout_s))
            self._encounters.add(encounter)
            for gone in self._gone:
                encounter.leave(gone)
            if encounter.come(rank):
                del self._awaited[place]
        return encounter, self.store.part(place)


class LoopbackGroup:
    """One thread's place among the workers of a `LoopbackHub`: a `cadenza.transports.group.Group`.

    >>> group = LoopbackHub(3, timeout_s=10.0).group(1)
    >>> group.rank, group.ranks, group.connect([1]).members
    (1, (0, 1, 2), (1,))
    """

    def __init__(self, hub: LoopbackHub, rank: int) -> None:
        self._hub = hub
        self._rank = rank

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def ranks(self) -> tuple[int, ...]:
        return self._hub.ranks

    @property
    def store(self) -> LoopbackStore:
        return self._hub.store

    @property
    def timeout_s(self) -> float:
        return self._hub.timeout_s

    def connect(self, ranks: Sequence[int], *, through_host: bool = False) -> LoopbackTransport:
        members = tuple(sorted(set(ranks)))
        if not set(members) <= set(self.ranks) or self._rank not in members:
            raise TopologyError(
                f"Ranks {list(ranks)} cannot be connected from rank {self._rank}: it must be one of them, and all must "
                f"be among the group's ranks {list(self.ranks)}."
            )
        encounter, store = self._hub.meet(self._rank, members)
        return LoopbackTransport(encounter, members.index(self._rank), store)

    def host_names(self) -> dict[int, str]:
        return dict(zip(self.ranks, self._hub.hosts, strict=True))


class LoopbackTransport:
    """Averages between threads of one process; made by `LoopbackGroup.connect`.

    >>> transport = LoopbackHub(1, timeout_s=10.0).group(0).connect([0])
    >>> [lane, *_] = transport.lanes(torch.device("cpu"))
    >>> _ = lane.outgoing(2, torch.float32).copy_(torch.tensor([1.0, 2.0]))
    >>> lane.launch(); lane.combine(); lane.land()
    tensor([1., 2.])
    """

    def __init__(self, encounter: _Encounter, position: int, store: LoopbackStore) -> None:
        self._encounter = encounter
        self._position = position
        self._store = store
        self._handed_over = 0
        self._rounds = 0
        self._lanes: dict[torch.device, list[Lane]] = {}

    @property
    def members(self) -> Sequence[int]:
        return self._encounter.members

    @property
    def position(self) -> int:
        return self._position

    @property
    def timeout_s(self) -> float:
        return self._encounter.timeout_s

    @property
    def store(self) -> LoopbackStore:
        return self._store

    def exchange(self, payload: bytes) -> Callable[[], list[bytes]]:
        return self.hand_over(f"an exchange of {len(payload)} bytes", payload)

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        memory = bytes_of(tensor)
        mine = memory.clone() if self._position == source else None
        everyones = self.hand_over(f"a broadcast of {memory.numel()} bytes from position {source}", mine)()
        if self._position != source:
            memory.copy_(everyones[source])

    def capacity(self, device: torch.device, dtype: torch.dtype) -> int:
        return lane_bytes(len(self.members)) // dtype.itemsize

    def in_place(self, device: torch.device, dtype: torch.dtype) -> tuple[int, int] | None:
        return None

    def row_bytes(self, device: torch.device) -> int:
        return lane_bytes(len(self.members)) // len(self.members) // 64 * 64

    def lanes(self, device: torch.device) -> list[Lane]:
        if device not in self._lanes:
            self._lanes[device] = [_LoopbackLane(self, device) for _ in range(LANES)]
        return self._lanes[device]

    def next_round(self) -> int:
        self._rounds += 1
        return self._rounds

    def abandon(self) -> None:
        self._encounter.leave(self.members[self._position])

    def hand_over(self, what: str, value: Any) -> Callable[[], list[Any]]:
        """Give all members a value, which nobody may change any more; the returned call waits for theirs, in order."""
        self._handed_over += 1
        number = self._handed_over
        tensors = [value] if isinstance(value, torch.Tensor) else []
        self._encounter.put(number, self._position, what, (value, Moment(devices_of(tensors))))

        def take() -> list[Any]:
            found = self._encounter.take(number, self._position)
            for _, handed_over in found:
                handed_over.wait()
            keep_for_stream(theirs for theirs, _ in found if isinstance(theirs, torch.Tensor))
            return [theirs for theirs, _ in found]

        return take


class _LoopbackLane:
    """A bucket between threads. Its memory is new at every use, because what was handed over is not written to."""

    def __init__(self, transport: LoopbackTransport, device: torch.device) -> None:
        self._transport = transport
        self._device = device
        self._members = len(transport.members)
        self._outgoing: torch.Tensor
        self._wait: Callable[[], list[torch.Tensor]]

    def outgoing(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        self._outgoing = torch.empty(numel, dtype=dtype, device=self._device)
        return self._outgoing

    def adopt(self, values: torch.Tensor) -> None:
        raise NotImplementedError("Values are packed here; `in_place` of the transport says so.")

    def launch(self) -> None:
        values = self._outgoing
        self._wait = self._transport.hand_over(f"a mean of {values.numel()} values of {values.dtype}", values)

    def combine(self) -> None:
        parts = self._wait()
        mine = share(parts[0].numel(), self._transport.position, self._members)
        mean = torch.empty_like(parts[0][mine])
        mean_into(mean, torch.stack([part[mine] for part in parts]))
        self._wait = self._transport.hand_over("the shares of a mean", mean)

    def land(self) -> torch.Tensor:
        return torch.cat(self._wait())

    def scatter(self, size: int) -> torch.Tensor:
        self._outgoing = torch.empty(self._members, size, dtype=torch.uint8, device=self._device)
        return self._outgoing

    def launch_scatter(self) -> None:
        self._wait = self._transport.hand_over(f"a scatter of {self._outgoing.shape[1]} bytes", self._outgoing)

    def scattered(self) -> torch.Tensor:
        return torch.stack([rows[self._transport.position] for rows in self._wait()])

    def gather(self, size: int) -> torch.Tensor:
        self._outgoing = torch.empty(size, dtype=torch.uint8, device=self._device)
        return self._outgoing

    def launch_gather(self) -> None:
        self._wait = self._transport.hand_over(f"a gather of {self._outgoing.numel()} bytes", self._outgoing)

    def gathered(self) -> torch.Tensor:
        return torch.stack(self._wait())


class _Encounter:
    """Where the members of one transport lay down values for each other.

    Every member lays down the same sequence of kinds, so a number says which values belong together.
    """

    def __init__(self, members: tuple[int, ...], timeout_s: float) -> None:
        self.members = members
        self.timeout_s = timeout_s
        self._changed = threading.Condition()
        self._values: dict[int, dict[int, tuple[str, Any]]] = {}
        self._takers: Counter[int] = Counter()
        self._came: set[int] = set()
        self._gone: set[int] = set()  # positions

    def come(self, rank: int) -> bool:
        """Count a member in; tell whether all have come. The hub calls this, for one of them at a time."""
        self._came.add(rank)
        return len(self._came) == len(self.members)

    def put(self, number: int, position: int, what: str, value: Any) -> None:
        with self._changed:
            self._refuse_if_gone(position)
            self._values.setdefault(number, {})[position] = (what, value)
            self._changed.notify_all()

    def take(self, number: int, position: int) -> list[Any]:
        """Wait for everybody's value with this number."""
        with self._changed:
            self._changed.wait_for(lambda: self._settled(number, position), self.timeout_s)
            self._refuse_if_gone(position)
            self._refuse_if_incomplete(number)
            found = self._values[number]
            self._takers[number] += 1
            if self._takers[number] == len(self.members):
                del self._values[number], self._takers[number]
        return self._alike([found[other] for other in range(len(self.members))])

    def leave(self, rank: int) -> None:
        """Take a member out; what it has laid down stays."""
        with self._changed:
            if rank in self.members:
                self._gone.add(self.members.index(rank))
                self._changed.notify_all()

    def _missing(self, number: int) -> list[int]:
        return [position for position in range(len(self.members)) if position not in self._values.get(number, {})]

    def _settled(self, number: int, position: int) -> bool:
        missing = self._missing(number)
        return not missing or position in self._gone or not self._gone.isdisjoint(missing)

    def _refuse_if_gone(self, position: int) -> None:
        if position in self._gone:
            raise TransportError(OUT_OF_STEP)

    def _refuse_if_incomplete(self, number: int) -> None:
        missing = self._missing(number)
        for position in missing:
            if position in self._gone:
                raise TransportError(f"Rank {self.members[position]} has ended, or gave up after a failure of its own.")
        if missing:
            rank = self.members[missing[0]]
            raise TransportError(f"Rank {rank} did not come to this averaging within {self.timeout_s:g} s.")

    def _alike(self, found: list[tuple[str, Any]]) -> list[Any]:
        """Return the values, unless the members are not at the same place: a process group would mix them up."""
        kinds = {what: rank for rank, (what, _) in zip(self.members, found, strict=True)}
        if len(kinds) > 1:
            told = " and ".join(f"rank {rank} at {what}" for what, rank in kinds.items())
            raise TransportError(f"The members of this averaging are out of step: {told}.")
        return [value for _, value in found]

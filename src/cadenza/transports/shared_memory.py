"""Averaging between processes of one machine through memory that they share.

On one machine Gloo sends every byte through the kernel's TCP stack. Here a segment of memory is mapped by all members:
each packs its values into its own part of it, then averages its share over everybody's parts, and all read the result.
Unix sockets between the members carry nothing but "my part is ready", so a member that dies is noticed at once, waiting
costs no processor time, and the order of memory accesses is the kernel's concern.

`open_shared_memory` is a collective: all members get the transport or, if they are not on one machine, all get None.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import secrets
import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from cadenza.errors import TransportError
from cadenza.transports.base import OUT_OF_STEP, Above, Lane, Transport
from cadenza.transports.means import mean_into, share

__all__ = ["LANES", "SharedMemoryTransport", "lane_bytes", "open_shared_memory"]

SEGMENT_BYTES = 24 << 20
LANES = 3
_PAGE = 4096
_BY_SOCKET = 4096  # bytes; longer messages take the underlying transport, so that socket buffers never fill
_SET_UP_S = 30.0

_CARD = struct.Struct("<B16s16s31x")  # able, machine, secret of the listener
_GREETING = struct.Struct("<I16s")  # the caller's position, the listener's secret


class SharedMemoryTransport(Above):
    """Averages CPU tensors through shared memory, everything else through the transport below it."""

    def __init__(self, below: Transport, mesh: _Mesh, segment: torch.Tensor) -> None:
        super().__init__(below)
        self._mesh = mesh
        count = len(below.members)
        self._lane_bytes = lane_bytes(count)
        lanes = segment.view(LANES, count + 1, self._lane_bytes)
        self._shared_lanes: list[Lane] = [_SharedLane(mesh, lane, below.position) for lane in lanes]

    def exchange(self, payload: bytes) -> Callable[[], list[bytes]]:
        if len(payload) > _BY_SOCKET:
            return self._below.exchange(payload)
        self._mesh.send(payload)
        return lambda: self._mesh.receive(payload)

    def capacity(self, device: torch.device, dtype: torch.dtype) -> int:
        if device.type != "cpu":
            return self._below.capacity(device, dtype)
        return self._lane_bytes // dtype.itemsize

    def in_place(self, device: torch.device, dtype: torch.dtype) -> tuple[int, int] | None:
        return None if device.type == "cpu" else self._below.in_place(device, dtype)

    def row_bytes(self, device: torch.device) -> int:
        if device.type != "cpu":
            return self._below.row_bytes(device)
        return self._lane_bytes // len(self.members) // 64 * 64

    def lanes(self, device: torch.device) -> list[Lane]:
        return self._shared_lanes if device.type == "cpu" else self._below.lanes(device)

    def abandon(self) -> None:
        self._mesh.close()
        self._below.abandon()


class _SharedLane:
    """A bucket in shared memory: one part a member to pack into, and one for the result."""

    def __init__(self, mesh: _Mesh, parts: torch.Tensor, position: int) -> None:
        self._mesh = mesh
        self._parts = parts
        self._position = position
        self._members = len(parts) - 1
        self._result_is_free = False
        self._outgoing_is_free = True
        self._rows = parts
        self._mark = 0

    def outgoing(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        self._rows = self._parts.view(dtype)[:, :numel]
        return self._rows[self._position]

    def adopt(self, values: torch.Tensor) -> None:
        raise NotImplementedError("Values are packed here; `in_place` of the transport says so.")

    def launch(self) -> None:
        self._mark = self._mesh.tick()

    def combine(self) -> None:
        self._mesh.await_tick(self._mark)
        parts, result = self._rows[:-1], self._rows[-1]
        mine = share(result.numel(), self._position, len(parts))
        mean_into(result[mine], parts[:, mine])
        self._result_is_free = False
        self._mark = self._mesh.tick()

    def land(self) -> torch.Tensor:
        self._mesh.await_tick(self._mark)
        return self._rows[-1]

    def scatter(self, size: int) -> torch.Tensor:
        if not self._outgoing_is_free:
            self._mesh.await_tick(self._mesh.tick())
        self._rows = self._rows_of(size)
        return self._rows[self._position]

    def launch_scatter(self) -> None:
        self._mark = self._mesh.tick()

    def scattered(self) -> torch.Tensor:
        self._mesh.await_tick(self._mark)
        self._result_is_free = True  # whoever has scattered anew has read the last result
        self._outgoing_is_free = False
        return self._rows[:-1, self._position]

    def gather(self, size: int) -> torch.Tensor:
        if not self._result_is_free:
            self._mesh.await_tick(self._mesh.tick())
        self._result_is_free = False
        self._rows = self._rows_of(size)
        return self._rows[-1, self._position]

    def launch_gather(self) -> None:
        self._mark = self._mesh.tick()

    def gathered(self) -> torch.Tensor:
        self._mesh.await_tick(self._mark)
        self._outgoing_is_free = True  # whoever has gathered has used what was scattered before
        return self._rows[-1]

    def _rows_of(self, size: int) -> torch.Tensor:
        """Return every part, the result being the last, as a row for each member."""
        rows: torch.Tensor = self._parts[:, : size * self._members].unflatten(1, (self._members, size))
        return rows


class _Mesh:
    """A socket to each other member, on which all of them send the same sequence: headers, then ticks.

    A tick says "the next of my stages is done". Because every member goes through the same stages in the same order,
    the number of ticks is all that needs saying.
    """

    def __init__(
        self, peers: dict[int, socket.socket], members: Sequence[int], position: int, timeout_s: float
    ) -> None:
        self._peers = peers
        self._members = members
        self._position = position
        self._timeout_s = timeout_s
        self._sent = 0
        self._seen = dict.fromkeys(peers, 0)
        for peer in peers.values():
            peer.settimeout(timeout_s)

    def send(self, payload: bytes) -> None:
        for position, peer in self._open_peers().items():
            try:
                peer.sendall(payload)
            except OSError as error:
                raise self._failure(position, error) from error

    def receive(self, mine: bytes) -> list[bytes]:
        """Return what each member sent, in their order: as many bytes as `mine`, which stands at our own place."""
        received = {self._position: mine}
        for position in self._open_peers():
            received[position] = self._read(position, len(mine))
        return [received[position] for position in range(len(self._members))]

    def tick(self) -> int:
        """Tell everyone that one more stage is done here; return its number."""
        self.send(b"\0")
        self._sent += 1
        return self._sent

    def await_tick(self, number: int) -> None:
        """Wait until every other member has done as many stages."""
        for position in self._open_peers():
            if (missing := number - self._seen[position]) > 0:
                self._read(position, missing)
                self._seen[position] = number

    def close(self) -> None:
        for peer in self._peers.values():
            peer.close()
        self._peers = {}

    def _open_peers(self) -> dict[int, socket.socket]:
        if not self._peers:
            raise TransportError(OUT_OF_STEP)
        return self._peers

    def _read(self, position: int, size: int) -> bytes:
        data = b""
        while len(data) < size:
            try:
                more = self._peers[position].recv(size - len(data))
            except OSError as error:
                raise self._failure(position, error) from error
            if not more:
                raise TransportError(
                    f"Rank {self._members[position]} has ended, or gave up after a failure of its own."
                )
            data += more
        return data

    def _failure(self, position: int, error: OSError) -> TransportError:
        rank = self._members[position]
        if isinstance(error, TimeoutError):
            return TransportError(f"Rank {rank} did not come to this averaging within {self._timeout_s:g} s.")
        return TransportError(f"Rank {rank} has ended, or gave up after a failure of its own ({error}).")


def open_shared_memory(below: Transport) -> SharedMemoryTransport | None:
    """Share memory between the members of a transport, if they all run on one machine and all are willing.

    A member is unwilling if ``CADENZA_SHARED_MEMORY=0`` is in its environment.
    """
    with contextlib.ExitStack() as resources:
        listener, card = _prepare(resources)
        cards = [_CARD.unpack(data) for data in below.exchange(card)()]
        able = all(able for able, _, _ in cards)
        if not able or len({machine for _, machine, _ in cards}) > 1 or listener is None:
            return None
        failure: OSError | None = None
        try:
            meeting = _meet(below, listener, [secret for _, _, secret in cards], resources)
        except OSError as error:
            failure = error
            resources.close()  # so that nobody waits for us
        met = below.exchange(b"\0" if failure else b"\1")()
        if failure or b"\0" in met:
            return None
        resources.pop_all()
    listener.close()
    mesh = _Mesh(meeting.peers, below.members, below.position, below.timeout_s)
    return SharedMemoryTransport(below, mesh, meeting.segment)


@dataclass
class _Meeting:
    peers: dict[int, socket.socket]
    segment: torch.Tensor


def _prepare(resources: contextlib.ExitStack) -> tuple[socket.socket | None, bytes]:
    """Listen where the other members of this machine can find us, and write the card that tells them where."""
    secret = secrets.token_bytes(16)
    machine = _machine()
    if machine is None or os.environ.get("CADENZA_SHARED_MEMORY") == "0":
        return None, _CARD.pack(0, bytes(16), secret)
    try:
        listener = resources.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        listener.settimeout(_SET_UP_S)
        listener.bind(_address(secret))
        listener.listen(1024)
    except OSError:
        return None, _CARD.pack(0, bytes(16), secret)
    return listener, _CARD.pack(1, machine, secret)


def _machine() -> bytes | None:
    """Identify the machine and its network, or return None where memory cannot be shared in this way.

    The network namespace is part of it: processes in different ones are different hosts, also when the link between
    them is emulated.
    """
    if not (hasattr(os, "memfd_create") and hasattr(socket, "send_fds")):
        return None
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
        network = os.stat("/proc/self/ns/net").st_ino
    except OSError:
        return None
    return hashlib.blake2b(boot + str(network).encode(), digest_size=16).digest()


def _is_own_user(peer: socket.socket) -> bool:
    """Tell whether a process of this user, or of root, is at the other end: every user can reach abstract sockets."""
    told = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return struct.unpack("3i", told)[1] in (0, os.geteuid())


def _address(secret: bytes) -> str:
    """Return an abstract socket address: it leaves no file behind, whatever happens."""
    return "\0cadenza-" + hashlib.blake2b(secret, digest_size=16).hexdigest()


def _meet(
    below: Transport, listener: socket.socket, secrets_: Sequence[bytes], resources: contextlib.ExitStack
) -> _Meeting:
    """Connect to every member before us, let those after us connect, and pass the first one's segment round."""
    position, count = below.position, len(below.members)
    peers: dict[int, socket.socket] = {}
    for other in range(position):
        peer = resources.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        peer.settimeout(_SET_UP_S)
        peer.connect(_address(secrets_[other]))
        peer.sendall(_GREETING.pack(position, secrets_[other]))
        peers[other] = peer
    while len(peers) < count - 1:
        peer = resources.enter_context(listener.accept()[0])
        if not _is_own_user(peer):
            peer.close()
            continue
        peer.settimeout(_SET_UP_S)
        greeting = peer.recv(_GREETING.size, socket.MSG_WAITALL)
        if len(greeting) != _GREETING.size:
            continue
        caller, secret = _GREETING.unpack(greeting)
        if secrets.compare_digest(secret, secrets_[position]) and position < caller < count:
            peers[caller] = peer
    size = LANES * (count + 1) * lane_bytes(count)
    if position == 0:
        handle = os.memfd_create("cadenza", os.MFD_CLOEXEC)
        os.ftruncate(handle, size)
        for peer in peers.values():
            socket.send_fds(peer, [b"\0"], [handle])
    else:
        _, handles, _, _ = socket.recv_fds(peers[0], 1, 1)
        if len(handles) != 1:
            raise OSError("rank 0 of the group sent no memory")
        handle = handles[0]
    try:
        segment = torch.frombuffer(mmap.mmap(handle, size), dtype=torch.uint8)
    finally:
        os.close(handle)
    return _Meeting(peers, segment)


def lane_bytes(members: int) -> int:
    """Return the size of one member's part of a lane, such that the whole segment stays within its bound.

    >>> lane_bytes(2) * 3 * LANES <= SEGMENT_BYTES
    True
    """
    parts = LANES * (members + 1)
    return max(_PAGE, SEGMENT_BYTES // parts // _PAGE * _PAGE)

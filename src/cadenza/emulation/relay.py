"""Cables that take time: frames go from one TAP device to another, in another namespace, and arrive later.

For kernels without netem. Run as a script, so that it starts at once, with the cables as JSON: the two ends, each a
namespace and the interface to make there, and the seconds that a frame takes. It says "ready" once the interfaces are
there, and ends, and they with it, when its input does.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import select
import struct
import sys
import time
from collections import deque

TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0
IFF_TAP, IFF_NO_PI, IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
TUN_F_CSUM, TUN_F_TSO4 = 0x01, 0x02
CLONE_NEWNET = 0x40000000
FRAME = 1 << 17  # bytes; the kernel hands segments over up to 64 KiB at once
LONGEST = 64 << 20  # bytes that may be on their way in one direction; what is more is lost
AT_ONCE = 64  # frames that are taken from a device before the others have their turn


def open_tap(namespace: str, name: str) -> int:
    """Make an interface in a namespace and return what its frames are read from and written to."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}") as place:
        if libc.setns(place.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {namespace}")
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI | IFF_VNET_HDR))
    fcntl.ioctl(tap, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4)
    return tap


class Way:
    """One direction of a cable."""

    def __init__(self, source: int, target: int, delay_s: float) -> None:
        self.source, self._target, self._delay_s = source, target, delay_s
        self._frames: deque[tuple[float, bytes]] = deque()
        self._held = 0

    @property
    def due(self) -> float:
        """When the next frame arrives."""
        return self._frames[0][0] if self._frames else float("inf")

    def take(self) -> None:
        """Take frames in."""
        due = time.monotonic() + self._delay_s
        for _ in range(AT_ONCE):
            try:
                frame = os.read(self.source, FRAME)
            except OSError:  # there is no more now, or the interface is down
                return
            if self._held + len(frame) <= LONGEST:
                self._frames.append((due, frame))
                self._held += len(frame)

    def give(self, now: float) -> None:
        """Let those arrive whose time has come."""
        while self._frames and self._frames[0][0] <= now:
            _, frame = self._frames.popleft()
            self._held -= len(frame)
            try:
                os.write(self._target, frame)
            except OSError:  # the interface is down: nobody is there to receive
                continue


def main() -> None:
    """Carry frames until the input ends."""
    ways = []
    for cable in json.loads(sys.argv[1]):
        one, other = (open_tap(*end) for end in cable["ends"])
        ways += [Way(one, other, cable["delay_s"]), Way(other, one, cable["delay_s"])]
    print("ready", flush=True)
    by_source = {way.source: way for way in ways}
    while True:
        wait_s = min(way.due for way in ways) - time.monotonic()
        ready, _, _ = select.select([0, *by_source], [], [], max(0.0, min(wait_s, 3600.0)))
        if 0 in ready and not os.read(0, 1):
            return
        for source in ready:
            if source:
                by_source[source].take()
        now = time.monotonic()
        for way in ways:
            way.give(now)


if __name__ == "__main__":
    main()

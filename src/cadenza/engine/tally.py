"""Checksums over the encoded messages of an exchange: what was damaged on its way is found before it is used.

The sums travel at the end, once for all messages: a damaged bit changes the sum of what was received.
"""

from __future__ import annotations

import struct

import torch

from cadenza.common.checksums import checksum
from cadenza.errors import TransportError
from cadenza.transports import Transport

__all__ = ["Tally"]

_MOST = 1 << 64


class Tally:
    """What this member has sent to each other one and received from each, as sums of checksums.

    Args:
        members: How many there are.
        on: Whether anything is counted and compared at all.
    """

    def __init__(self, members: int, *, on: bool) -> None:
        self._on = on
        self._sent, self._received = [0] * (members + 1), [0] * members  # the last: what all get
        self._received_by_all = [0] * members

    def sent(self, member: int, message: torch.Tensor) -> None:
        """Count a message to one member."""
        self._count(self._sent, member, message)

    def sent_to_all(self, message: torch.Tensor) -> None:
        """Count a message to all members."""
        self._count(self._sent, -1, message)

    def received(self, member: int, message: torch.Tensor) -> None:
        """Count a message of a member to this one."""
        self._count(self._received, member, message)

    def received_by_all(self, member: int, message: torch.Tensor) -> None:
        """Count a message of a member to all."""
        self._count(self._received_by_all, member, message)

    def compare(self, transport: Transport) -> int:
        """Compare what was sent with what was received, on all members; return how many bytes that took.

        Raises:
            TransportError: A message that this member has received was damaged.
        """
        if not self._on:
            return 0
        layout = struct.Struct(f"<{len(self._sent)}Q")
        replies = [layout.unpack(reply) for reply in transport.exchange(layout.pack(*self._sent))()]
        for position, told in enumerate(replies):
            if (told[transport.position], told[-1]) != (self._received[position], self._received_by_all[position]):
                raise TransportError(f"What worker {transport.members[position]} sent was damaged on its way.")
        return (len(replies) - 1) * layout.size

    def _count(self, sums: list[int], place: int, message: torch.Tensor) -> None:
        if self._on:
            sums[place] = (sums[place] + checksum(message)) % _MOST

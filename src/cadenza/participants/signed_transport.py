"""A transport whose headers are signed: a stranger that got into the group is found before values are used."""

from __future__ import annotations

from collections.abc import Callable

from cadenza.errors import TransportError
from cadenza.participants.signing import MAC_BYTES, Signer
from cadenza.transports import Transport
from cadenza.transports.base import Above

__all__ = ["SignedTransport"]


class SignedTransport(Above):
    """Does what the transport below it does, and signs what goes from everyone to everyone."""

    def __init__(self, below: Transport, signer: Signer, place: str) -> None:
        super().__init__(below)
        self._signer = signer
        self._place = place
        self._exchanges = 0

    def exchange(self, payload: bytes) -> Callable[[], list[bytes]]:
        self._exchanges += 1
        places = [f"{self._place} {self._exchanges} {member}" for member in self.members]
        replies = self._below.exchange(payload + self._signer.sign(payload, places[self.position]))

        def checked() -> list[bytes]:
            found = []
            for member, place, reply in zip(self.members, places, replies(), strict=True):
                data, signature = reply[:-MAC_BYTES], reply[-MAC_BYTES:]
                if not self._signer.is_right(signature, data, place):
                    raise TransportError(f"Worker {member} does not know this job's secret: its header has no signer.")
                found.append(data)
            return found

        return checked

"""A host of an emulated network: a network namespace with one interface."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cadenza.emulation.tools import call

__all__ = ["INTERFACE", "Host"]

INTERFACE = "eth0"


@dataclass(frozen=True)
class Host:
    """A host of a network: a namespace with one interface and one address.

    >>> Host("cadenza-1-ab-h0", address="10.77.0.1", site=0).command(["ping", "-c1", "10.77.0.2"])
    ['ip', 'netns', 'exec', 'cadenza-1-ab-h0', 'ping', '-c1', '10.77.0.2']
    """

    name: str
    address: str
    site: int

    def command(self, argv: Sequence[str]) -> list[str]:
        """Return the command that runs `argv` on this host."""
        return ["ip", "netns", "exec", self.name, *argv]

    def bytes_sent(self) -> int:
        """Return how many bytes have left this host's interface since the network was made."""
        return self._count("tx_bytes")

    def bytes_received(self) -> int:
        """Return how many bytes have come in at this host's interface since the network was made."""
        return self._count("rx_bytes")

    def _count(self, what: str) -> int:
        return int(call(self.command(["cat", f"/sys/class/net/{INTERFACE}/statistics/{what}"])))

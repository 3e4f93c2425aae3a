"""The address of the host that a rank runs on; all namespaces have the same host name."""

from __future__ import annotations

import os
import socket

__all__ = ["own_address"]


def own_address() -> str:
    """Return the address from which this host reaches the first one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ["MASTER_ADDR"], 9))
        return probe.getsockname()[0]

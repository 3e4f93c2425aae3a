"""Addresses of stores and of this host, known without torch: the command line asks before it imports that."""

from __future__ import annotations

import socket

__all__ = ["local_end", "parse_address"]


def local_end(target: str) -> str:
    """Return the address of this host on the way to another, or raise OSError if there is none; nothing is sent.

    >>> local_end("127.0.0.1")
    '127.0.0.1'
    """
    family, kind, protocol, _, place = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as trial:
        trial.connect(place)
        return str(trial.getsockname()[0])


def parse_address(address: str) -> tuple[str, int]:
    """Return host and port.

    >>> parse_address("10.0.0.1:29400")
    ('10.0.0.1', 29400)
    """
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdigit():
        raise ValueError(f'The address of a store is "host:port", such as "10.0.0.1:29400"; got {address!r}.')
    return host.strip("[]"), int(port)

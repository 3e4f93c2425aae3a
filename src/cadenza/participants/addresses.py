"""Addresses of stores and of this host, known without torch: the command line asks before it imports that."""

from __future__ import annotations

import socket

__all__ = ["family_of", "is_host", "local_end", "parse_address"]

_PORTS = range(1, 1 << 16)


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
    host, _, digits = address.rpartition(":")
    host = host.strip("[]")
    if not host or not digits.isascii() or not digits.isdigit():
        raise ValueError(f'The address of a store is "host:port", such as "10.0.0.1:29400"; got {address!r}.')
    if len(digits) > 9 or int(digits) not in _PORTS:
        raise ValueError(f"The port of a store is a number from 1 to 65535; got {address!r}.")
    if not is_host(host):
        raise ValueError(f"The host of a store has a name of parts of 1 to 63 characters, with dots; got {address!r}.")
    return host, int(digits)


def family_of(host: str) -> socket.AddressFamily:
    """Return what kind of socket reaches a host, or listens there.

    >>> family_of("::1").name, family_of("10.0.0.1").name
    ('AF_INET6', 'AF_INET')
    """
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def is_host(name: str) -> bool:
    """Tell whether a text may be the name of a host, or its address; another one cannot even be looked up.

    >>> is_host("10.0.0.1"), is_host("::1"), is_host("x" * 64 + ".org"), is_host("")
    (True, True, False, False)
    """
    try:
        name.encode("idna")
    except UnicodeError:
        return False
    return bool(name) and "\0" not in name

"""Keeps name servers out of the way of the store.

Torch's store asks the name server for the name of every address that connects, on the server's only thread and on the
client's: one lost answer stops the whole store for 5 seconds, a name server that cannot be reached for 10 at every
connection. Nobody needs these names; torch puts them into its logs.

glibc lets a process, and each of its threads, say how names are looked up; elsewhere these functions do nothing.
"""

from __future__ import annotations

import ctypes
from typing import Any

__all__ = ["limit_name_lookups", "use_hosts_file_only"]


class _Resolver(ctypes.Structure):
    """The beginning of glibc's `struct __res_state`: how this thread asks name servers."""

    _fields_ = [
        ("timeout_s", ctypes.c_int),
        ("attempts", ctypes.c_int),
        ("options", ctypes.c_ulong),
        ("servers", ctypes.c_int),
    ]


def use_hosts_file_only() -> None:
    """Let this process find names in its hosts file only; for a process that serves a store and does nothing else."""
    configure = _glibc("__nss_configure_lookup")
    if configure is not None:
        configure(b"hosts", b"files")


def limit_name_lookups() -> None:
    """Let this thread ask one name server once, and wait for a second.

    When that fails, torch itself looks up no further name in this process.
    """
    state, begin = _glibc("__res_state"), _glibc("__res_ninit")
    if state is None or begin is None:
        return
    state.restype = ctypes.POINTER(_Resolver)
    begin.argtypes = [ctypes.POINTER(_Resolver)]
    resolver = state()
    if begin(resolver) == 0:
        resolver.contents.timeout_s = resolver.contents.attempts = 1
        resolver.contents.servers = min(1, resolver.contents.servers)


def _glibc(name: str) -> Any | None:
    try:
        return getattr(ctypes.CDLL(None), name)
    except (AttributeError, OSError, TypeError):  # another C library, or Windows
        return None

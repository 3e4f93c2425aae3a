"""A name server that does not answer is asked once by a line to the store, and not at all by the store."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from cadenza.participants import name_lookup as names

pytestmark = pytest.mark.skipif(names._glibc("__res_state") is None, reason="another C library than glibc")

# Looks up an address kept for documentation, at a name server on this machine that never answers.
LOOK_UP = """
import ctypes, socket, struct, sys
from cadenza.participants import name_lookup as names

class Resolver(ctypes.Structure):
    _fields_ = [*names._Resolver._fields_, ("addresses", ctypes.c_char * 48)]

how, port = sys.argv[1:]
names.limit_name_lookups()
state = names._glibc("__res_state")
state.restype = ctypes.POINTER(Resolver)
resolver = state().contents
address = struct.pack("=H", socket.AF_INET) + struct.pack("!H", int(port)) + bytes([127, 0, 0, 1])
ctypes.memmove(ctypes.addressof(resolver) + Resolver.addresses.offset, address, len(address))
resolver.servers = 1
if how == "twice":
    resolver.attempts = 2
if how == "nobody":
    names.use_hosts_file_only()
ctypes.CDLL(None).gethostbyaddr(bytes([192, 0, 2, 7]), 4, socket.AF_INET)
"""


@pytest.mark.parametrize(("how", "questions"), [("twice", 2), ("briefly", 1), ("nobody", 0)])
def test_a_name_server_that_does_not_answer_is_hardly_asked(how: str, questions: int) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("127.0.0.1", 0))
        server.setblocking(False)
        subprocess.run([sys.executable, "-c", LOOK_UP, how, str(server.getsockname()[1])], check=True, timeout=60)
        received = 0
        while True:
            try:
                received += bool(server.recv(512))
            except BlockingIOError:
                break
    assert received == questions

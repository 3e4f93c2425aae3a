"""With a secret, strangers cannot touch the store: not read it, not write to it, not stay, not keep others out."""

from __future__ import annotations

import gc
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from cadenza.errors import StoreLostError, TurnedAwayError
from cadenza.participants.private_store import server as serving
from cadenza.participants.private_store.client import PrivateStore, greet
from cadenza.participants.private_store.frames import (
    GREETING,
    HELLO,
    NONCE_BYTES,
    DamagedError,
    Frames,
    _fields,
    key_of,
    proof,
)
from cadenza.participants.private_store.server import PrivateStoreServer
from cadenza.participants.signed_store import SignedStore
from cadenza.participants.signing import Signer
from cadenza.participants.store import StoreConnection, serve

HERE = "127.0.0.1"


@pytest.fixture
def server() -> Iterator[PrivateStoreServer]:
    with PrivateStoreServer(HERE, secret="word") as server:
        yield server


def enter(port: int, secret: str = "word") -> PrivateStore:
    connection = greet(HERE, port, timeout_s=5)
    assert connection is not None
    return PrivateStore.enter(connection, secret, timeout_s=5)


def is_hung_up_on(connection: socket.socket) -> bool:
    connection.settimeout(5)
    try:
        while connection.recv(4096):
            pass
    except ConnectionResetError:
        pass
    return True


def test_it_does_what_torchs_store_does(server: PrivateStoreServer) -> None:
    below = dist.HashStore()
    signer = Signer("job", secret="word")
    for store in (below, enter(server.port).below("job")):
        ours = SignedStore(store, signer, who="me")
        assert ours.read("a") is None
        assert ours.compare_set("a", "", "1") == b"1"
        assert ours.compare_set("a", "", "2") == b"1"
        assert ours.compare_set("a", "1", "2") == b"2"
        assert ours.compare_set("gone", "1", "2") == b"1", "as torch has it"
        ours.append("b", "x")
        ours.append("b", "y")
        assert ours.lines("b") == ["x", "y"]
        assert ours.read_all(["a", "b", "c"]) == ["2", "x", None]
        assert ours.check(["a", "b"])
        assert not ours.check(["a", "c"])
        assert ours.add("n", 1) == ours.add("n", 1) == 1
        assert ours.delete_key("a")
        assert not ours.delete_key("a")
        assert ours.read("a") is None
        ours.unsigned("place").set("key", "value")
    assert sorted(enter(server.port).below("job").list_keys()) == ["b", "n", "place/key"]


def test_values_of_any_size_and_bytes_come_back(server: PrivateStoreServer) -> None:
    store = enter(server.port)
    for value in (b"", b"\0\n\xff", os.urandom(5 << 20)):
        store.set("key", value)
        assert store.find("key") == value
    with pytest.raises(ValueError, match="at most"):
        store.set("key", bytes(65 << 20))


def test_another_secret_and_none_are_turned_away_by_name(server: PrivateStoreServer) -> None:
    with pytest.raises(TurnedAwayError, match="another secret"):
        enter(server.port, "another")
    for secret, why in (("another", "another secret"), (None, "CADENZA_SECRET")):
        with pytest.raises(TurnedAwayError, match=why):
            StoreConnection(f"{HERE}:{server.port}", Signer("job", secret=secret)).call(lambda store: store.read("a"))


def test_a_server_that_does_not_know_the_secret_is_found_out() -> None:
    listener = socket.create_server((HERE, 0))

    def pretend() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(len(HELLO), socket.MSG_WAITALL)
            connection.sendall(GREETING + bytes(NONCE_BYTES))
            said = connection.recv(2 * NONCE_BYTES, socket.MSG_WAITALL)
            connection.sendall(said[NONCE_BYTES:])  # the client's own proof

    threading.Thread(target=pretend, daemon=True).start()
    with listener, pytest.raises(TurnedAwayError):
        enter(listener.getsockname()[1])


def test_a_client_of_torchs_store_gets_nowhere(server: PrivateStoreServer) -> None:
    enter(server.port).set("key", "ours")
    with socket.create_connection((HERE, server.port), 5) as connection:
        connection.sendall(HELLO[:6] + b"\1\2\3\4" + b"\1")  # torch's magic word, and a ping of its own
        assert is_hung_up_on(connection)
    assert enter(server.port).find("key") == b"ours"


@given(said=st.binary(max_size=200), greets=st.booleans())
def test_whatever_a_stranger_says_he_is_hung_up_on_or_not_heard(said: bytes, greets: bool) -> None:
    server = _fuzzed()
    with socket.create_connection((HERE, server.port), 5) as connection:
        connection.sendall((HELLO if greets else b"") + said)
        connection.shutdown(socket.SHUT_WR)
        heard = b""
        with suppress(ConnectionResetError):
            while data := connection.recv(4096):
                heard += data
    assert len(heard) <= len(GREETING) + 2 * NONCE_BYTES, "no more than the greeting and a refusal"
    store = enter(server.port)
    assert store.list_keys() == ["key"]
    assert store.find("key") == b"ours"


_servers: list[PrivateStoreServer] = []


def _fuzzed() -> PrivateStoreServer:
    if not _servers:
        _servers.append(PrivateStoreServer(HERE, secret="word"))
        enter(_servers[0].port).set("key", "ours")
    return _servers[0]


def _conversation(server: PrivateStoreServer) -> tuple[socket.socket, Frames]:
    """Enter by hand; return the connection and what makes frames."""
    connection = greet(HERE, server.port, timeout_s=5)
    assert connection is not None
    theirs, ours = connection.recv(NONCE_BYTES, socket.MSG_WAITALL), os.urandom(NONCE_BYTES)
    connection.sendall(ours + proof(key_of("word"), theirs, ours, of_server=False))
    connection.recv(NONCE_BYTES, socket.MSG_WAITALL)
    return connection, Frames(key_of("word"), theirs, ours, serves=False)


@pytest.mark.parametrize("how", ["a bit is turned", "said again", "left out", "of another connection", "too long"])
def test_a_frame_that_was_tampered_with_ends_the_connection(server: PrivateStoreServer, how: str) -> None:
    connection, frames = _conversation(server)
    another, other_frames = _conversation(server)
    with connection, another:
        first = frames.pack([b"set", b"key", b"first"])
        second = frames.pack([b"set", b"key", b"second"])
        damaged = {
            "a bit is turned": first[:-1] + bytes([first[-1] ^ 1]),
            "said again": first + first,
            "left out": second,
            "of another connection": other_frames.pack([b"set", b"key", b"first"]),
            "too long": b"\xff" * 4 + first[4:],
        }[how]
        connection.sendall(damaged)
        assert is_hung_up_on(connection)
    assert enter(server.port).find("key") == (b"first" if how == "said again" else None)


@pytest.mark.parametrize("message", [[], [b"unknown"], [b"set", b"key"], [b"set", b"a", b"b", b"c"], [b"compare_set"]])
def test_what_another_version_might_ask_ends_its_connection_alone(
    server: PrivateStoreServer, message: list[bytes]
) -> None:
    connection, frames = _conversation(server)
    with connection:
        connection.sendall(frames.pack(message))
        assert is_hung_up_on(connection)
    assert enter(server.port).list_keys() == []


@pytest.mark.parametrize("body", [b"\1", b"\2\0\0\0x", b"\xff\xff\xff\xff", b"\0\0\0\0\1"])
def test_fields_that_are_longer_than_their_message_are_damage(body: bytes) -> None:
    with pytest.raises(DamagedError):
        _fields(body)


def test_idle_strangers_keep_nobody_out(server: PrivateStoreServer) -> None:
    ours = enter(server.port)
    held = [socket.create_connection((HERE, server.port), 5) for _ in range(serving._MOST_WAITING + 100)]
    try:
        assert enter(server.port).list_keys() == []
        assert ours.list_keys() == [], "who has entered stays"
        waiting = sum(_is_open(one) for one in held)
        assert waiting <= serving._MOST_WAITING
    finally:
        for one in held:
            one.close()


def _is_open(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return bool(connection.recv(1))
    except BlockingIOError:
        return True
    except ConnectionResetError:
        return False


def test_a_stranger_who_says_nothing_is_hung_up_on_in_time(
    server: PrivateStoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "_PATIENCE_S", 0.2)
    with socket.create_connection((HERE, server.port), 5) as silent, enter_slowly(server) as slow:
        assert is_hung_up_on(silent)
        assert is_hung_up_on(slow)
    ours = enter(server.port)
    time.sleep(1.5)
    assert ours.list_keys() == [], "who has entered may be silent"


def enter_slowly(server: PrivateStoreServer) -> socket.socket:
    connection = socket.create_connection((HERE, server.port), 5)
    connection.sendall(HELLO[:3])
    return connection


def test_a_guest_who_takes_no_answers_delays_nobody(server: PrivateStoreServer) -> None:
    enter(server.port).set("large", bytes(1 << 20))
    connection, frames = _conversation(server)
    with connection:
        for _ in range(50):  # 50 MB of answers, which it does not read
            connection.sendall(frames.pack([b"read", b"large"]))
        for _ in range(3):
            assert enter(server.port).find("key") is None


def test_connections_are_found_to_be_lost_and_made_anew() -> None:
    first = PrivateStoreServer(HERE, secret="word")
    connection = StoreConnection(f"{HERE}:{first.port}", Signer("job", secret="word"))
    connection.call(lambda store: store.set("key", "1"))
    first.close()
    with pytest.raises(StoreLostError):
        connection.call(lambda store: store.read("key"))
    with pytest.raises(StoreLostError):
        connection.call(lambda store: store.read("key"))
    with PrivateStoreServer(HERE, secret="word", port=first.port):
        assert connection.call(lambda store: store.read("key")) is None
        connection.close()


def test_what_is_no_store_is_told(server: PrivateStoreServer) -> None:
    listener = socket.create_server((HERE, 0))

    def answer() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    threading.Thread(target=answer, daemon=True).start()
    connection = StoreConnection(f"{HERE}:{listener.getsockname()[1]}", Signer("job", secret="word"))
    with listener, pytest.raises(StoreLostError, match="no store"):
        connection.call(lambda store: store.read("key"))


def test_a_secret_at_a_store_that_asks_nobody_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    store = serve(host=HERE)
    address = f"{HERE}:{store.port}"
    with caplog.at_level(logging.WARNING, logger="cadenza"):
        for _ in range(2):
            connection = StoreConnection(address, Signer("job", secret="word"))
            connection.call(lambda store: store.set("key", "1"))
            connection.close()
    assert [record for record in caplog.records if address in record.getMessage()] == caplog.records[:1]


def test_a_store_that_nobody_refers_to_ends() -> None:
    store = serve(host=HERE, secret="word")
    port = store.port
    connection = greet(HERE, port, timeout_s=5)
    assert connection is not None
    del store
    gc.collect()
    with connection:
        assert is_hung_up_on(connection)


def test_the_process_of_a_store_takes_the_secret_from_its_environment() -> None:
    command = [sys.executable, "-m", "cadenza.membership", "--host", HERE]
    environment = {**os.environ, "CADENZA_SECRET": "word"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        with pytest.raises(TurnedAwayError):
            enter(port, "another")
        assert enter(port).list_keys() == []
    finally:
        process.kill()
        process.communicate()

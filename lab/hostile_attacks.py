"""What somebody does who reaches the ports of a run and does not know its secret; used by `lab/hostile.py`.

    python -m lab.hostile_attacks --port 29400 --seconds 60

Each kind has its turn, with a pause after it, and at last all come at once. A line says when each began and ended, and
how much it did. Started by root it becomes another user first, who cannot look into the workers.
"""

from __future__ import annotations

import argparse
import encodings.idna  # noqa: F401 - connecting would import it, as a user who may not read it
import json
import os
import random
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from itertools import cycle
from pathlib import Path

import torch.distributed as dist

from cadenza.participants.private_store.client import greet
from cadenza.participants.private_store.frames import NONCE_BYTES, Frames, key_of, proof
from cadenza.participants.signed_store import SignedStore
from cadenza.participants.signing import Signer

__all__ = ["ATTACKS", "Target"]

NOBODY = 65534
LISTENS = "0A"  # in /proc/net/tcp
MAGIC = b"\0" + struct.pack("<I", 0x3C85F7CE)  # what a client of torch's store says first
LATEST = "1000000.0.0 1000000 {at:.3f}"
GUESSED = (
    *("latest", "workers", "rounds", "finished", "spaces", "beat/0", "beat/99", "round/1000000.0.0/roster"),
    *("round/1000000.0.0/arrivals", "round/1000000.0.0/vote/verdict"),
)


class Target:
    """A run, as a stranger sees it."""

    def __init__(self, port: int, *, seed: int = 0) -> None:
        self.port = port
        self.dice = random.Random(seed)
        self._client: dist.TCPStore | None = None
        self.seen: dict[str, list[bytes]] = {}  # what stood under each key, at times
        self.held: list[socket.socket] = []

    @property
    def client(self) -> dist.TCPStore:
        if self._client is None:
            self._client = dist.TCPStore("127.0.0.1", self.port, None, False, timeout=timedelta(seconds=5))
        return self._client

    def give_up(self) -> None:
        """Let the connection go: the store has closed it."""
        self._client = None

    def every_key(self) -> list[str]:
        """Return every key that there is, those of rounds last, and some that there may be."""
        found = sorted(self.client.list_keys(), key=len)
        spaces = {"/".join(key.split("/")[:3]) for key in found if key.startswith("cadenza/") and key.count("/") > 2}
        return found + [f"{space}/{guess}" for space in spaces for guess in GUESSED]

    def read(self, key: str) -> bytes:
        """Return what stands under a key, without waiting; remember it."""
        found = bytes(self.client.compare_set(key, "\0no", "\0no"))
        kept = self.seen.setdefault(key, [])
        if found != b"\0no" and len(kept) < 50 and len(found) < 10_000:
            kept.append(found)
        return found

    def junk(self, key: str) -> bytes:
        """Return what nobody should be able to use."""
        forged = Signer("job", secret="a guess").sign_text(LATEST.format(at=time.time()), "latest")
        told = (
            self.dice.randbytes(self.dice.randrange(200)),
            "ünsigniert – 不".encode(),
            b"",
            b"\n\n\n",
            b"0" * 32 + b" " + LATEST.format(at=time.time()).encode(),
            forged.encode(),
            b'{"members": [0], "leader": 0}',
            *self.seen.get(key, [b""])[:1],  # what stood there long ago
            *self.dice.choice(list(self.seen.values()) or [[b""]])[:1],  # what stood elsewhere
        )
        return self.dice.choice(told)

    def hold(self, port: int, most: int) -> int:
        """Hold one more connection, and say nothing."""
        with suppress(OSError):
            self.held.append(socket.create_connection(("127.0.0.1", port), 1))
        if len(self.held) > most:
            self.held.pop(0).close()
        return 1

    def ports(self) -> list[int]:
        """Return the other ports at which somebody listens on this network; one elsewhere would try them all."""
        lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
        told = [line.split() for line in lines]
        found = {int(words[1].split(":")[1], 16) for words in told if words[3] == LISTENS}
        return [port for port in found if port > 1024 and port != self.port]


def text(value: bytes) -> str:
    return value.decode("latin-1")


# ---- what is done, once; each returns how much it did ----------------------------------------------------------------


def _speak(port: int, said: bytes) -> int:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1) as connection:
        connection.sendall(said)
        return 1
    return 0


def garbage(target: Target) -> int:
    """Say what no client says, or what a client says and then something else."""
    dice, length = target.dice, struct.pack("<Q", target.dice.choice((0, 5, 8192, 1 << 20, 1 << 40, (1 << 64) - 1)))
    said = bytes([dice.randrange(20)]) + length + dice.randbytes(dice.randrange(300))
    return _speak(target.port, dice.choice((b"", MAGIC)) + said)


def idle(target: Target) -> int:
    """Hold 500 connections, and say nothing."""
    return target.hold(target.port, most=500)


def flood(target: Target) -> int:
    """Connect and hang up, a hundred times."""
    return sum(_speak(target.port, b"") for _ in range(100))


def overwrite(target: Target) -> int:
    """Write over every key."""
    keys = target.every_key()
    for key in keys:
        target.read(key)
        target.client.set(key, text(target.junk(key)))
    return len(keys)


def delete(target: Target) -> int:
    """Delete every key."""
    return sum(bool(target.client.delete_key(key)) for key in target.every_key())


def append(target: Target) -> int:
    """Add lines to every key."""
    keys = target.every_key()
    for key in keys:
        target.client.append(key, "\n" + text(target.junk(key)) + "\n")
    return len(keys)


def compare_set(target: Target) -> int:
    """Take the place of what stands there, as workers do."""
    keys = target.every_key()
    for key in keys:
        target.client.compare_set(key, text(target.read(key)), text(target.junk(key)))
    return len(keys)


def replay(target: Target) -> int:
    """Write again, in its place, what has stood there before."""
    keys = target.every_key()
    for key in keys:
        target.read(key)
        if kept := target.seen.get(key):
            target.client.set(key, text(target.dice.choice(kept)))
    return len(keys)


def far(target: Target) -> int:
    """Say that the others are far ahead, or have finished, signed as somebody would who does not know the secret."""
    spaces = {"/".join(key.split("/")[:3]) for key in target.client.list_keys() if key.count("/") > 2}
    for space in spaces:
        below = dist.PrefixStore(space, target.client)
        for secret in ("a guess", None):
            forged = SignedStore(below, Signer("job", secret=secret))
            forged.set("latest", LATEST.format(at=time.time()))
            forged.set("finished", "")
            forged.append("round/1000000.0.0/arrivals", "{}")
    return 6 * len(spaces)


def huge(target: Target) -> int:
    """Put 4 MB under a key; the next time under another one."""
    keys = [key for key in target.every_key() if "/round/" not in key]
    target.client.set(target.dice.choice(keys), "x" * (4 << 20))
    return 1


def add(target: Target) -> int:
    """Count what is no number: the store hangs up."""
    for key in target.every_key():
        try:
            target.client.add(key, 1)
        except RuntimeError:
            target.give_up()
    return 1


def neighbours(target: Target) -> int:
    """Speak to every other port: the life lines of workers, and those at which Gloo listens."""
    return sum(_speak(port, target.dice.randbytes(64)) for port in target.ports())


def lines(target: Target) -> int:
    """Hold connections to every other port, and say nothing."""
    return sum(target.hold(port, most=1500) for port in target.ports())


def abstract(target: Target) -> int:
    """Call at every abstract socket of the run."""
    names = {line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines() if "@cadenza-" in line}
    for name in names:
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.connect("\0" + name[1:])
            connection.sendall(b"?" * 64)
    return len(names)


def guess(target: Target) -> int:
    """Try to enter a private store: with a proof of one's own, with the server's words, with frames alone."""
    dice = target.dice
    with suppress(OSError):
        if (connection := greet("127.0.0.1", target.port, timeout_s=1)) is None:
            return 0
        with connection:
            theirs = connection.recv(NONCE_BYTES, socket.MSG_WAITALL)
            key = key_of("a guess")
            forged = Frames(key, theirs, theirs, serves=False).pack([b"keys", b""])
            guessed = proof(key, theirs, theirs, of_server=False)
            connection.sendall(dice.choice((theirs + guessed + forged, theirs + theirs, forged, theirs + bytes(16))))
            return 1
    return 0


def linger(target: Target) -> int:
    """Hold 1,000 connections that have been greeted, and answer nothing."""
    with suppress(OSError):
        connection = greet("127.0.0.1", target.port, timeout_s=1)
        if connection is not None:
            target.held.append(connection)
            if len(target.held) > 1000:
                target.held.pop(0).close()
            return 1
    return 0


Attack = Callable[[Target], int]
ATTACKS: dict[str, tuple[Attack, float]] = {  # with the pause after each time, in seconds
    "garbage": (garbage, 0.002),
    "idle connections": (idle, 0.002),
    "guesses of the secret": (guess, 0.002),
    "greeted, and silent": (linger, 0.002),
    "flood of connections": (flood, 0.05),
    "overwrite": (overwrite, 0.2),
    "delete": (delete, 0.2),
    "append": (append, 0.2),
    "compare and set": (compare_set, 0.2),
    "replay": (replay, 0.2),
    "far step, finished": (far, 0.05),
    "huge values": (huge, 1.0),
    "add": (add, 0.2),
    "other ports": (neighbours, 0.05),
    "other ports, idle": (lines, 0.05),
    "abstract sockets": (abstract, 0.05),
}


def attack(kind: str, target: Target, until: float) -> int:
    """Do one thing again and again; return how often."""
    act, pause_s = ATTACKS[kind]
    done = 0
    while time.time() < until:
        try:
            done += act(target)
        except RuntimeError:  # the store has hung up
            target.give_up()
        time.sleep(pause_s)
    return done


def turns(kinds: list[str], seconds: float, turn_s: float) -> Iterator[list[str]]:
    """Yield what is done in each turn: one thing after the other, then all at once."""
    until = time.time() + seconds
    for turn in cycle([*([kind] for kind in kinds), kinds]):
        if time.time() + turn_s > until:
            return
        yield turn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--kinds", nargs="+", choices=list(ATTACKS), default=list(ATTACKS))
    parser.add_argument("--turn-s", type=float, default=8.0)
    parser.add_argument("--pause-s", type=float, default=4.0)
    given = parser.parse_args()
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    for kinds in turns(given.kinds, given.seconds, given.turn_s):
        began, done = time.time(), {}
        until = began + given.turn_s

        def run(kind: str, until: float = until, done: dict[str, int] = done) -> None:
            target = Target(given.port, seed=len(kind))
            done[kind] = attack(kind, target, until)

        threads = [threading.Thread(target=run, args=(kind,), daemon=True) for kind in kinds]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(given.turn_s + 10)
        name = kinds[0] if len(kinds) == 1 else "all at once"
        print(json.dumps({"kind": name, "from": began, "until": time.time(), "done": sum(done.values())}), flush=True)
        time.sleep(given.pause_s)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()

"""Messages between the ranks of one replica: what the first finds out is told to all, and all go on or none does.

The ranks are connected in a star, from the first to each of its mates, by sockets of their own. So nobody waits for a
rank that has ended, and waiting for the first, which may wait for other workers, has no time-out. What is sent is JSON;
nothing is unpickled.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from cadenza.errors import CadenzaError, ReplicaBrokenError

__all__ = ["Channel", "broken"]

T = TypeVar("T")

_SIZE = struct.Struct("<Q")
_LONGEST = 256 << 20  # bytes of a message


def broken() -> ReplicaBrokenError:
    """Return what the ranks of a replica raise that has lost one of them."""
    return ReplicaBrokenError(
        "Another rank of this replica has ended, or does not answer any more, so this one cannot go on. End this "
        "process, as torchrun does, and start all ranks of the replica again: they take the state of the other "
        "workers, each from the rank in its own place there."
    )


class Channel:
    """A way for the ranks of a replica to speak in turn; all of them make the same calls, in one order.

    Args:
        rank: This one's place in the replica.
        links: From rank 0 to each of the others, in their order; from another one to rank 0. None for a rank alone.

    Attributes:
        failed: Whether one of the ranks has said, since `begin`, that it cannot go on: all of them know.

    >>> alone = Channel()
    >>> alone.tell(lambda: 7), alone.exchange("a"), alone.any(False)
    (7, ['a'], False)
    """

    def __init__(self, rank: int = 0, links: Sequence[socket.socket] = ()) -> None:
        self._rank, self._links = rank, list(links)
        self.failed = False

    def begin(self) -> None:
        """Begin something in which each rank may say, at its next word, that it cannot go on."""
        self.failed = False

    def tell(
        self, find: Callable[[], T], pack: Callable[[T], str] = json.dumps, unpack: Callable[[str], T] = json.loads
    ) -> T:
        """Return what the first rank finds, on all ranks, or raise what it raises."""
        if not self._links:
            return find()
        if self._rank:
            return unpack(_word(self._hear(self._links[0])))
        try:
            found = find()
        except CadenzaError as error:
            self._say(_pack_error(error))
            raise
        except BaseException:
            self.close()
            raise
        self._say(json.dumps({"word": pack(found)}))
        return found

    def agree(self, work: Callable[[], T]) -> T:
        """Return what this rank's work gives, if it succeeds on all ranks; else all raise."""
        if not self._links:
            return work()
        try:
            found = work()
        except ReplicaBrokenError:
            raise
        except CadenzaError as error:
            self.fail(error)
            raise
        except BaseException:
            self.close()
            raise
        self.exchange("")
        return found

    def exchange(self, word: str) -> list[str]:
        """Return what each rank says, in their order; raise if one of them says that it cannot go on."""
        if not self._links:
            return [word]
        return [_word(said) for said in self._gather(json.dumps({"word": word}))]

    def fail(self, error: CadenzaError) -> None:
        """Say that this rank cannot go on, where the others say something else."""
        if self._links:
            self._gather(_pack_error(error))

    def any(self, flag: bool) -> bool:
        """Tell whether something holds on one of the ranks."""
        return "yes" in self.exchange("yes" if flag else "no")

    def hang_up(self) -> None:
        """Say and hear nothing more but what was said already; a thread that waits for a word wakes up."""
        for link in self._links:
            with suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connections: whoever waits for this rank raises."""
        self.hang_up()
        for link in self._links:
            link.close()

    def _gather(self, mine: str) -> list[str]:
        if self._rank:
            self._say(mine)
            said: list[str] = json.loads(self._hear(self._links[0]))
        else:
            said = [mine, *(self._hear(link) for link in self._links)]
            self._say(json.dumps(said))
        self.failed = self.failed or any("error" in json.loads(one) for one in said)
        return said

    def _say(self, text: str) -> None:
        data = text.encode()
        try:
            for link in self._links:
                link.sendall(_SIZE.pack(len(data)) + data)
        except OSError:
            self._break()

    def _hear(self, link: socket.socket) -> str:
        [size] = _SIZE.unpack(self._read(link, _SIZE.size))
        return self._read(link, size).decode()

    def _read(self, link: socket.socket, size: int) -> bytes:
        data = bytearray()
        with suppress(OSError):
            while len(data) < size <= _LONGEST and (part := link.recv(min(size - len(data), 1 << 20))):
                data += part
        if len(data) < size:
            self._break()
        return bytes(data)

    def _break(self) -> None:
        self.close()  # so that all others know too
        raise broken() from None  # what this rank was about meanwhile does not matter any more


def _word(said: str) -> str:
    told = json.loads(said)
    if "error" in told:
        raise _unpack_error(told)
    return str(told["word"])


def _pack_error(error: CadenzaError) -> str:
    facts = {key: value for key, value in vars(error).items() if not key.startswith("_")}
    facts.pop("__notes__", None)
    return json.dumps({"error": type(error).__name__, "text": str(error), "facts": facts}, default=sorted)


def _unpack_error(told: dict[str, Any]) -> CadenzaError:
    """Return the error that another rank has raised, of its class and with its attributes."""
    kind = next((kind for kind in _kinds(CadenzaError) if kind.__name__ == told["error"]), CadenzaError)
    error = kind.__new__(kind)
    CadenzaError.__init__(error, told["text"])  # some classes make the text of other arguments
    for name, value in told["facts"].items():
        setattr(error, name, tuple(value) if isinstance(value, list) else value)
    return error


def _kinds(kind: type[CadenzaError]) -> Iterator[type[CadenzaError]]:
    yield kind
    for below in kind.__subclasses__():
        yield from _kinds(below)

"""How the doctor's ranks find each other and talk: notes in torch's key-value store, before any process group exists.

Rank 0 gives orders and collects answers; the others wait for orders. Everything has a time-out, so a rank that never
comes, or goes away, is named and does not leave the others hanging.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import IO, Any, TypeVar

import torch.distributed as dist

from cadenza.cli.doctor.network import answers
from cadenza.cli.doctor.place import Place, reaching
from cadenza.errors import TransportError

__all__ = ["Coordinator", "muted", "open_store", "serve"]

Order = Mapping[str, Any]
Perform = Callable[[Order], Any]
T = TypeVar("T")


@contextlib.contextmanager
def muted() -> Iterator[IO[str]]:
    """Keep what torch's C++ parts write about failures off the screen; the report says it in words.

    Yields what standard error was, for progress.
    """
    sys.stderr.flush()
    with os.fdopen(os.dup(2), "w") as before, open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
        try:
            yield before
        finally:
            before.flush()
            os.dup2(before.fileno(), 2)


def open_store(place: Place, timeout_s: float) -> dist.Store:
    """Return the store that all ranks share.

    Raises:
        TransportError: It cannot be opened or reached in time; says what to look at.
    """
    hosting = place.rank == 0 and not place.agent
    if not hosting:
        _wait_for_store(place, timeout_s)
    # The one who hosts it needs no way through the network to it; whether others have one is looked at later.
    address = "127.0.0.1" if hosting else place.master
    found = _in_time(lambda: _store(address, place.port, hosting, timeout_s), timeout_s)
    if isinstance(found, dist.Store):
        return dist.PrefixStore(f"cadenza {place.attempt}", found)
    why = "no answer" if found is None else _first_line(found)
    if hosting and "EADDRINUSE" in why:
        raise TransportError(
            f"Rank 0 cannot open its store: MASTER_PORT={place.port} is in use by another program. Give another one to "
            "all ranks (MASTER_PORT, or torchrun --master-port), or end that program."
        )
    if hosting:
        raise TransportError(f"Rank 0 cannot open its store at MASTER_PORT={place.port}: {why}.")
    raise TransportError(
        f"Rank {place.rank} reached {place.master}:{place.port}, but no store of torch answers there: {why}. Does "
        "another program use MASTER_PORT?"
    )


def _store(address: str, port: int, hosting: bool, timeout_s: float) -> dist.Store | Exception:
    timeout = timedelta(seconds=timeout_s)
    try:
        return dist.TCPStore(address, port, is_master=hosting, wait_for_workers=False, timeout=timeout)
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        return error


def _in_time(action: Callable[[], T], timeout_s: float) -> T | None:
    """Return the action's result, or None if it takes too long: torch waits without end for what is no store."""
    results: list[T] = []
    thread = threading.Thread(target=lambda: results.append(action()), daemon=True)
    thread.start()
    thread.join(timeout_s)
    return results[0] if results else None


def _wait_for_store(place: Place, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while (trouble := answers(place.master, place.port, timeout_s=min(3, timeout_s))) is not None:
        if time.monotonic() > deadline:
            raise TransportError(
                f"Rank {place.rank} cannot reach rank 0's store at MASTER_ADDR={place.master}, "
                f"MASTER_PORT={place.port} ({trouble}, tried for {timeout_s:g} s). If rank 0 is running: "
                f"{reaching(place)}."
            )
        time.sleep(0.2)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0].rstrip(".")


class Coordinator:
    """Rank 0's side: it gives orders, does its own part, and collects answers."""

    def __init__(self, store: dist.Store, place: Place, perform: Perform) -> None:
        self._store = store
        self._place = place
        self._perform = perform
        self._given = dict.fromkeys(range(place.ranks), 0)

    def collect_cards(self, card: Any, timeout_s: float) -> dict[int, Any]:
        """Return the cards of the ranks that are there in time."""
        others = {rank: f"card/{rank}" for rank in range(1, self._place.ranks)}
        return {0: card, **self._collect(others, timeout_s)}

    def order(self, orders: Mapping[int, Order], timeout_s: float) -> dict[int, Any]:
        """Give every named rank its order; return the answers of those that answered in time."""
        keys = {}
        for rank, order in orders.items():
            if rank:
                self._store.set(f"order/{rank}/{self._given[rank]}", json.dumps(order))
                keys[rank] = f"answer/{rank}/{self._given[rank]}"
                self._given[rank] += 1
        answers = {0: _performed(self._perform, orders[0])} if 0 in orders else {}
        return answers | self._collect(keys, timeout_s)

    def _collect(self, keys: Mapping[int, str], timeout_s: float) -> dict[int, Any]:
        deadline = time.monotonic() + timeout_s
        found: dict[int, Any] = {}
        while len(found) < len(keys):
            for rank in keys.keys() - found.keys():
                if self._store.check([keys[rank]]):
                    found[rank] = json.loads(self._store.get(keys[rank]))
            if time.monotonic() > deadline:
                break
            if len(found) < len(keys):
                time.sleep(0.005)
        return dict(sorted(found.items()))


def serve(store: dist.Store, place: Place, card: Any, perform: Perform, timeout_s: float) -> int:
    """Do what rank 0 orders until it says how all are to exit, and return that.

    Raises:
        TransportError: Rank 0 has fallen silent.
    """
    number = 0
    try:
        store.set(f"card/{place.rank}", json.dumps(card))
        while True:
            store.wait([f"order/{place.rank}/{number}"], timedelta(seconds=timeout_s))
            order = json.loads(store.get(f"order/{place.rank}/{number}"))
            answer = _performed(perform, order)
            store.set(f"answer/{place.rank}/{number}", json.dumps(answer))
            number += 1
            if "exit" in order:
                return int(order["exit"])
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        raise TransportError(
            f"Rank {place.rank} has heard nothing from rank 0 any more ({_first_line(error)}). See what rank 0 wrote."
        ) from error


def _performed(perform: Perform, order: Order) -> Any:
    """Return what came of an order, or the failure that it ended in, which is for rank 0 to judge."""
    try:
        return perform(order)
    except (RuntimeError, OSError) as error:
        return {"failed": _first_line(error)}

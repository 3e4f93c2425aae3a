"""What elastic workers ask of their store, by their number: operations and bytes, and how long it takes to agree.

Workers are threads with a membership each, and hold rounds without values: they come, agree on who is there, vote and
commit. Beats are counted apart, in a pause. Everything is counted at the clients.

    python -m lab.store_load --workers 2 4 8 16 32 64
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import torch.distributed as dist

import cadenza
from cadenza.participants.elastic import ElasticParticipants
from cadenza.participants.group_keeper import GroupKeeper
from cadenza.participants.membership import join
from cadenza.participants.roster import group_name
from cadenza.participants.round_id import RoundId
from cadenza.participants.signed_store import SignedStore
from cadenza.participants.store import StoreConnection, serve

RESULTS = Path(__file__).parent / "results" / "store_load.json"
ROUNDS, PAUSE_S = 10, 4.0


class Counting(dist.Store):
    """Counts what is asked of the store below it."""

    told: ClassVar[Counter[str]] = Counter()

    def __init__(self, below: dist.Store) -> None:
        super().__init__()
        self._below = below

    def _counted(self, name: str, *arguments: Any) -> Any:
        found = getattr(self._below, name)(*arguments)
        told = found if isinstance(found, list) else [found]
        Counting.told["operations"] += 1
        Counting.told["keys"] += len(arguments[0]) if isinstance(arguments[0], list) else 1
        Counting.told["bytes"] += sum(len(value) for value in (*told, *arguments) if isinstance(value, bytes | str))
        return found

    def set(self, *arguments: Any) -> Any:
        return self._counted("set", *arguments)

    def append(self, *arguments: Any) -> Any:
        return self._counted("append", *arguments)

    def check(self, *arguments: Any) -> Any:
        return self._counted("check", *arguments)

    def multi_get(self, *arguments: Any) -> Any:
        return self._counted("multi_get", *arguments)

    def compare_set(self, *arguments: Any) -> Any:
        return self._counted("compare_set", *arguments)

    def delete_key(self, *arguments: Any) -> Any:
        return self._counted("delete_key", *arguments)


class _Nothing:
    """A state with nothing in it."""

    def refit(self, level: int) -> None:
        """There is nothing to fit."""

    def adopt(self, *_: Any, **__: Any) -> None:
        """There is nothing to take."""


class Crowd:
    """Workers that hold rounds at once."""

    def __init__(self, workers: int, port: int) -> None:
        policy, plan = cadenza.shrink(grace_s=120.0, first_s=240.0), cadenza.diloco(period=1).levels[0]
        self.memberships = [
            join(f"127.0.0.1:{port}", worker=w, workers=workers, job=f"of {workers}", lease_s=2.0, wait_s=120.0)
            for w in range(workers)
        ]
        self.participants = [ElasticParticipants(one, policy, [plan], "the same") for one in self.memberships]
        self.times: list[float] = []

    def start(self) -> None:
        self._each(lambda one: one.start(_Nothing()))

    def round(self, step: int) -> None:
        def hold(one: ElasticParticipants) -> None:
            began = time.perf_counter()
            admitted = one.admit(RoundId(step), "", settled=False)
            assert one.catch_up(_Nothing()) is None, admitted  # type: ignore[arg-type]
            assert one.agree(RoundId(step), lambda: "well") == "well"
            one.commit(RoundId(step), 0.0)
            self.times.append(time.perf_counter() - began)

        self._each(hold)

    def close(self) -> None:
        self._each(lambda one: one.close())

    def _each(self, act: Any) -> None:
        threads = [threading.Thread(target=act, args=(one,), daemon=True) for one in self.participants]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def measure(workers: int, port: int) -> dict[str, float]:
    """Return what so many workers ask for, each of them."""
    crowd = Crowd(workers, port)
    crowd.start()
    crowd.round(1)
    crowd.times.clear()
    time.sleep(1.0)
    idle, began = Counter(Counting.told), time.monotonic()
    time.sleep(PAUSE_S)
    beats = Counting.told - idle
    beating_s = time.monotonic() - began
    before, began = Counter(Counting.told), time.monotonic()
    for step in range(2, 2 + ROUNDS):
        crowd.round(step)
    rounds, rounds_s = Counting.told - before, time.monotonic() - began
    crowd.close()
    result: dict[str, float] = {"workers": workers, "agree_s": round(statistics.median(crowd.times), 4)}
    for name in ("operations", "keys", "bytes"):
        rate = beats[name] / beating_s
        result[f"beat_{name}_a_second"] = round(rate / workers, 1)
        result[f"round_{name}"] = round((rounds[name] - rate * rounds_s) / ROUNDS / workers, 1)
    return result


def _opened(original: Any) -> Any:
    def open_counted(connection: StoreConnection) -> SignedStore:
        store: SignedStore = original(connection)
        store.below = Counting(store.below)
        return store

    return open_counted


def _told(_: Any, __: Any, ___: int, facts: dict[str, Any], **____: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    return {**facts, "state": {}}, {}


def _names(members: tuple[int, ...]) -> tuple[str, ...]:
    return (group_name("the last", members),) if members else ()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4, 8, 16, 32, 64])
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args(arguments)
    store = serve(host="127.0.0.1")
    with contextlib.ExitStack() as patches:
        for what, name, stands_for in (
            (StoreConnection, "_open", _opened(getattr(StoreConnection, "_open"))),  # noqa: B009
            (GroupKeeper, "form", lambda self, roster, *_, **__: vars(self).update(formed=roster.members)),
            (GroupKeeper, "names", lambda self: _names(getattr(self, "formed", ()))),
            (GroupKeeper, "among_concerned", lambda *_, **__: None),
        ):
            patches.enter_context(mock.patch.object(what, name, stands_for))
        told = mock.patch("cadenza.participants.circle.transfer_state", _told)
        patches.enter_context(told)
        results = []
        for workers in given.workers:
            results.append(measure(workers, store.port))
            print(results[-1], flush=True)
    given.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()

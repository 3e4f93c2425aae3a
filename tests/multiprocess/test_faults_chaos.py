"""Kills at random phases, stops, poison and returns, from a seed: nobody hangs, and all agree to the bit."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import cadenza
from cadenza.participants.signing import Signer
from cadenza.participants.store import StoreConnection, serve
from support.faults import LEASE_S, PHASES, QUICK, arm, kill, stop_for, train
from support.ranks import RankPool

PERIOD, STEPS, WORKERS = 5, 240, 4
STRUCK = 120  # until then; whoever takes a dead worker's place must find the others
Plan = dict[int, dict[int, Callable[[Any], None]]]


def poison(sync: Any) -> None:
    with torch.no_grad():
        next(iter(sync.replica.view.parameters().values())).fill_(float("nan"))


def plan(seed: int) -> tuple[Plan, list[int]]:
    """What happens to each worker at which steps, and who dies: at most one worker is in trouble at a time."""
    dice = random.Random(seed)
    acts: Plan = {worker: {} for worker in range(WORKERS)}
    alive, dead = list(range(WORKERS)), []
    for step in range(2 * PERIOD, STRUCK, 4 * PERIOD):
        what, worker = dice.choice(("kill", "stop", "poison")), dice.choice(alive)
        if what == "kill" and len(dead) < 2:
            acts[worker][step] = arm(dice.choice(PHASES))
            acts[worker][step + 2 * PERIOD] = kill  # if that round was another one's, with a group made anew
            dead.append(worker)
            alive.remove(worker)  # the one that takes its place has no plan
        elif what == "stop":
            acts[worker][step - dice.randrange(3)] = stop_for(dice.uniform(0.2, 1.5))
        else:
            acts[worker][step - dice.randrange(3)] = poison
    return acts, dead


def wait_for_death(port: int, worker: int) -> None:
    """Return when a worker's heart-beat has stopped."""
    line = StoreConnection(f"127.0.0.1:{port}", Signer("job", secret=None))
    value, since = b"", time.monotonic()
    while not value or time.monotonic() - since < 2 * LEASE_S:
        time.sleep(0.05)
        seen = line.call(lambda store: store.get(f"beat/{worker}") if store.check([f"beat/{worker}"]) else b"")
        if seen != value:
            value, since = seen, time.monotonic()
    line.close()


def take_part(port: int, seed: int, name: str) -> Any:
    rank = int(os.environ["RANK"])
    acts, dead = plan(seed)
    faults = cadenza.shrink(**QUICK)
    feedback = cadenza.codecs.error_feedback(cadenza.codecs.int8())
    strategy = {
        "mean": lambda: cadenza.local_sgd(PERIOD, faults=faults),
        "feedback": lambda: cadenza.diloco(PERIOD, outer_lr=0.5, codec=feedback, faults=faults),
        "streaming": lambda: cadenza.streaming_diloco(PERIOD, layers=1, delay=2, faults=faults),
    }[name]()
    if rank < WORKERS:
        return train(port, WORKERS, strategy, STEPS, at=acts[rank], step_s=0.03)
    worker = dead[rank - WORKERS]
    wait_for_death(port, worker)
    return train(port, WORKERS, strategy, STEPS, worker=worker, step_s=0.03)


@pytest.mark.parametrize(("seed", "name"), [(1, "mean"), (4, "feedback"), (7, "streaming")])
def test_whatever_happens_all_agree_at_the_end(ranks: RankPool, seed: int, name: str) -> None:
    store = serve(host="127.0.0.1")
    _, dead = plan(seed)
    assert dead, "a seed with a death in it"
    results = ranks.run(
        WORKERS + len(dead), take_part, store.port, seed, name, init=False, expect_dead=set(dead), discard=True
    )
    survivors = [result for result in results if result is not None]
    assert len(survivors) == WORKERS
    assert all(torch.equal(survivors[0]["values"], other["values"]) for other in survivors)
    assert survivors[0]["values"].isfinite().all()
    assert all(result["clock"] == STEPS for result in survivors)
    assert survivors[0]["participants"][-1] == tuple(range(WORKERS))

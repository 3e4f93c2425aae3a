"""Workers that die, hang, come late and come back while the others train on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import cadenza
from cadenza.membership.store import serve
from support.faults import QUICK, kill, train
from support.ranks import RankPool


@pytest.fixture
def store() -> Iterator[int]:
    """The port of a store that outlives the workers."""
    server = serve(host="127.0.0.1")
    yield server.port
    del server


def doomed(port: int, step: int, steps: int) -> dict[str, Any]:
    strategy = cadenza.diloco(period=5, outer_lr=0.5, faults=cadenza.shrink(**QUICK))
    at = {step: kill} if os.environ["RANK"] == "1" else None
    return train(port, 3, strategy, steps, at=at, step_s=0.02)


def test_the_others_go_on_when_a_worker_is_killed(ranks: RankPool, store: int) -> None:
    results = ranks.run(3, doomed, store, 18, 40, init=False, expect_dead={1})
    first, last = results[0], results[2]
    assert first["taken"] == last["taken"] == 40
    assert torch.equal(first["values"], last["values"])
    assert first["participants"][0] == (0, 1, 2)
    assert first["participants"][-1] == (0, 2)
    assert first["rounds"] == last["rounds"]

"""What rounds and groups leave is freed at once: beside torch's objects Python's collector may not come for hours."""

from __future__ import annotations

import copy
import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch

import cadenza
from cadenza.testing import Worker, workers
from cadenza.transports.faulty import FaultyTransport


@contextmanager
def garbage() -> Iterator[Counter[str]]:
    """Count by type, of tensors and of Cadenza's objects, what becomes garbage that only the collector can free."""
    found = Counter[str]()
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield found
        gc.collect()
        kinds = [type(thing) for thing in gc.garbage]
        found.update(
            kind.__name__ for kind in kinds if kind is torch.Tensor or kind.__module__.partition(".")[0] == "cadenza"
        )
    finally:
        gc.set_debug(0)
        gc.garbage.clear()


def train(worker: Worker, start: torch.nn.Module) -> tuple[int, Counter[str]]:
    model = copy.deepcopy(start)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    strategy = cadenza.diloco(period=1, codec=cadenza.codecs.int8(), faults=cadenza.shrink(grace_s=20.0, first_s=60.0))
    told: list[cadenza.RoundReport] = []
    sync = cadenza.attach(
        model, optimizer, strategy, membership=worker.membership(lease_s=5.0), observers=[told.append]
    )

    def take_steps(count: int) -> None:
        """Hold rounds, of which the second one fails, so that the group is made anew."""
        for step in range(count):
            model(torch.randn(1, 2, generator=worker.generator)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            level = sync.replica.participants.levels[-1]
            if worker.rank and step == 1:
                level.transport = FaultyTransport(level.transport, fail_at="exchange")
            sync.step()

    take_steps(4)  # whatever is made once is made
    if worker.rank:
        take_steps(6)
        found = Counter[str]()
    else:
        with garbage() as found:
            take_steps(6)
    sync.finish()
    return sum(report.kind == "failed" for report in told), found


def test_rounds_and_a_group_made_anew_leave_nothing_for_the_collector() -> None:
    with workers(2, timeout_s=120.0) as pool:
        (failed, found), _ = pool.run(train, torch.nn.Linear(2, 1))
    assert failed >= 2
    assert not found

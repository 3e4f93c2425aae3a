"""A worker's place in a job: it is taken once, by one synchronizer."""

from __future__ import annotations

import pytest
import torch

import cadenza
from cadenza.errors import NotInitializedError
from cadenza.testing import Worker, workers


def attach_again(worker: Worker) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    strategy, membership = cadenza.diloco(2, faults=cadenza.shrink()), worker.membership()
    cadenza.attach(model, optimizer, strategy, membership=membership).close()
    with pytest.raises(NotInitializedError, match=r"membership has ended.*cadenza\.join"):
        cadenza.attach(model, optimizer, strategy, membership=membership)


def test_a_membership_that_has_ended_is_refused_and_nobody_is_waited_for() -> None:
    with workers(1) as pool:
        pool.run(attach_again)

"""A state that arrives damaged is not taken, whichever part of it is: the round fails, and the next one is held."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

import cadenza
from cadenza.participants.generation import Generation
from cadenza.testing import Worker, workers


def train(worker: Worker) -> tuple[list[int], torch.Tensor, int]:
    """Train 10 steps; return the rounds, the weight, and how many rounds were held when training began."""
    torch.manual_seed(worker.rank)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    strategy = cadenza.diloco(period=5, faults=cadenza.shrink(grace_s=10.0, first_s=30.0))
    told: list[cadenza.RoundReport] = []
    sync = cadenza.attach(model, optimizer, strategy, membership=worker.membership(), observers=[told.append])
    held = sync.replica.participants.held
    while sync.clock < 10:
        model(torch.randn(4, 2, generator=worker.generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        sync.step()
    sync.finish()
    return [report.step for report in told if report.kind == "round"], model.weight.detach().clone(), held


def a_digit(data: torch.Tensor) -> None:
    """Another number in what is told of the state."""
    place = next(i for i, byte in enumerate(data.tolist()) if byte in b"0123456789")
    data[place] ^= 1


def a_brace(data: torch.Tensor) -> None:
    """What cannot be read any more."""
    data[0] ^= 1


def no_text(data: torch.Tensor) -> None:
    """What is no text any more."""
    data[:4] = 255


@pytest.mark.parametrize("spoil", [a_digit, a_brace, no_text])
def test_what_is_told_of_a_state_arrives_whole_or_is_not_taken(
    monkeypatch: pytest.MonkeyPatch, spoil: Callable[[torch.Tensor], None]
) -> None:
    broadcast, lock, spoiled = Generation.broadcast, threading.Lock(), list[int]()

    def damaging(generation: Generation, tensor: torch.Tensor, *, source: int) -> None:
        broadcast(generation, tensor, source=source)
        with lock:
            if tensor.dtype == torch.uint8 and generation.members[generation.position] != source and not spoiled:
                spoiled.append(generation.position)
                spoil(tensor)

    monkeypatch.setattr(Generation, "broadcast", damaging)
    with workers(3, timeout_s=60.0) as pool:
        found = pool.run(train)
    assert spoiled
    assert [rounds for rounds, _, _ in found] == [[5, 10]] * 3
    assert [held for _, _, held in found] == [0] * 3, "and no number of it is another one"
    assert all(torch.equal(found[0][1], weight) for _, weight, _ in found)

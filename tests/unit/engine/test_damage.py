"""Bytes that are damaged on their way, and means that cannot be right, are found before anybody votes for them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import cadenza
from cadenza.testing import Worker, workers
from cadenza.transports.base import Above, Lane, Transport
from cadenza.weighting import PlainContribution, outliers


class DamagingLane:
    """Does what the lane below it does, and damages one byte of what it receives from the others."""

    def __init__(self, below: Lane, way: str, due: Callable[[], bool]) -> None:
        self._below, self._way, self._due = below, way, due

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._below, name)
        if name != self._way:
            return found

        def damaged() -> Any:
            received = found()
            if not self._due():
                return received
            if isinstance(received, torch.Tensor):
                received.view(torch.uint8).reshape(-1)[3::4] |= 0x60
                return received
            messages = [message.clone() for message in received]
            messages[0].reshape(-1)[5] ^= 0x04
            return messages

        return damaged


class Damaging(Above):
    """A transport that damages what the first worker receives in the first round, once."""

    def __init__(self, below: Transport, way: str, wanted: list[bool]) -> None:
        super().__init__(below)
        self._way, self._wanted = way, wanted

    def lanes(self, device: torch.device) -> list[Lane]:
        def due() -> bool:
            return bool(self._wanted and self._wanted.pop())

        return [DamagingLane(lane, self._way, due) for lane in self._below.lanes(device)]  # type: ignore[misc]


@pytest.fixture
def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Linear(64, 8)


def train(worker: Worker, model: torch.nn.Module, codec: Any, way: str) -> tuple[list[str], list[str], torch.Tensor]:
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    faults = cadenza.shrink(grace_s=20.0, first_s=60.0)
    told: list[cadenza.RoundReport] = []
    strategy = cadenza.diloco(period=2, outer_lr=0.5, codec=codec, faults=faults)
    membership = worker.membership(lease_s=2.0)
    sync = cadenza.attach(model, optimizer, strategy, membership=membership, observers=[told.append])
    level = sync.replica.participants.levels[0]
    for step in range(8):
        if worker.rank == 0 and step == 3:
            level.transport = Damaging(level.transport, way, [True])
        model(torch.randn(4, 64, generator=worker.generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        sync.step()
    sync.finish()
    return (
        [t.kind for t in told],
        [t.reason for t in told],
        torch.cat([p.detach().flatten() for p in model.parameters()]),
    )


@pytest.mark.parametrize(
    ("codec", "way"),
    [
        (cadenza.codecs.int8(), "scattered"),
        (cadenza.codecs.int8(), "gathered"),
        (cadenza.codecs.topk(0.1), "gathered"),
        (cadenza.codecs.error_feedback(cadenza.codecs.e3m0()), "scattered"),
        (cadenza.codecs.fp32(), "land"),
    ],
)
def test_a_damaged_round_is_not_committed_and_the_next_one_is(model: torch.nn.Module, codec: Any, way: str) -> None:
    with workers(3, timeout_s=120.0) as pool:
        found = pool.run(train, model, codec, way)
    for kinds, _, _ in found:
        assert kinds == ["round", "failed", "round", "round"]
    assert "damaged" in found[0][1][1]
    assert all(torch.equal(found[0][2], values) for _, _, values in found)


def stand_still(worker: Worker, model: torch.nn.Module, codec: Any) -> list[str]:
    """Train for a round, then learn nothing more, so that only what was lost before is left to be sent."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    strategy = cadenza.diloco(2, outer_lr=0.5, codec=codec, faults=cadenza.shrink(grace_s=20.0, first_s=60.0))
    told: list[cadenza.RoundReport] = []
    membership = worker.membership(lease_s=2.0)
    sync = cadenza.attach(model, optimizer, strategy, membership=membership, observers=[told.append])
    for step in range(8):
        model(torch.randn(4, 64, generator=worker.generator)).square().mean().backward()
        optimizer.param_groups[0]["lr"] = 0.01 if step < 2 else 0.0
        optimizer.step()
        optimizer.zero_grad()
        sync.step()
    sync.finish()
    return [f"{t.kind} {t.reason}".strip() for t in told]


@pytest.mark.parametrize("codec", [cadenza.codecs.e3m0(), cadenza.codecs.topk(0.1)], ids=["e3m0", "topk"])
def test_what_was_lost_before_is_no_damage_when_it_is_all_that_is_sent(model: torch.nn.Module, codec: Any) -> None:
    with workers(3, timeout_s=120.0) as pool:
        found = pool.run(stand_still, model, cadenza.codecs.error_feedback(codec))
    assert found == [["round"] * 4] * 3


def test_half_of_the_workers_cannot_pull_the_median() -> None:
    poisoned = [PlainContribution(norm2=norm2) for norm2 in (1.0, 1e6, 1.1, 1e6)]
    assert outliers().weigh(poisoned, {}).left_out == {1, 3}


def test_of_two_only_what_cannot_be_training_is_left_out() -> None:
    two = [PlainContribution(norm2=norm2) for norm2 in (1.0, 1e38)]
    assert outliers().weigh(two, {}).left_out == {1}


def spoil(worker: Worker, model: torch.nn.Module, what: str) -> tuple[list[str], torch.Tensor, float]:
    """Train, and damage in mid-run what a worker remembers; return the kinds of rounds, and the values."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    strategy = cadenza.diloco(period=2, outer_lr=0.5, faults=cadenza.shrink(grace_s=20.0, first_s=60.0))
    told: list[cadenza.RoundReport] = []
    membership = worker.membership(lease_s=2.0)
    sync = cadenza.attach(model, optimizer, strategy, membership=membership, observers=[told.append])
    for step in range(8):
        state = sync.replica.level_state(0, 0) if step == 3 else None
        if state is not None and what == "anchor" and worker.rank == 0:
            state.anchors[0].fill_(float("nan"))
        if state is not None and what == "outer state":
            for tensor in state.outer_states[0].values():
                tensor.fill_(3e38)
        model(torch.randn(4, 64, generator=worker.generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        sync.step()
    sync.finish()
    values = torch.cat([p.detach().flatten() for p in model.parameters()])
    return [t.kind for t in told], values, float(values.abs().max())


@pytest.mark.parametrize("what", ["anchor", "outer state"])
def test_a_damaged_anchor_neither_spreads_nor_stays(
    model: torch.nn.Module, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    with workers(3, timeout_s=120.0) as pool:
        found = pool.run(spoil, model, what)
    for kinds, values, largest in found:
        assert kinds == ["round"] * 4
        assert torch.equal(values, found[0][1])
        assert largest < 1
    assert what == "anchor" or "all go on from the anchor before it" in caplog.text

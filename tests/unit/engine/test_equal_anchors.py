"""Anchors that are not the same bits on all workers become so, whatever made them differ."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch

import cadenza
from cadenza import LevelPlan, Strategy, codecs, outer
from cadenza.checkpoint.folders import collect_part
from cadenza.common.checksums import checksum
from cadenza.testing import Worker, workers


@dataclass(frozen=True)
class RoundsItsOwnWay:
    """Nesterov's step on machines that round differently: each worker's bits are its own."""

    rank: int = field(metadata={"local": "which machine this is"})
    plain: ClassVar[bool] = False
    needs_inner_lr: ClassVar[bool] = False
    needs_own: ClassVar[bool] = False
    needs_anchor_mean: ClassVar[bool] = False
    diverges: ClassVar[bool] = False
    clip: ClassVar[float | None] = None

    def init(self, anchor: torch.Tensor) -> dict[str, torch.Tensor]:
        return outer.nesterov().init(anchor)

    def update(
        self, anchor: torch.Tensor, delta: torch.Tensor, state: dict[str, torch.Tensor], *, rounds: int, **told: Any
    ) -> None:
        outer.nesterov().update(anchor, delta, state, rounds=rounds)
        anchor.view(torch.int32)[:: 7 + self.rank] += self.rank


def strategy(rank: int, **options: Any) -> Strategy:
    return Strategy(levels=(LevelPlan(cadenza.every(2), outer=RoundsItsOwnWay(rank), **options),))


def train(worker: Worker, codec: codecs.Codec, steps: int) -> dict[str, Any]:
    model = torch.nn.Linear(30, 40)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = cadenza.attach(model, optimizer, strategy(worker.rank, codec=codec))
    prints = []
    for _ in range(steps):
        model(torch.randn(4, 30, generator=worker.generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        sync.step()
        prints.append(collect_part(model, [optimizer], sync, None).fingerprint)
    state = sync.replica.level_state(0, 0)
    held = [*state.anchors, *state.outer_states[0].values()]
    found = {"anchor": checksum(held[0]), "momentum": checksum(held[1]), "prints": prints}
    sync.finish()
    return {**found, "end": [parameter.detach().clone() for parameter in model.parameters()]}


@pytest.mark.parametrize("codec", [codecs.fp32(), codecs.int8()], ids=lambda codec: codec.name)
def test_a_round_begins_with_the_first_workers_anchor_where_they_differ(
    codec: codecs.Codec, caplog: pytest.LogCaptureFixture
) -> None:
    with workers(3) as pool, caplog.at_level(logging.WARNING, "cadenza"):
        found = pool.run(train, codec, 8)
    assert len({one["momentum"] for one in found}) == 1  # of four updates from equal anchors
    assert len({one["anchor"] for one in found}) == 3  # the last one's roundings are still there
    warnings = [record.getMessage() for record in caplog.records if "anchors" in record.getMessage()]
    assert len(warnings) == 3  # once for each worker, though it has happened in every round
    assert all(text.startswith("level 0, fragment 0: the workers' anchors were not the same") for text in warnings)


def test_all_workers_end_equal_though_the_last_outer_step_has_rounded_differently() -> None:
    with workers(3) as pool:
        first, *others = (one["end"] for one in pool.run(train, codecs.fp32(), 8))
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


def test_checkpoints_of_workers_whose_last_bits_differ_belong_together() -> None:
    with workers(3) as pool:
        first, *others = (one["prints"] for one in pool.run(train, codecs.fp32(), 6))
    assert all(first == other for other in others)
    assert len(set(first)) == 6


def test_runs_that_differ_in_one_contribution_have_other_fingerprints() -> None:
    def fingerprint(worker: Worker, moved: float) -> str:
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sync = cadenza.attach(model, optimizer, cadenza.diloco(1))
        model.weight.data += moved * worker.rank
        sync.step()
        return collect_part(model, [optimizer], sync, None).fingerprint

    with workers(2) as pool:
        assert len({*pool.run(fingerprint, 0.25), *pool.run(fingerprint, 0.25000003)}) == 2


def test_a_fingerprint_before_the_first_round_tells_runs_apart() -> None:
    def fingerprint(worker: Worker, start: float) -> str:
        model = torch.nn.Linear(3, 2)
        torch.nn.init.constant_(model.weight, start)
        torch.nn.init.zeros_(model.bias)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sync = cadenza.attach(model, optimizer, cadenza.diloco(8))
        sync.replica.fit_levels()
        return collect_part(model, [optimizer], sync, None).fingerprint

    with workers(2) as pool:
        assert len({*pool.run(fingerprint, 1.0), *pool.run(fingerprint, 2.0)}) == 2

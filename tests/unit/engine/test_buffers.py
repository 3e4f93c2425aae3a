"""Running statistics are averaged by default, wherever a model has them; other buffers only if asked for."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import cadenza
from cadenza import RoundReport, Strategy
from cadenza.engine.header import HEADER_BYTES
from cadenza.faults import shrink
from cadenza.testing import Worker, workers


class Centred(nn.Module):
    """A norm of one's own, with running statistics as BatchNorm has them, and one buffer that is none."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(width))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.running_mean.lerp_(x.detach().mean(0), 0.5)
            self.seen += 1
        return x - self.running_mean


class Net(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.fc1, self.norm, self.fc2 = nn.Linear(3, 4), norm, nn.Linear(4, 1)
        self.register_buffer("table", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.fc2(self.norm(self.fc1(x)))
        return out


NORMS: dict[str, nn.Module] = {
    "BatchNorm": nn.BatchNorm1d(4),
    "one's own": Centred(4),
    "none": nn.LayerNorm(4),
    "BatchNorm without statistics": nn.BatchNorm1d(4, track_running_stats=False),
}


def train(worker: Worker, strategy: Strategy, start: nn.Module, steps: int, **options: Any) -> dict[str, Any]:
    """Train on data that differ from worker to worker; return the buffers before and after `finish()`, and more."""
    model, reports = copy.deepcopy(start), list[RoundReport]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = cadenza.attach(model, optimizer, strategy, observers=[reports.append], **options)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 3, generator=worker.generator) + worker.rank).square().mean().backward()
        sync.average_gradients()
        optimizer.step()
        sync.step()
    model.table.fill_(float(worker.rank))  # type: ignore[operator]
    before = copy.deepcopy(dict(model.named_buffers()))
    sync.finish()
    return {
        "before": before,
        "after": dict(model.named_buffers()),
        "parameters": [p.detach() for p in model.parameters()],
        "bytes": sum(report.bytes_sent for report in reports),
    }


def on_two(strategy: Strategy, norm: str = "BatchNorm", *, steps: int = 7) -> list[dict[str, Any]]:
    with workers(2) as pool:
        return pool.run(train, strategy, Net(NORMS[norm]), steps)


STRATEGIES: dict[str, Strategy] = {
    "local_sgd": cadenza.local_sgd(4),
    "met at the last step": cadenza.local_sgd(7),
    "late": cadenza.local_sgd(4, delay=2),
    "late diloco": cadenza.diloco(4, delay=2),
    "a delay as long as the period": cadenza.diloco(4, delay=4),
    "streaming, two in flight": cadenza.streaming_diloco(4, layers=1, delay=3),
    "eager": cadenza.eager_diloco(4),
    "two levels": cadenza.hierarchical({2: 1, 4: "all"}),
    "warm-up": cadenza.post_local_sgd(4, warmup_steps=2),
    "nothing but a warm-up": cadenza.post_local_sgd(4, warmup_steps=20),
    "balanced": cadenza.diloco(4, balanced=True),
    "pairs": cadenza.noloco(4),
    "averaged gradients": cadenza.snoo(4),
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_finish_leaves_equal_statistics_whatever_the_strategy(name: str) -> None:
    one, other = on_two(STRATEGIES[name])
    statistics = [key for key in one["after"] if key.startswith("norm.")]
    assert len(statistics) == 3
    assert not torch.equal(one["before"]["norm.running_mean"], other["before"]["norm.running_mean"]) or "met" in name
    for key in statistics:
        assert torch.equal(one["after"][key], other["after"][key]), key
    assert all(torch.equal(a, b) for a, b in zip(one["parameters"], other["parameters"], strict=True))


def test_statistics_take_the_mean_and_counters_the_largest_value() -> None:
    one, other = on_two(cadenza.local_sgd(100))
    for key in ("norm.running_mean", "norm.running_var"):
        torch.testing.assert_close(one["after"][key], (one["before"][key] + other["before"][key]) / 2)
    assert one["after"]["norm.num_batches_tracked"] == 7


def test_statistics_are_told_by_structure_and_other_buffers_stay() -> None:
    one, other = on_two(cadenza.local_sgd(4), "one's own")
    assert torch.equal(one["after"]["norm.running_mean"], other["after"]["norm.running_mean"])
    assert [result["after"]["table"].tolist() for result in (one, other)] == [[0.0, 0.0], [1.0, 1.0]]


@pytest.mark.parametrize(("buffers", "table"), [(True, [0.5, 0.5]), (False, None)])
def test_all_buffers_or_none_if_asked_for(buffers: bool, table: list[float] | None) -> None:
    for rank, result in enumerate(on_two(cadenza.local_sgd(4, buffers=buffers))):
        assert result["after"]["table"].tolist() == (table or [float(rank)] * 2)
        if not buffers:
            assert torch.equal(result["after"]["norm.running_var"], result["before"]["norm.running_var"])


@pytest.mark.parametrize("norm", ["none", "BatchNorm without statistics"])
def test_a_model_without_statistics_sends_not_one_byte_more(norm: str) -> None:
    default, without = (on_two(cadenza.local_sgd(4, buffers=buffers), norm) for buffers in ("statistics", False))
    assert [result["bytes"] for result in default] == [result["bytes"] for result in without]


def test_reports_count_the_bytes_of_statistics() -> None:
    with_them, without = (on_two(cadenza.local_sgd(4, buffers=buffers)) for buffers in ("statistics", False))
    values, counter = 2 * 4 * 4, 8
    assert with_them[0]["bytes"] == without[0]["bytes"] + 2 * (values + counter + HEADER_BYTES)


def test_averaged_lends_the_mean_of_the_statistics() -> None:
    start = Net(NORMS["BatchNorm"])

    def run(worker: Worker) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        model = copy.deepcopy(start)
        sync = cadenza.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), cadenza.local_sgd(100))
        model(torch.randn(8, 3, generator=worker.generator) + worker.rank)
        own = model.norm.running_mean.clone()  # type: ignore[union-attr,operator]
        with sync.averaged():
            lent = model.norm.running_mean.clone()  # type: ignore[union-attr,operator]
        return own, lent, model.norm.running_mean  # type: ignore[return-value]

    with workers(2) as pool:
        (mine, lent, back), (theirs, other, _) = pool.run(run)
    torch.testing.assert_close(lent, (mine + theirs) / 2)
    assert torch.equal(lent, other)
    assert torch.equal(mine, back)


def test_statistics_that_are_not_finite_do_not_count() -> None:
    start = Net(NORMS["BatchNorm"])

    def run(worker: Worker) -> torch.Tensor:
        model = copy.deepcopy(start)
        sync = cadenza.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), cadenza.local_sgd(1))
        model.norm.running_var.fill_([torch.inf, 3.0][worker.rank])  # type: ignore[union-attr,operator]
        sync.step()
        return model.norm.running_var  # type: ignore[union-attr,return-value]

    with workers(2) as pool:
        assert [found.tolist() for found in pool.run(run)] == [[3.0] * 4] * 2


ELASTIC: dict[str, dict[str, Any]] = {
    "at once": {},
    "late": {"delay": 2},
    "a delay as long as the period": {"delay": 4},
    "by layers": {"fragments": cadenza.by_layers(1)},
}


@pytest.mark.parametrize("name", ELASTIC)
def test_statistics_are_averaged_as_in_fixed_groups_where_rounds_may_fail(name: str) -> None:
    start = Net(NORMS["BatchNorm"])

    def elastic(worker: Worker) -> dict[str, Any]:
        strategy = cadenza.diloco(4, faults=shrink(), **ELASTIC[name])
        return train(worker, strategy, start, 7, membership=worker.membership(lease_s=1.0))

    with workers(3) as pool:
        one, *others = pool.run(elastic)
        fixed = pool.run(train, cadenza.diloco(4, **ELASTIC[name]), start, 7)[0]
    assert all(not torch.equal(one["before"]["norm.running_mean"], o["before"]["norm.running_mean"]) for o in others)
    for key in ("norm.running_mean", "norm.running_var", "norm.num_batches_tracked"):
        assert all(torch.equal(one["after"][key], other["after"][key]) for other in others)
        # Those of a late round are as they were at its launch: the steps since then have not gone into them.
        if "delay" not in ELASTIC[name]:
            torch.testing.assert_close(one["after"][key], fixed["after"][key])
    assert (one["after"]["norm.running_var"] > 0).all()
    assert one["after"]["norm.num_batches_tracked"] == 7


def test_finish_without_a_step_needs_nobody_where_workers_come_and_go() -> None:
    def run(worker: Worker) -> bool:
        model = Net(NORMS["BatchNorm"])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        membership = worker.membership(lease_s=1.0)
        cadenza.attach(model, optimizer, cadenza.diloco(4, faults=shrink()), membership=membership).finish()
        return True

    with workers(2) as pool:
        assert pool.run(run) == [True, True]


def test_ranks_that_average_other_buffers_do_not_train_together() -> None:
    identities = {tuple(cadenza.local_sgd(4, buffers=buffers).identity) for buffers in (True, False, "statistics")}
    assert len(identities) == 3


def test_another_choice_of_buffers_is_refused() -> None:
    with pytest.raises(ValueError, match="buffers is"):
        cadenza.local_sgd(4, buffers="all")

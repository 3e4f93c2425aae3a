"""EDiT (arXiv 2412.07210) beside a plain reference: norms, anomalies, softmax, clipping and the outer step."""

from __future__ import annotations

import math

import pytest
import torch

import cadenza
from cadenza import Strategy
from cadenza.testing import Worker, workers
from cadenza.testing.references import History, Workers, flat, unflatten
from cadenza.weighting import edit_norms
from support.models import CASES
from support.paper_runs import (
    PaperRun,
    Spikes,
    assert_resumes_everywhere,
    assert_same_way,
    histories,
    multiply_gradients,
)
from support.training import momentum_sgd

LAYERS = [[0, 1], [2, 3], [4, 5]]  # the tensors of the MLP's layers
WHOLE = [list(range(6))]
PERIOD, STEPS, OBSERVED = 4, 26, 3


class Layer:
    """What a layer remembers: its anchor, the outer optimizer and, for each worker, the moving average of its norms."""

    def __init__(self, tensors: list[torch.Tensor], count: int, clip: float) -> None:
        self.clip = clip
        self.anchor = flat(tensors).clone()
        self.outer = torch.optim.SGD([self.anchor], lr=0.8, momentum=0.85, nesterov=True)
        self.norms: list[list[float]] = [[] for _ in range(count)]

    def is_anomalous(self, worker: int, norm: float) -> bool:
        # The moving average by its definition: a weighted mean of all norms so far, and the recursion of the variance.
        known, mean, variance = self.norms[worker], 0.0, 0.0
        for i, value in enumerate(known, start=1):
            weights = [0.02 * 0.98 ** (i - 1 - j) for j in range(i)]
            mean = sum(w * x for w, x in zip(weights, known[:i], strict=True)) / sum(weights)
            rate = 0.02 / sum(weights)
            variance = (1 - rate) * variance + rate * (value - mean) ** 2
        return len(known) >= OBSERVED and (norm - mean) / math.sqrt(variance) > 3.0

    def come_together(self, rows: list[list[torch.Tensor]]) -> list[int]:
        differences = [self.anchor - flat(tensors) for tensors in rows]
        norms = [float(difference.double().norm()) for difference in differences]
        good = [i for i, norm in enumerate(norms) if not self.is_anomalous(i, norm)]
        for i in good:
            self.norms[i].append(norms[i])
        if good:
            shares = torch.softmax(torch.tensor([-norms[i] for i in good], dtype=torch.float64), 0)
            mean = sum((differences[i] * float(share) for i, share in zip(good, shares, strict=True)), torch.zeros(()))
            mean = mean * min(1.0, self.clip / float(mean.norm()))
            self.anchor.grad = mean
            self.outer.step()
        for tensors in rows:
            unflatten(self.anchor, tensors)
        return good


def edit(count: int, parts: list[list[int]], spikes: Spikes, clip: float) -> tuple[History, list[int]]:
    """What every worker holds after every step, and how many workers counted in each round."""
    group = Workers(CASES["mlp"], count, momentum_sgd)
    layers = [Layer([group.parameters[0][i] for i in part], count, clip) for part in parts]
    history, counted = [], []

    def round_of(number: int) -> None:
        rows = [[tensors[i] for i in parts[number]] for tensors in group.parameters]
        counted.append(len(layers[number].come_together(rows)))

    for n in range(1, STEPS + 1):
        for rank in range(count):
            group.backward(rank, n)
            multiply_gradients(group.models[rank], spikes.get((rank, n), 1.0))
            group.optimizers[rank].step()
        for number in range(len(parts)):
            if n % PERIOD == (number + 1) * PERIOD // len(parts) % PERIOD:
                round_of(number)
        history.append(group.snapshot())
    for number in range(len(parts)):
        if (number + 1) * PERIOD // len(parts) % PERIOD != STEPS % PERIOD:
            round_of(number)
    return [*history, group.snapshot()], counted


def strategy(clip: float = 10.0, **options: object) -> Strategy:
    return cadenza.edit(PERIOD, clip=clip, weight=edit_norms(observe=OBSERVED), **options)  # type: ignore[arg-type]


ONE_SPIKE: Spikes = {(1, 18): 300.0}
ALL_SPIKE: Spikes = {(rank, 18): 300.0 for rank in range(4)}


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("spikes", [ONE_SPIKE, ALL_SPIKE], ids=["one anomaly", "all anomalous"])
@pytest.mark.parametrize("layers", [True, False], ids=["layers", "whole"])
def test_edit_walks_the_way_of_its_reference(count: int, spikes: Spikes, layers: bool) -> None:
    reference, counted = edit(count, LAYERS if layers else WHOLE, spikes, clip=0.1)
    assert set(counted) >= ({count, count - 1} if spikes is ONE_SPIKE else {count, 0})
    options = {} if layers else {"fragments": cadenza.whole()}
    assert_same_way(histories(count, strategy(0.1, **options), STEPS, spikes), reference)


@pytest.mark.parametrize("delay", [0, 1])
def test_edit_goes_on_from_any_step(delay: int) -> None:
    assert_resumes_everywhere(3, strategy(delay=delay), STEPS, {**ONE_SPIKE, (0, 22): 300.0}, every=3)


def test_a_worker_that_counts_nothing_keeps_its_optimizer_state() -> None:
    def momentum_after(worker: Worker) -> float:
        run = PaperRun(worker, strategy(fragments=cadenza.whole()), ONE_SPIKE)
        for n in range(1, 21):
            run.step(n)
        assert run.sync.replica.level_state(0, 0).weighting_state["rounds"] == [5.0, 4.0]
        run.sync.close()
        return sum(float(state["momentum_buffer"].norm()) for state in run.optimizer.state.values())

    with workers(2) as pool:
        assert pool.run(momentum_after)[1] > 1.0


def test_another_number_of_workers_starts_the_averages_anew() -> None:
    wanted = strategy(fragments=cadenza.whole())

    def save(worker: Worker) -> object:
        run = PaperRun(worker, wanted, {})
        for n in range(1, 17):
            run.step(n)
        saved = run.sync.state_dict()
        run.sync.close()
        return saved

    def resume(worker: Worker, state: dict[str, torch.Tensor | str]) -> object:
        run = PaperRun(worker, wanted, {})
        run.sync.load_state_dict(state)
        before = run.sync.replica.level_state(0, 0).weighting_state["rounds"]
        for n in range(17, 21):
            run.step(n)
        after = run.sync.replica.level_state(0, 0).weighting_state["rounds"]
        run.sync.close()
        return before, after

    with workers(2) as pool:
        first, second = pool.run(save)
    with workers(3) as pool:
        assert pool.run(resume, {**first, **second}) == [([4.0, 4.0], [1.0, 1.0, 1.0])] * 3  # type: ignore[dict-item]


def test_a_plain_mean_keeps_an_anchor_under_edits_weights() -> None:
    """Without one it would be the values whose norms are judged, and nowhere to go back to."""
    for weight in (edit_norms(), cadenza.weighting.outliers(edit_norms())):
        assert cadenza.local_sgd(4, weight=weight).levels[0].anchored
    assert not cadenza.local_sgd(4, weight=cadenza.weighting.outliers()).levels[0].anchored

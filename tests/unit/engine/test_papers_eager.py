"""Eager updates (arXiv 2502.12996) and their naive kind against the paper's equations, after every step."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

import cadenza
from cadenza import Strategy
from cadenza.codecs import error_feedback, int8
from cadenza.testing import Worker, workers
from cadenza.testing import references as algorithms
from cadenza.testing.references import History, Workers
from cadenza.testing.trajectories import FRAGMENTS
from support.models import CASES
from support.resuming import assert_resumes_after_every_step
from support.training import Trace, momentum_sgd, one_number, train
from support.trajectories import assert_same_way

PERIOD, STEPS = 3, 13
WHOLE = [list(range(6))]


class Replica:
    """One worker's copy of a fragment: phi, from which it starts, the momentum, and what it has sent."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.tensors = tensors
        self.phi = algorithms.flat(tensors)
        self.momentum = torch.zeros_like(self.phi)
        self.sent = torch.zeros_like(self.phi)

    def difference(self) -> torch.Tensor:
        return self.phi - algorithms.flat(self.tensors)

    def outer_step(self, gradient: torch.Tensor, lr: float, mu: float) -> None:
        self.momentum = mu * self.momentum + gradient
        self.phi = self.phi - lr * (gradient + mu * self.momentum)

    def set(self, values: torch.Tensor) -> None:
        algorithms.unflatten(values, self.tensors)


def reference(
    run: Workers, *, fragments: Sequence[Sequence[int]] = WHOLE, naive: bool = False, lr: float = 0.7, mu: float = 0.9
) -> History:
    """Algorithm 3 of the paper, or 2 if `naive`, in fragments that take turns; at the end, the mean of all weights."""
    count, history = len(run), []
    replicas = [[Replica([own[k] for k in places]) for own in run.parameters] for places in fragments]
    begun = [False] * len(fragments)

    def step(group: list[Replica], differences: list[torch.Tensor], first: bool) -> None:
        mean = sum(replica.sent for replica in group) / count
        for replica, difference in zip(group, differences, strict=True):
            if naive and first:
                continue  # there is no gradient yet
            gradient = mean if naive else mean + (difference - replica.sent) / count
            replica.outer_step(gradient, lr, mu)

    for n in range(1, STEPS + 1):
        run.local_step(n)
        for p, group in enumerate(replicas):
            if n % PERIOD == (p + 1) * PERIOD // len(fragments) % PERIOD:
                differences = [replica.difference() for replica in group]
                step(group, differences, first=not begun[p])
                begun[p] = True
                for replica, difference in zip(group, differences, strict=True):
                    replica.sent = difference
                    replica.set(replica.phi)
        history.append(run.snapshot())
    for p, group in enumerate(replicas):  # what is in flight lands; the progress since then stays in the weights
        differences = [replica.difference() for replica in group]
        step(group, differences, first=not begun[p])
        for replica, difference in zip(group, differences, strict=True):
            replica.set(replica.phi - difference)
        if naive:  # one more round, on the rest of a period
            rest = sum(differences) / count
            for replica in group:
                replica.outer_step(rest, lr, mu)
                replica.set(replica.phi)
    if not naive:
        algorithms.average(run)
    return [*history, run.snapshot()]


def traces(count: int, strategy: Strategy, steps: int = STEPS) -> list[Trace]:
    with workers(count) as pool:
        return pool.run(lambda _: train(strategy, steps))


def mlps(count: int) -> Workers:
    return Workers(CASES["mlp"], count, momentum_sgd)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_it_walks_the_way_of_the_paper(count: int) -> None:
    assert_same_way(traces(count, cadenza.eager_diloco(PERIOD)), reference(mlps(count)), bits=False)


@pytest.mark.parametrize("steps", [PERIOD - 1, PERIOD, 4 * PERIOD])
def test_it_ends_level_wherever_it_is_stopped(steps: int) -> None:
    found = traces(3, cadenza.eager_diloco(PERIOD), steps)
    assert all(torch.equal(trace.finished, found[0].finished) for trace in found)


def test_fragments_take_turns() -> None:
    strategy = cadenza.eager_diloco(PERIOD, fragments=cadenza.by_layers(2), outer_lr=0.4, outer_momentum=0.5)
    expected = reference(mlps(3), fragments=FRAGMENTS, lr=0.4, mu=0.5)
    assert_same_way(traces(3, strategy), expected, bits=False)


@pytest.mark.parametrize("count", [2, 3])
def test_a_delay_of_a_period_is_the_naive_kind(count: int) -> None:
    strategy = cadenza.diloco(PERIOD, delay=PERIOD, outer_lr=0.4, defaults="paper")
    assert_same_way(traces(count, strategy), reference(mlps(count), naive=True, lr=0.4), bits=False)


def test_one_worker_walks_as_diloco_does_without_a_delay() -> None:
    [late], [straight] = traces(1, cadenza.eager_diloco(PERIOD)), traces(1, cadenza.diloco(PERIOD, defaults="paper"))
    for got, wanted in zip(late.history[:-1], straight.history[:-1], strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=2e-6)


def test_every_difference_counts_once() -> None:
    # Gradients of 1 and 2, lr 0.1, two steps a round, no momentum: each round differs by 0.2 and 0.4 from its start.
    # So after R rounds and the landing of the last, every worker has moved by R times their mean, 0.3.
    strategy = cadenza.eager_diloco(2, outer_lr=1.0, outer_momentum=0.0)

    def walk(worker: Worker) -> tuple[float, float]:
        model, sync, step = one_number(strategy)
        for _ in range(8):
            step(1.0 + worker.rank)
        before = model.x.item()
        sync.finish()
        return before, model.x.item()

    with workers(2) as pool:
        found = pool.run(walk)
    # Before the last landing the workers differ: 3 · 0.3, and half of each one's newest difference.
    assert [before for before, _ in found] == pytest.approx([1 - 0.9 - 0.1, 1 - 0.9 - 0.2], abs=1e-6)
    assert [after for _, after in found] == pytest.approx([1 - 1.2] * 2, abs=1e-6)


@pytest.mark.parametrize(
    "strategy",
    [
        cadenza.eager_diloco(PERIOD),
        cadenza.eager_diloco(PERIOD, codec=error_feedback(int8(block=16))),
        cadenza.eager_diloco(PERIOD, fragments=cadenza.by_layers(1)),
        cadenza.diloco(PERIOD, delay=PERIOD),
    ],
    ids=["eager", "int8", "fragments", "naive"],
)
def test_it_resumes_after_every_step(strategy: Strategy) -> None:
    assert_resumes_after_every_step(strategy)


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2)])
def test_another_number_of_workers_goes_on_each_from_an_entry_of_its_own(before: int, after: int) -> None:
    strategy = cadenza.eager_diloco(2)

    def leave(worker: Worker) -> tuple[dict[str, torch.Tensor | str], torch.Tensor]:
        model, sync, step = one_number(strategy)
        for _ in range(5):
            step(1.0 + worker.rank)
        return sync.state_dict(), model.x.detach().clone()

    def go_on(worker: Worker, left: list[tuple[dict[str, torch.Tensor | str], torch.Tensor]]) -> tuple[float, float]:
        model, sync, step = one_number(strategy)
        sync.load_state_dict({key: value for state, _ in left for key, value in state.items()})
        model.x.data.copy_(left[worker.rank % len(left)][1])
        [anchor] = [value for key, value in sync.state_dict().items() if "/anchor/" in key]
        for _ in range(3):
            step(1.0 + worker.rank)
        sync.finish()
        return float(anchor), model.x.item()

    with workers(before) as pool:
        left = pool.run(leave)
    with workers(after) as pool:
        found = pool.run(go_on, left)
    anchors = [float(value) for state, _ in left for key, value in state.items() if "/anchor/" in key]
    assert len(set(anchors)) == before
    assert [anchor for anchor, _ in found] == [anchors[rank % before] for rank in range(after)]
    assert len({end for _, end in found}) == 1

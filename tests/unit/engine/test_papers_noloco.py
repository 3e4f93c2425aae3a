"""NoLoCo (arXiv 2506.10911) beside a plain reference: pairs, own anchors, momentum with a pull; and its end."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import cadenza
from cadenza import LevelPlan, Strategy, codecs
from cadenza.errors import CadenzaError
from cadenza.outer import sgd
from cadenza.testing import Worker, workers
from cadenza.testing.references import History, Workers, unflatten
from cadenza.topology import random_pairs
from support.compare import same_bits
from support.models import CASES
from support.paper_runs import PaperRun, assert_resumes_everywhere, assert_same_way, histories
from support.training import momentum_sgd, values

PERIOD, STEPS = 3, 14
ALPHA, BETA, GAMMA = 0.5, 0.7, 0.4


def noloco(count: int, alpha: float = ALPHA, beta: float = BETA, gamma: float = GAMMA) -> History:
    """The paper's equations, with Δ = θ − φ as in the authors' code; at the end, the mean of all."""
    group, pairs = Workers(CASES["mlp"], count, momentum_sgd), random_pairs()
    phi = group.snapshot()
    momentum = [torch.zeros_like(anchor) for anchor in phi]
    history = []
    for n in range(1, STEPS + 1):
        group.local_step(n)
        if n % PERIOD == 0:
            theta, before = group.snapshot(), [anchor.clone() for anchor in phi]
            for members in pairs.groups(n // PERIOD - 1, range(count)):
                mean_delta = sum(theta[j] - before[j] for j in members) / len(members)
                mean_phi = sum(before[j] for j in members) / len(members)
                for i in members:
                    momentum[i] = alpha * momentum[i] + beta * mean_delta - gamma * (before[i] - mean_phi)
                    phi[i] = before[i] + momentum[i]
                    unflatten(phi[i], group.parameters[i])
        history.append(group.snapshot())
    mean = torch.stack(group.snapshot()).mean(0)
    return [*history, [mean] * count]


def strategy(**options: Any) -> Strategy:
    return cadenza.noloco(PERIOD, outer_lr=BETA, outer_momentum=ALPHA, pull=GAMMA, **options)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_noloco_walks_the_way_of_its_reference(count: int) -> None:
    assert_same_way(histories(count, strategy(), STEPS), noloco(count))


def test_workers_hold_different_values_between_rounds_but_pairs_do_not_drift_apart() -> None:
    found = histories(4, strategy(), 30)
    apart = [torch.stack([history[n] for history in found]).std(0).norm() for n in (2, 29)]
    assert apart[0] > 0
    assert apart[1] < 3 * apart[0]


@pytest.mark.parametrize("count", [2, 3])
def test_noloco_goes_on_from_any_step(count: int) -> None:
    assert_resumes_everywhere(count, strategy(), STEPS)


def test_late_rounds_and_fragments_go_on_from_any_step() -> None:
    assert_resumes_everywhere(4, strategy(delay=2, fragments=cadenza.by_layers(1)), STEPS)


@pytest.mark.parametrize("codec", [codecs.int8(block=16), codecs.error_feedback(codecs.int8(block=16))])
def test_differences_may_be_encoded_though_the_pairs_change(codec: codecs.Codec) -> None:
    found = histories(3, strategy(codec=codec), STEPS)
    for history, expected in zip(found, zip(*noloco(3), strict=True), strict=True):
        torch.testing.assert_close(history[-1], expected[-1], rtol=0.0, atol=0.05)
    assert_resumes_everywhere(3, strategy(codec=codec), 7)


def test_two_workers_are_diloco_with_heavy_ball_momentum() -> None:
    diloco = Strategy(levels=(LevelPlan(PERIOD, outer=sgd(lr=BETA, momentum=ALPHA)),))
    steps = 4 * PERIOD
    for a, b in zip(histories(2, strategy(), steps), histories(2, diloco, steps), strict=True):
        # DiLoCo's momentum gathers differences before the lr, this one's after it.
        for one, other in zip(a, b, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=2e-6)


def test_plain_means_of_changing_pairs_end_equal_too() -> None:
    gossip = Strategy(levels=(LevelPlan(PERIOD, groups=random_pairs()),))
    for steps in (STEPS, 4 * PERIOD):  # inside a period, and just after a round of pairs
        found = histories(4, gossip, steps)
        assert not same_bits(found[0][-2], found[1][-2]) or not same_bits(found[0][-2], found[2][-2])
        assert all(same_bits(history[-1], found[0][-1]) for history in found)


def test_every_worker_makes_one_connection_to_each_other_one() -> None:
    def connections(worker: Worker) -> list[list[int]]:
        made: list[list[int]] = []
        connect = worker.group.connect

        def counted(ranks: Sequence[int], **options: Any) -> Any:
            made.append(list(ranks))
            return connect(ranks, **options)

        worker.group.connect = counted  # type: ignore[method-assign]
        PaperRun(worker, strategy(), {}).go(90)
        return made

    with workers(4) as pool:
        for rank, made in enumerate(pool.run(connections)):
            pairs = [pair for pair in itertools.combinations(range(4), 2) if rank in pair]
            assert sorted(map(tuple, made)) == sorted([(0, 1, 2, 3), *pairs])


def test_another_number_of_workers_goes_on_with_anchors_that_fit_their_parameters() -> None:
    def save(worker: Worker) -> Any:
        run = PaperRun(worker, strategy(), {})
        for n in range(1, PERIOD + 1):
            run.step(n)
        saved = values(run.model), run.sync.state_dict()
        run.sync.close()
        return saved

    def resume(worker: Worker, merged: dict[str, Any]) -> Any:
        run = PaperRun(worker, strategy(), {})
        run.sync.load_state_dict(merged)
        [anchor] = run.sync.replica.level_state(0, 0).anchors
        run.sync.close()
        return anchor.clone()

    with workers(4) as pool:
        saved = pool.run(save)
    merged = {key: value for _, state in saved for key, value in state.items()}
    with workers(3) as pool:
        anchors = pool.run(resume, merged)
    for (parameters, _), anchor in zip(saved, anchors, strict=False):  # after a round they are the same
        assert same_bits(parameters, anchor)
    assert len({tuple(anchor.tolist()) for anchor in anchors}) == 2  # one for each pair of the round


def test_a_worker_cannot_drain_where_it_never_hears_of_all_others() -> None:
    def drain(worker: Worker) -> None:
        PaperRun(worker, strategy(), {}).sync.drain()

    with workers(2) as pool, pytest.raises(CadenzaError, match=r"cannot drain.* same number of steps"):
        pool.run(drain)


def test_workers_that_come_and_go_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot be combined with groups of fixed ranks"):
        strategy(faults=cadenza.shrink())
    outer = cadenza.outer.noloco()
    with pytest.raises(ValueError, match=r"cannot be combined with anchors that differ: .*raise_error"):
        Strategy(levels=(LevelPlan(4, outer=outer),), faults=cadenza.shrink())

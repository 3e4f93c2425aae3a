"""The drift that reports tell against what the workers' parameters say, whatever carries them."""

from __future__ import annotations

import math

import pytest
import torch

import cadenza
from cadenza import LevelPlan, Strategy, codecs, outer
from cadenza.codecs import Codec
from cadenza.testing import Worker, workers

LOSSY = [
    codecs.bf16(),
    codecs.int8(),
    codecs.e3m0(),
    codecs.error_feedback(codecs.e3m0()),
    codecs.error_feedback(codecs.topk(), decay=0.95),
    codecs.error_feedback(codecs.dct()),
]


def flat(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().double().reshape(-1) for parameter in model.parameters()])


def walk(
    worker: Worker, strategy: Strategy, apart: float, dtype: torch.dtype
) -> tuple[list[float], list[torch.Tensor]]:
    """Take random steps, in part the same on all workers, and meet after each: drifts, and what there was before."""
    common, own = torch.Generator().manual_seed(99), worker.generator
    model = torch.nn.Linear(400, 300).to(dtype)
    reports: list[cadenza.RoundReport] = []
    sync = cadenza.attach(model, torch.optim.SGD(model.parameters()), strategy, observers=[reports.append])
    before = []
    for _ in range(4):
        for parameter in model.parameters():
            step = torch.randn(parameter.shape, generator=common) + apart * torch.randn(parameter.shape, generator=own)
            parameter.data += (2e-3 * step).to(dtype)
        before.append(flat(model))
        sync.step()
    return [math.nan if report.drift is None else report.drift for report in reports], before


def true_drifts(before: list[list[torch.Tensor]]) -> list[float]:
    found = []
    for values in zip(*before, strict=True):
        mean = torch.stack(values).mean(0)
        spread2 = sum(float((x - mean).square().sum()) for x in values) / len(values)
        found.append(math.sqrt(spread2) / float(mean.norm()))
    return found


def compare(count: int, strategy: Strategy, apart: float, dtype: torch.dtype, within: float) -> None:
    with workers(count) as pool:
        results = pool.run(walk, strategy, apart, dtype)
    told = [drifts for drifts, _ in results]
    assert all(drifts == told[0] for drifts in told)
    assert told[0] == pytest.approx(true_drifts([before for _, before in results]), rel=within)


@pytest.mark.parametrize("apart", [0.1, 1.0])
@pytest.mark.parametrize("codec", LOSSY, ids=lambda codec: codec.name)
def test_a_lossy_codec_leaves_the_drift_as_it_is(codec: Codec, apart: float) -> None:
    compare(3, cadenza.diloco(1, codec=codec), apart, torch.float32, within=0.05)


@pytest.mark.parametrize("codec", LOSSY, ids=lambda codec: codec.name)
def test_workers_that_are_the_same_have_no_drift(codec: Codec) -> None:
    with workers(3) as pool:
        for drifts, _ in pool.run(walk, cadenza.diloco(1, codec=codec), 0.0, torch.float32):
            assert drifts == [0.0] * 4


@pytest.mark.parametrize("apart", [0.1, 1.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_means_of_16_bits_leave_the_drift_as_it_is(dtype: torch.dtype, apart: float) -> None:
    compare(3, cadenza.local_sgd(1), apart, dtype, within=0.05)


def test_means_of_16_bits_of_workers_that_are_the_same_have_no_drift() -> None:
    with workers(3) as pool:
        for drifts, _ in pool.run(walk, cadenza.local_sgd(1), 0.0, torch.bfloat16):
            assert drifts == [0.0] * 4


@pytest.mark.parametrize("strategy", [cadenza.local_sgd(1), cadenza.diloco(1)], ids=["mean", "nesterov"])
def test_exact_means_have_an_exact_drift(strategy: Strategy) -> None:
    compare(3, strategy, 1.0, torch.float32, within=1e-4)


def test_an_adaptive_period_does_not_follow_what_a_codec_loses() -> None:
    schedule = cadenza.adaptive(1, target_drift=1e-3, minimum=1, maximum=4)
    codec = codecs.error_feedback(codecs.topk(), decay=0.95)
    strategy = Strategy(levels=(LevelPlan(schedule, outer=outer.sgd(), codec=codec),))
    with workers(3) as pool:
        for drifts, _ in pool.run(walk, strategy, 0.0, torch.float32):
            assert len(drifts) == 2  # the period grows as long as workers do the same: after steps 1 and 3


def test_what_the_drift_costs_is_counted() -> None:
    def sent(worker: Worker, measure: bool) -> int:
        model = torch.nn.Linear(400, 300)
        reports: list[cadenza.RoundReport] = []
        strategy = cadenza.diloco(1, codec=codecs.int8(), measure_drift=measure)
        cadenza.attach(model, torch.optim.SGD(model.parameters()), strategy, observers=[reports.append]).step()
        return reports[0].bytes_sent

    with workers(3) as pool:
        assert [
            with_it - without for with_it, without in zip(pool.run(sent, True), pool.run(sent, False), strict=True)
        ] == [2 * (4 * 2048 + 24)] * 3


def test_16_bit_workers_of_which_one_counts_like_the_mean_agree_on_how_values_travel() -> None:
    def mean(worker: Worker) -> list[float]:
        model = torch.nn.Linear(3, 1, bias=False).to(torch.bfloat16)
        sync = cadenza.attach(model, torch.optim.SGD(model.parameters()), cadenza.local_sgd(1, weight="samples"))
        torch.nn.init.constant_(model.weight, float(worker.rank))
        sync.step(samples=[32, 16, 48][worker.rank])
        return model.weight.flatten().tolist()

    with workers(3) as pool:
        expected = float(torch.tensor((16 * 1 + 48 * 2) / 96).to(torch.bfloat16))
        assert pool.run(mean) == [[expected] * 3] * 3

"""What codecs make of whole rounds: values at fp32's end, and errors that are told of all values."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import pytest
import torch
from torch import nn

import cadenza
from cadenza import RoundReport, codecs
from cadenza.codecs import Codec
from cadenza.testing import Worker, workers
from support.compare import same_bits

LOSSY = [codecs.bf16(), codecs.int8(), codecs.e3m0(), codecs.topk(0.5), codecs.dct(4, chunk=8)]
LOSSY += [codecs.error_feedback(codec) for codec in LOSSY]


def one_round(
    count: int, codec: Codec, moved: Callable[[int], list[torch.Tensor]]
) -> list[tuple[list[torch.Tensor], RoundReport]]:
    """Let parameters that begin at zero move to what `moved(rank)` says, and meet once."""

    def meet(worker: Worker) -> tuple[list[torch.Tensor], RoundReport]:
        targets = moved(worker.rank)
        model = nn.ParameterList([nn.Parameter(torch.zeros_like(target)) for target in targets])
        optimizer, reports = torch.optim.SGD(model.parameters(), lr=1.0), []
        strategy = cadenza.local_sgd(1, codec=codec, measure_drift=False)
        sync = cadenza.attach(model, optimizer, strategy, observers=[reports.append])
        for parameter, target in zip(model, targets, strict=True):
            parameter.grad = -target
        optimizer.step()
        sync.step()
        return [parameter.detach() for parameter in model], reports[0]

    with workers(count) as pool:
        return pool.run(meet)


@pytest.mark.parametrize("largest", [1e37, torch.finfo(torch.float32).max])
@pytest.mark.parametrize("codec", LOSSY, ids=lambda codec: codec.name)
def test_what_is_finite_lands_finite_up_to_the_end_of_fp32(codec: Codec, largest: float) -> None:
    def moved(rank: int) -> list[torch.Tensor]:
        values = torch.linspace(-1, 1, 300, dtype=torch.float64).roll(rank) * largest
        return [values.float(), torch.full((40,), largest)]

    (first, report), *others = one_round(3, codec, moved)
    assert all(tensor.isfinite().all() for tensor in first)
    assert all(same_bits(ours, theirs) for tensors, _ in others for ours, theirs in zip(first, tensors, strict=True))
    assert report.codec_error is not None
    assert math.isfinite(report.codec_error)


@pytest.mark.parametrize("codec", [codecs.e3m0(), codecs.error_feedback(codecs.e3m0())], ids=lambda codec: codec.name)
def test_the_error_of_a_codec_is_told_of_the_whole_fragment(codec: Codec) -> None:
    """Powers of two lose nothing, and they are only some of the values, at whichever end."""
    plain, lossy = torch.ones(400_000), torch.full((400_000,), 0.75).index_fill(0, torch.arange(0, 400_000, 16), 1.0)

    def told(*tensors: torch.Tensor) -> float:
        [(_, report), _] = one_round(2, codec, lambda rank: list(tensors))
        assert report.codec_error is not None
        return report.codec_error

    expected = math.sqrt(told(lossy) ** 2 * float(lossy.norm() ** 2 / (lossy.norm() ** 2 + plain.norm() ** 2)))
    assert expected > 0.03
    assert told(plain, lossy) == pytest.approx(expected, rel=0.1)
    assert told(lossy, plain) == pytest.approx(expected, rel=0.1)


def test_a_mean_in_int8_is_nearer_than_one_in_four_bits_and_costs_what_it_costs() -> None:
    """What four workers have moved, half of it in common: 0.19 of the mean is lost in four bits both ways."""

    def moved(rank: int) -> list[torch.Tensor]:
        common, own = (torch.randn(1 << 16, generator=torch.Generator().manual_seed(seed)) for seed in (9, rank))
        return [common + own]

    exact = torch.stack([moved(rank)[0] for rank in range(4)]).mean(0)
    found = {}
    for codec in (codecs.e3m0(), codecs.e3m0(back=codecs.int8())):
        (mean, report), *_ = one_round(4, codec, moved)
        found[codec] = float((mean[0] - exact).norm() / exact.norm()), report.bytes_sent
        size, back = (part.encoded_bytes(1 << 14) for part in (codec, codec.back))
        assert 3 * (size + back) <= report.bytes_sent <= 3 * (size + back) + 2000
        assert report.encoded_bytes == 4 * size
    (twice, _), (once, _) = found.values()
    assert twice == pytest.approx(0.186, abs=0.005)
    assert once == pytest.approx(0.100, abs=0.005)


@pytest.mark.parametrize(("mean_of", "expected"), [("senders", 4.0), ("all", 1.0)])
def test_a_value_that_one_of_four_has_sent_moves_by_its_mean(
    mean_of: Literal["all", "senders"], expected: float
) -> None:
    def step(worker: Worker) -> list[float]:
        x = nn.Parameter(torch.zeros(8))
        optimizer = torch.optim.SGD([x], lr=1.0)
        strategy = cadenza.sparse_loco(1, density=0.125, mean_of=mean_of)
        sync = cadenza.attach(nn.ParameterList([x]), optimizer, strategy)
        x.grad = torch.zeros(8).index_fill(0, torch.tensor([worker.rank]), -4.0)
        optimizer.step()
        sync.step()
        return x.tolist()

    with workers(4) as pool:
        assert pool.run(step) == [[expected] * 4 + [0.0] * 4] * 4

"""What the exchange of encoded values promises, for every codec, transport and number of ranks.

A new codec is added to CODECS below: its mean over real ranks must be the one that a plain loop over its own `encode`
and `decode` gives, the same bits on all ranks, and residuals must wait for the commit.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import pytest
import torch
import torch.distributed as dist

from cadenza import codecs
from cadenza.codecs import Codec
from cadenza.engine.exchange import Residual, exchange_mean
from cadenza.engine.staged_exchange import exchange_staged, stage_part
from cadenza.participants.level_group import Stage
from cadenza.testing.encoded_mean import EncodedMean, row_of
from cadenza.testing.references import mean
from cadenza.transports import C10dTransport, Transport, connect
from cadenza.transports.shared_memory import SharedMemoryTransport
from support.compare import same_bits
from support.ranks import RankPool

CODECS: dict[str, Codec] = {
    "fp32": codecs.fp32(),
    "bf16": codecs.bf16(),
    "fp16": codecs.fp16(),
    "int8": codecs.int8(),
    "int8 in small blocks": codecs.int8(block=16),
    "e3m0": codecs.e3m0(),
    "e3m0 in small blocks": codecs.e3m0(block=16),
    "e3m0 back in int8": codecs.e3m0(back=codecs.int8()),
    "e3m0 back in larger blocks": codecs.e3m0(block=16, back=codecs.int8(block=24)),
    "e3m0 back as it is": codecs.e3m0(block=64, back=codecs.fp32()),
    "topk": codecs.topk(0.1),
    "topk of senders": codecs.topk(0.1, mean_of="senders"),
    "topk of 8 bits": codecs.topk(0.3, chunk=64, bits=8),
    "bf16 with feedback": codecs.error_feedback(codecs.bf16()),
    "int8 with feedback": codecs.error_feedback(codecs.int8(block=32)),
    "e3m0 with feedback": codecs.error_feedback(codecs.e3m0(block=16), decay=0.9),
    "e3m0 back in int8 with feedback": codecs.error_feedback(codecs.e3m0(block=32, back=codecs.int8(block=16))),
    "topk of senders with feedback": codecs.error_feedback(codecs.topk(0.1, mean_of="senders"), decay=0.95),
    "topk with feedback": codecs.error_feedback(codecs.topk(0.1), decay=0.95),
}
LOSSY = {name: codec for name, codec in CODECS.items() if not codec.exact}
FEEDBACK = {name: codec for name, codec in CODECS.items() if codec.feedback is not None}
SIZES = [1, 17, 257, 5000]
EITHER_TRANSPORT = pytest.mark.parametrize("shared", [True, False], ids=["shared memory", "gloo"])


def env(shared: bool) -> dict[str, str]:
    return {"CADENZA_SHARED_MEMORY": "1" if shared else "0"}


def world() -> Transport:
    group = dist.group.WORLD
    assert group is not None
    return connect(group)


@lru_cache(maxsize=64)
def drawn(rank: int, numel: int, turn: int) -> torch.Tensor:
    """What a rank has; every rank can compute everyone's. Magnitudes spread over five decades, and some are zero."""
    generator = torch.Generator().manual_seed(10_000 * turn + 100 * rank + numel % 97)
    values = torch.randn(numel, generator=generator)
    return values * 10 ** torch.empty(numel).uniform_(-4, 1, generator=generator) * (values.abs() > 0.1)


def contribution(rank: int, numel: int, turn: int = 0) -> torch.Tensor:
    return drawn(rank, numel, turn).clone()


def contributions(numel: int, turn: int = 0) -> list[torch.Tensor]:
    return [contribution(rank, numel, turn) for rank in range(dist.get_world_size())]


def weights_of(weighted: bool) -> list[float]:
    world = dist.get_world_size()
    return [2 * (rank + 1) / (world * (world + 1)) for rank in range(world)] if weighted else [1 / world] * world


def exchange_all_sizes(weighted: bool) -> dict[tuple[str, int], torch.Tensor]:
    """Every codec and size over one transport, twice each: lanes are used again, and residuals come in."""
    transport = world()
    weights = weights_of(weighted)
    results = {}
    for name, codec in CODECS.items():
        for numel in SIZES:
            values = contribution(dist.get_rank(), numel)
            residual = Residual.zeros(values, transport, codec) if codec.feedback is not None else None
            reference = EncodedMean(codec, dist.get_world_size(), numel)
            for turn in range(2):
                values = contribution(dist.get_rank(), numel, turn)
                exchange_mean(values, transport, codec, weights=weights, residual=residual)
                check_mean(f"{name}, {numel} values, turn {turn}", codec, transport, values, reference, weights, turn)
                if residual is not None:
                    residual.commit()
                    check_residual(f"{name}, {numel} values, turn {turn}", codec, residual, reference)
            results[name, numel] = values
    return results


def check_mean(
    where: str,
    codec: Codec,
    transport: Transport,
    values: torch.Tensor,
    reference: EncodedMean,
    weights: list[float],
    turn: int,
) -> None:
    everyones = contributions(values.numel(), turn)
    if codec.exact:
        torch.testing.assert_close(
            values, mean(everyones, weights), rtol=1e-5, atol=1e-5, msg=lambda m: f"{where}: {m}"
        )
        if isinstance(transport, SharedMemoryTransport) and len(set(weights)) == 1:
            assert torch.equal(values, mean(everyones)), where
    else:
        expected = reference(everyones, weights)
        assert same_bits(values, expected), f"{where}: off by {(values - expected).abs().max()}"


def check_residual(where: str, codec: Codec, residual: Residual, reference: EncodedMean) -> None:
    mine = reference.residuals[dist.get_rank()]
    assert torch.equal(residual.own, mine), f"{where}: own residual"
    assert mine.any() or reference.numel < 20, where
    if codec.sparse:
        assert residual.share.numel() == 0
        return
    row = row_of(reference.numel, dist.get_world_size(), math.lcm(codec.block, codec.back.block))
    owned = reference.owners_residual[dist.get_rank() * row :][:row]
    assert torch.equal(residual.share[: owned.numel()], owned), f"{where}: the owner's residual"
    assert not residual.share[owned.numel() :].any(), where


@EITHER_TRANSPORT
@pytest.mark.parametrize(("count", "weighted"), [(2, True), (3, False), (4, True)], ids=["2", "3-alike", "4"])
def test_every_codec_gives_its_mean_the_same_bits_on_all_ranks(
    ranks: RankPool, count: int, weighted: bool, shared: bool
) -> None:
    first, *others = ranks.run(count, exchange_all_sizes, weighted, env=env(shared))
    for other in others:
        for key, values in first.items():
            assert same_bits(values, other[key]), key


def exchange_large(name: str) -> torch.Tensor:
    """More than fits one message, and a length that nothing divides."""
    codec, transport = CODECS[name], world()
    numel = 2_100_017
    values = contribution(dist.get_rank(), numel)
    exchange_mean(values, transport, codec, weights=weights_of(True))
    if codec.exact:
        torch.testing.assert_close(values, mean(contributions(numel), weights_of(True)), rtol=1e-5, atol=1e-5)
    else:
        expected = EncodedMean(codec, dist.get_world_size(), numel)(contributions(numel), weights_of(True))
        assert same_bits(values, expected)
    return values[:: numel // 1000]


@EITHER_TRANSPORT
@pytest.mark.parametrize("name", ["fp32", "int8", "e3m0", "e3m0 back in int8", "topk", "topk of senders"])
def test_values_longer_than_a_message_are_cut_without_a_trace(ranks: RankPool, name: str, shared: bool) -> None:
    first, second, third = ranks.run(3, exchange_large, name, env=env(shared))
    assert same_bits(first, second)
    assert same_bits(first, third)


def residuals_before_and_after(name: str) -> Any:
    codec, transport = CODECS[name], world()
    values = contribution(dist.get_rank(), 500)
    residual = Residual.zeros(values, transport, codec)
    results = []
    for turn in range(2):
        for _ in range(2):  # a round that was not committed is sent again, and is the same
            own, share = residual.own.clone(), residual.share.clone()
            values = contribution(dist.get_rank(), 500, turn)
            residual.begin(atomic=True)
            exchange_mean(values, transport, codec, weights=weights_of(False), residual=residual)
            assert torch.equal(residual.own, own)
            assert torch.equal(residual.share, share)
            results.append(values)
        residual.commit()
        assert not torch.equal(residual.own, own)
    residual.clear()
    assert not residual.own.any()
    assert not residual.share.any()
    return results


@pytest.mark.parametrize("name", FEEDBACK)
def test_residuals_of_an_atomic_exchange_change_only_on_commit(ranks: RankPool, name: str) -> None:
    for results in ranks.run(3, residuals_before_and_after, name):
        assert same_bits(results[0], results[1])
        assert same_bits(results[2], results[3])


def residuals_in_place_and_atomic(name: str) -> None:
    codec, transport = CODECS[name], world()
    found = []
    for atomic in (False, True):
        residual = Residual.zeros(contribution(dist.get_rank(), 500), transport, codec)
        memory = residual.own.data_ptr(), residual.share.data_ptr()
        for turn in range(2):
            residual.begin(atomic=atomic)
            values = contribution(dist.get_rank(), 500, turn)
            exchange_mean(values, transport, codec, weights=weights_of(False), residual=residual)
            residual.commit()
        assert atomic or memory == (residual.own.data_ptr(), residual.share.data_ptr())
        found.append((values, residual.own, residual.share))
    for in_place, copied in zip(*found, strict=True):
        assert same_bits(in_place, copied)


@pytest.mark.parametrize("name", FEEDBACK)
def test_residuals_need_no_second_copy_and_come_out_the_same(ranks: RankPool, name: str) -> None:
    ranks.run(3, residuals_in_place_and_atomic, name)


def sum_of_many(name: str) -> tuple[float, float]:
    """The same small contribution many times: with feedback nothing is lost for good."""
    codec, transport = CODECS[name], world()
    exact = contribution(0, 300)
    residual = Residual.zeros(exact, transport, codec)
    total = torch.zeros_like(exact)
    for _ in range(60):
        values = exact.clone()
        exchange_mean(values, transport, codec, weights=weights_of(False), residual=residual)
        residual.commit()
        total += values
    once = exact.clone()
    exchange_mean(once, transport, codec, weights=weights_of(False))
    size = float(exact.norm())
    return float((total / 60 - exact).norm()) / size, float((once - exact).norm()) / size


@pytest.mark.parametrize("name", ["bf16 with feedback", "int8 with feedback"])
def test_feedback_makes_up_for_what_was_lost(ranks: RankPool, name: str) -> None:
    for with_feedback, without in ranks.run(2, sum_of_many, name):
        assert with_feedback < without / 5


def debt_of_many(codec: Codec) -> list[float]:
    """How much the sum of many results lacks of the sum of the means, by the size of one: members of unequal weight."""
    transport, weights = world(), weights_of(True)
    exact = mean(contributions(3000), weights)
    residual = Residual.zeros(exact, transport, codec)
    lacking, debts = torch.zeros_like(exact), []
    for turn in range(60):
        values = contribution(dist.get_rank(), 3000)
        exchange_mean(values, transport, codec, weights=weights, residual=residual if codec.feedback else None)
        residual.commit()
        lacking += exact - values
        debts += [float(lacking.norm() / exact.norm())] if turn in (9, 59) else []
    return debts


@pytest.mark.parametrize(
    "codec",
    [codecs.e3m0(), codecs.int8(), codecs.topk(0.2), codecs.e3m0(back=codecs.int8()), codecs.e3m0(back=codecs.fp32())],
    ids=lambda codec: codec.name,
)
def test_feedback_keeps_the_debt_bounded_where_it_would_grow(ranks: RankPool, codec: Codec) -> None:
    for (_, without), (early, late) in zip(
        ranks.run(3, debt_of_many, codec), ranks.run(3, debt_of_many, codecs.error_feedback(codec)), strict=True
    ):
        assert late < 3 * early + 0.01
        assert late < without / 5


def counted(name: str) -> Any:
    codec, transport = CODECS[name], world()
    numel = 1000
    done = exchange_mean(contribution(dist.get_rank(), numel), transport, codec, weights=weights_of(False))
    return done.bytes_sent, done.encoded_bytes, done.raw_bytes, done.error2


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("name", CODECS)
def test_bytes_and_losses_are_counted(ranks: RankPool, name: str, count: int) -> None:
    codec = CODECS[name]
    values = row_of(1000, count, math.lcm(codec.block, codec.back.block))
    row, row_back = codec.encoded_bytes(values), codec.back.encoded_bytes(values)
    for sent, encoded, raw, error2 in ranks.run(count, counted, name):
        assert raw == 4000
        if codec.exact:
            assert (sent, encoded, error2) == (2 * (count - 1) * 4000 // count, 4000, 0.0)
        elif codec.sparse:
            assert (sent, encoded) == ((count - 1) * codec.encoded_bytes(1000), codec.encoded_bytes(1000))
        else:
            assert (sent, encoded) == ((count - 1) * (row + row_back), count * row)
        assert (error2 > 0) is not codec.exact


def odd_dtypes_and_nothing() -> None:
    transport = world()
    for name, codec in CODECS.items():
        nothing = torch.empty(0)
        assert exchange_mean(nothing, transport, codec, weights=weights_of(False)).bytes_sent == 0
        wide = contribution(dist.get_rank(), 100).double()
        exchange_mean(wide, transport, codec, weights=weights_of(False))
        assert wide.dtype == torch.float64
        expected = contribution(dist.get_rank(), 100)
        exchange_mean(expected, transport, codec, weights=weights_of(False))
        torch.testing.assert_close(wide.float(), expected, msg=lambda m, name=name: f"{name}: {m}")


def test_double_precision_and_nothing_at_all_can_be_exchanged(ranks: RankPool) -> None:
    ranks.run(2, odd_dtypes_and_nothing)


def alone() -> None:
    for codec in CODECS.values():
        values = contribution(0, 100)
        exchange_mean(values, world(), codec, weights=[1.0])
        if codec.exact:
            assert torch.equal(values, contribution(0, 100))
        else:
            assert torch.equal(values, EncodedMean(codec, 1, 100)([contribution(0, 100)]))


def test_one_member_alone_exchanges_with_itself(ranks: RankPool) -> None:
    ranks.run(1, alone)


def staged(name: str, numel: int) -> torch.Tensor:
    """Two pairs: the mean inside each is exact, and only what goes across is encoded."""
    rank, codec = dist.get_rank(), CODECS[name]
    inside = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    stage = Stage(connect(inside), connect(across))
    weights = weights_of(True)
    values = contribution(rank, numel)
    part = stage_part(values, stage, codec)
    residual = Residual.zeros(part, stage.across, codec) if codec.feedback is not None else None
    mine = weights[:2] if rank < 2 else weights[2:]
    done = exchange_staged(values, stage, codec, weights=mine, residual=residual)
    exact = mean(contributions(numel), weights)
    if codec.exact:
        torch.testing.assert_close(values, exact, rtol=1e-4, atol=1e-5)
    else:
        error = (values - exact).norm() / exact.norm()
        assert error < {"int8": 0.02, "int8 with feedback": 0.02, "e3m0": 0.5}.get(name, 1.0)
    # Across goes half of the values, each way; inside, half goes to the other and half comes back.
    assert done.raw_bytes == 4 * part.numel()
    assert done.encoded_bytes < 1.3 * codec.encoded_bytes(max(part.numel(), 2000))
    assert done.error2 <= done.norm2 <= 1.1 * float(contribution(rank, numel).square().sum())
    return values


@EITHER_TRANSPORT
@pytest.mark.parametrize("name", ["fp32", "int8", "int8 with feedback", "e3m0", "topk"])
def test_a_staged_exchange_is_the_same_bits_on_all_ranks(ranks: RankPool, name: str, shared: bool) -> None:
    for numel in (5001, 300_000):
        first, *others = ranks.run(4, staged, name, numel, env=env(shared))
        assert all(same_bits(first, other) for other in others)


def transports() -> tuple[str, str]:
    return type(world()).__name__, C10dTransport.__name__


def test_both_transports_are_tried(ranks: RankPool) -> None:
    assert ranks.run(2, transports, env=env(True))[0][0] == "SharedMemoryTransport"
    assert ranks.run(2, transports, env=env(False))[0][0] == "C10dTransport"

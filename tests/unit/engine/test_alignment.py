"""Blocks of codecs end with their tensors: where tensors lie, what that costs, and that slow ones move."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import cadenza
from cadenza import LevelPlan, Strategy, codecs
from cadenza.codecs import Codec
from cadenza.engine.alignment import aligned_starts
from cadenza.engine.layout import Layout
from cadenza.testing import Worker, workers
from support.compare import same_bits
from support.resuming import assert_resumes_after_every_step

SLOW = 1e-3
BLOCKS = [codecs.int8(), codecs.e3m0(), codecs.e3m0(back=codecs.int8())]


def build(width: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(3)))


def train(worker: Worker, strategy: Strategy, width: int, dtype: torch.dtype = torch.float32) -> dict[str, float]:
    """Let weights move by about 1 and biases by a thousandth of it; return how much of that has landed."""
    model = build(width).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    sync = cadenza.attach(model, optimizer, strategy)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    generator = torch.Generator().manual_seed(7)
    for name, p in model.named_parameters():
        p.grad = torch.randn(p.shape, generator=generator).to(dtype) * (SLOW if "bias" in name else 1.0)
    for _ in range(2):
        optimizer.step()
        sync.step()
    wanted = {name: 2 * p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {
        n: float((start[n] - p.detach() - wanted[n]).norm() / wanted[n].norm()) for n, p in model.named_parameters()
    }


@pytest.mark.parametrize("width", [8, 16, 64, 100])
@pytest.mark.parametrize("codec", BLOCKS, ids=repr)
def test_a_bias_moves_though_its_neighbour_moves_a_thousand_times_as_far(codec: Codec, width: int) -> None:
    with workers(2) as pool:
        missing = pool.run(train, cadenza.local_sgd(1, codec=codec), width)[0]
    assert max(missing.values()) < (0.02 if codec == codecs.int8() else 0.35), missing


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("codec", BLOCKS, ids=repr)
def test_it_moves_at_a_staged_level_and_beside_other_blocks(codec: Codec, offload: bool) -> None:
    inner = LevelPlan(1, groups=2, codec=codecs.int8(block=64), outer=cadenza.outer.sgd(lr=1.0))
    outer = LevelPlan(2, codec=codec, outer=cadenza.outer.sgd(lr=1.0))
    with workers(4) as pool:
        missing = pool.run(train, Strategy(levels=(inner, outer), offload=offload), 40)[0]
    assert max(missing.values()) < 0.35, missing


def test_staged_parts_are_cut_at_blocks() -> None:
    """An outer level alone is encoded: what a member of a pair sends across begins with a block of its own."""
    plans = (LevelPlan(1, groups=2), LevelPlan(1, codec=codecs.int8(), outer=cadenza.outer.sgd(lr=1.0)))
    with workers(4) as pool:
        missing = pool.run(train, Strategy(levels=plans), 24)[0]
    assert max(missing.values()) < 0.02, missing


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("codec", [codecs.int8(), codecs.error_feedback(codecs.e3m0(back=codecs.int8()))], ids=repr)
def test_it_resumes_after_every_step(codec: Codec, count: int) -> None:
    assert_resumes_after_every_step(cadenza.diloco(2, codec=codec), count=count, steps=5)


def test_what_lies_between_tensors_is_zeros_whatever_was_there() -> None:
    tensors = {"a": torch.ones(300), "b": torch.ones(2, 2).T, "c": torch.ones(5)}
    layout = Layout(tensors, home=None, align=256)
    dirty = [torch.full((strip.numel,), float("nan")) for strip in layout.strips]
    [flat] = layout.pack(dirty)
    assert flat.sum() == 309
    assert layout.places == {"a": (0, slice(0, 300)), "b": (0, slice(512, 516)), "c": (0, slice(768, 773))}
    assert layout.filled == 309 / 773


sizes = st.lists(st.one_of(st.integers(1, 40), st.integers(1, 5000), st.integers(1, 300_000)), min_size=1, max_size=60)


@settings(deadline=None, derandomize=True)
@given(sizes, st.sampled_from([16, 256, 512, 1024, 4096, 102_400]))
def test_padding_is_bounded_and_blocks_of_large_tensors_are_theirs_alone(sizes: list[int], block: int) -> None:
    starts = aligned_starts(tuple(sizes), block)
    ends = [start + size for start, size in zip(starts, sizes, strict=True)]
    assert starts[0] == 0
    assert all(end <= start for end, start in zip(ends, starts[1:], strict=False))
    bound = 2.0 if block <= 1024 else 1.25
    assert ends[-1] <= max(bound * sum(sizes), 65_536 if block <= 1024 else 0)
    for (start, size), (after, _) in pairwise([*zip(starts, sizes, strict=True), (-block, 0)]):
        if size >= 8 * block:
            assert start % block == 0
            assert after % block == 0


@pytest.mark.parametrize(("count", "size"), [(1000, 16), (5000, 40)])
def test_a_thousand_tiny_tensors_share(count: int, size: int) -> None:
    assert aligned_starts((size,) * count, 256) == tuple(range(0, size * count, size))


def test_values_that_need_no_blocks_lie_side_by_side() -> None:
    assert aligned_starts((3, 5, 7), 1) == (0, 3, 8)


def thaw(worker: Worker, codec: Codec) -> list[torch.Tensor]:
    """Train with a layer frozen, then with all: tensors move to other places in the flat values."""
    torch.manual_seed(3)
    model = build(20)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model[1].requires_grad_(requires_grad=False)
    sync = cadenza.attach(model, optimizer, cadenza.diloco(2, codec=codec))
    for step in range(6):
        if step == 3:
            model[1].requires_grad_(requires_grad=True)
        optimizer.zero_grad()
        model(torch.randn(4, 20, generator=worker.generator)).square().mean().backward()
        optimizer.step()
        sync.step()
    sync.finish()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("codec", [codecs.int8(), codecs.error_feedback(codecs.e3m0())], ids=repr)
def test_parameters_that_join_find_their_blocks(codec: Codec) -> None:
    with workers(3) as pool:
        first, *others = pool.run(thaw, codec)
    for other in others:
        assert all(same_bits(a, b) for a, b in zip(first, other, strict=True))

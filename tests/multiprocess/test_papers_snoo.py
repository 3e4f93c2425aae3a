"""SNOO on real ranks: DDP goes on averaging gradients in every step, FSDP2 keeps its shards."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import cadenza
from cadenza import LevelPlan, Strategy
from cadenza.testing.references import Nesterov, flat
from support.compare import same_bits
from support.models import CASES
from support.ranks import RankPool
from support.training import adam, values

PERIOD, STEPS = 3, 8


def under_ddp(auto: bool) -> list[torch.Tensor]:
    """The values after every step and after `finish()`, the end of which falls into a period."""
    rank, case = dist.get_rank(), CASES["mlp"]
    model = case.model(rank)
    ddp = DistributedDataParallel(model)
    inner = adam(model)
    sync = cadenza.attach(ddp, inner, cadenza.snoo(PERIOD), auto=auto)
    history = []
    for n in range(1, STEPS + 1):
        inner.zero_grad()
        case.backward(ddp, rank, n)
        inner.step()
        if not auto:
            sync.step()
        history.append(values(model))
    sync.finish()
    return [*history, values(model)]


def by_the_authors() -> list[torch.Tensor]:
    """Their code: torch's SGD, products rounded first, on a slow copy; the difference is its gradient."""
    rank, case = dist.get_rank(), CASES["mlp"]
    model = case.model(rank)
    ddp = DistributedDataParallel(model)
    inner = adam(model)
    slow = [p.detach().clone() for p in model.parameters()]
    outer = Nesterov(slow, lr=0.7, momentum=0.8)
    history = []
    for n in range(1, STEPS + 1):
        inner.zero_grad()
        case.backward(ddp, rank, n)
        inner.step()
        if n % PERIOD == 0:
            for copy, parameter in zip(slow, model.parameters(), strict=True):
                copy.grad = copy - parameter.detach()
            outer.step()
            for copy, parameter in zip(slow, model.parameters(), strict=True):
                parameter.data.copy_(copy)
        history.append(values(model))
    return [*history, values(model)]


def test_ddp_goes_on_and_the_outer_step_is_the_authors_to_the_bit(ranks: RankPool) -> None:
    ours, theirs = ranks.run(2, under_ddp, False), ranks.run(2, by_the_authors)
    for mine, other in zip(ours, theirs, strict=True):
        for n, (got, wanted) in enumerate(zip(mine, other, strict=True), start=1):
            assert same_bits(got, wanted), f"after step {n}: off by {(got - wanted).abs().max()}"
    assert all(same_bits(a, b) for a, b in zip(*ours, strict=True))


def test_a_framework_may_own_the_loop(ranks: RankPool) -> None:
    for automatic, by_hand in zip(ranks.run(2, under_ddp, True), ranks.run(2, under_ddp, False), strict=True):
        assert all(same_bits(a, b) for a, b in zip(automatic, by_hand, strict=True))


# ---- shards --------------------------------------------------------------------------------------------------------


def blocks() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))  # 3 rows on 2 shards are uneven


def batch(rank: int, n: int) -> torch.Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(1000 * n + rank))


def sharded(strategy: Strategy) -> list[torch.Tensor]:
    model = fully_shard(blocks(), mesh=init_device_mesh("cpu", (2,)))
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = cadenza.attach(model, inner, strategy)
    history = []
    for n in range(1, 2 * PERIOD + 1):
        inner.zero_grad()
        model(batch(dist.get_rank(), n)).square().mean().backward()
        inner.step()
        sync.step()
        history.append(flat([p.full_tensor() for p in model.parameters()]))  # type: ignore[attr-defined]
    sync.finish()
    return history


def whole() -> list[torch.Tensor]:
    model = blocks()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    slow, momentum, history = values(model), torch.zeros_like(values(model)), []
    for n in range(1, 2 * PERIOD + 1):
        inner.zero_grad()
        (sum(model(batch(rank, n)).square().mean() for rank in range(2)) / 2).backward()  # type: ignore[union-attr]
        inner.step()
        if n % PERIOD == 0:
            moved = slow - values(model)
            momentum = 0.8 * momentum + moved
            slow = slow - 0.7 * (0.8 * momentum + moved)
            nn.utils.vector_to_parameters(slow.clone(), model.parameters())
        history.append(values(model))
    return history


def test_on_shards_one_level_of_one_rank_each_does_the_same(ranks: RankPool) -> None:
    strategy = Strategy(levels=(LevelPlan(PERIOD, groups=1, outer=cadenza.nesterov(lr=0.7, momentum=0.8)),))
    expected = whole()
    for history in ranks.run(2, sharded, strategy):
        for n, (got, wanted) in enumerate(zip(history, expected, strict=True), start=1):
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-6, msg=lambda m, n=n: f"after step {n}: {m}")

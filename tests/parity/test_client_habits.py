"""What public programs give to torch's averaging works with ours, or is refused in words that say what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_wrapper
from torch.nn.parallel import DistributedDataParallel

from support.ranks import RankPool, outcome
from support.sides import OURS, TORCH, Side

BOTH = pytest.mark.parametrize("side", [TORCH, OURS], ids=str)


def of_rank(*shape: int, **options: Any) -> torch.Tensor:
    return torch.full(shape, float(dist.get_rank()), **options)


def plain() -> list[torch.Tensor]:
    return [of_rank(2), of_rank(3, dtype=torch.float64), of_rank()]


def leaves() -> list[torch.Tensor]:
    return [of_rank(2, requires_grad=True)]


def momentum() -> list[torch.Tensor]:
    layer = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    layer(torch.ones(1)).sum().backward()
    for parameter in layer.parameters():
        parameter.grad = of_rank(*parameter.shape)
    optimizer.step()
    return [state["momentum_buffer"] for state in optimizer.state.values()]


def statistics() -> list[torch.Tensor]:
    return [buffer.copy_(of_rank(2)) for buffer in nn.BatchNorm1d(2).buffers() if buffer.is_floating_point()]


def average_tensors(side: Side, make: Callable[[], list[torch.Tensor]]) -> list[float]:
    tensors = make()
    side.average_parameters(iter(tensors), None)
    return sorted({value for tensor in tensors for value in tensor.detach().flatten().tolist()})


@BOTH
@pytest.mark.parametrize("make", [plain, leaves, momentum, statistics], ids=lambda make: make.__name__)
def test_an_iterator_of_plain_tensors_is_averaged(ranks: RankPool, side: Side, make: Any) -> None:
    assert ranks.run(2, average_tensors, side, make) == [[0.5], [0.5]]


def average_with_averager(give: Callable[[torch.Tensor], Iterable[Any]], side: Side) -> list[float]:
    tensor = of_rank(2, requires_grad=True)
    tensor.sum().backward()
    side.PeriodicModelAverager(period=2).average_parameters(give(tensor))
    return tensor.tolist()


def as_a_group_with_a_generator(tensor: torch.Tensor) -> Iterable[Any]:
    return [{"params": (one for one in [tensor]), "lr": 0.1}]


def as_an_optimizers_groups(tensor: torch.Tensor) -> Iterable[Any]:
    return torch.optim.SGD([tensor], lr=0.1).param_groups


@pytest.mark.parametrize("give", [as_a_group_with_a_generator, as_an_optimizers_groups])
def test_an_averager_takes_groups_of_plain_tensors_that_have_gradients(ranks: RankPool, give: Any) -> None:
    assert ranks.run(2, average_with_averager, give, OURS) == [[0.5, 0.5]] * 2


def average_all_buffers() -> tuple[Any, ...]:
    return outcome(OURS.average_parameters, nn.BatchNorm1d(2).buffers(), None)


def test_buffers_with_a_counter_are_refused_and_the_message_says_what_to_pass(ranks: RankPool) -> None:
    for kind, error, text in ranks.run(2, average_all_buffers):
        assert (kind, error) == ("error", "UnsupportedTensorError")
        assert "parameter 2 has dtype int64" in text
        assert "t.is_floating_point()" in text


def gradients_under_a_wrapped_hook(side: Side, still_averaging: bool) -> list[list[float]]:
    ddp = DistributedDataParallel(nn.Linear(2, 1, bias=False))
    state = side.PostLocalSGDState(None, dist.group.WORLD, 1, still_averaging)
    ddp.register_comm_hook(state, fp16_compress_wrapper(side.post_localSGD_hook))
    found = []
    for _ in range(3):
        ddp.zero_grad()
        ddp(torch.full((1, 2), 1.0 + dist.get_rank())).sum().backward()
        found.append(ddp.module.weight.grad.flatten().tolist())
    return found


@pytest.mark.parametrize("still_averaging", [True, False])
def test_the_hook_works_inside_torchs_compressing_wrapper(ranks: RankPool, still_averaging: bool) -> None:
    theirs = ranks.run(2, gradients_under_a_wrapped_hook, TORCH, still_averaging)
    assert ranks.run(2, gradients_under_a_wrapped_hook, OURS, still_averaging) == theirs

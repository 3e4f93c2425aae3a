"""The post-local SGD hook beside torch's, under DistributedDataParallel in every way that it is used."""

import contextlib
import copy
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from support.compare import assert_models_agree, assert_parity, assert_same_on_ranks
from support.models import CASES
from support.ranks import RankPool
from support.sides import OURS, TORCH, Side


@dataclass(frozen=True)
class Way:
    """One way to use the hook."""

    case: str = "mlp"
    start: int = 3
    subgroup_size: int = 2
    allreduce: bool = True
    micro_batches: int = 1
    ddp: dict[str, Any] = field(default_factory=dict)


SMALL_BUCKETS = {"bucket_cap_mb": 0.0001}

WAYS = {
    "one_bucket": Way(),
    "several_buckets": Way(ddp=SMALL_BUCKETS),
    "no_gradient_averaging_after_the_switch": Way(allreduce=False, ddp=SMALL_BUCKETS),
    "local_from_the_start": Way(start=0),
    "never_local": Way(start=99),
    "subgroups_of_one": Way(subgroup_size=1),
    "unused_parameters": Way("unused_branch", ddp={"find_unused_parameters": True, **SMALL_BUCKETS}),
    "accumulation": Way(micro_batches=3, ddp=SMALL_BUCKETS),
    "accumulation_with_unused_parameters": Way("unused_branch", micro_batches=2, ddp={"find_unused_parameters": True}),
    "static_graph": Way(ddp={"static_graph": True, **SMALL_BUCKETS}),
    "static_graph_with_unused_parameters": Way("unused_branch", ddp={"static_graph": True}),
    "gradients_as_views": Way(ddp={"gradient_as_bucket_view": True, **SMALL_BUCKETS}),
    "frozen": Way("frozen", ddp=SMALL_BUCKETS),
    "tied": Way("tied_transformer", ddp=SMALL_BUCKETS),
    "batch_norm": Way("conv_channels_last", ddp=SMALL_BUCKETS),
    "parameter_groups": Way("param_groups"),
}


class Replica:
    """A model under DDP with one side's hook, its optimizer and averager."""

    def __init__(self, side: Side, way: Way) -> None:
        self.way, self.case, self.rank = way, CASES[way.case], dist.get_rank()
        self.ddp = DistributedDataParallel(self.case.model(self.rank), **way.ddp)
        subgroup, _ = dist.new_subgroups(way.subgroup_size)
        self.state = side.PostLocalSGDState(
            process_group=None,
            subgroup=subgroup,
            start_localSGD_iter=way.start,
            post_local_gradient_allreduce=way.allreduce,
        )
        self.ddp.register_comm_hook(self.state, side.post_localSGD_hook)
        self.optim = side.PostLocalSGDOptimizer(
            torch.optim.SGD(self.case.groups(self.ddp.module), lr=0.05, momentum=0.9),
            side.PeriodicModelAverager(period=4, warmup_steps=way.start),
        )

    def backward(self, step: int) -> list[int]:
        """Accumulate the micro-batches of a step; return the hook's count after each."""
        counts = []
        for micro in range(self.way.micro_batches):
            with self.quiet(micro < self.way.micro_batches - 1):
                data = self.case.data(self.rank, step * 10 + micro)
                self.case.loss(self.ddp, data).backward()
            counts.append(self.state.iter)
        return counts

    @contextlib.contextmanager
    def quiet(self, without_synchronisation: bool) -> Iterator[None]:
        with self.ddp.no_sync() if without_synchronisation else contextlib.nullcontext():
            yield

    def update(self) -> None:
        self.optim.step()
        if self.way.case == "conv_channels_last":  # torch's averaging loses it
            self.ddp.to(memory_format=torch.channels_last)
        self.optim.zero_grad()


def train_side_by_side(name: str, steps: int) -> list[list[int]]:
    way = WAYS[name]
    theirs, ours = Replica(TORCH, way), Replica(OURS, way)
    exact = dist.get_world_size() == 2
    counts = []
    for step in range(steps):
        where = f"step {step}"
        their_counts, our_counts = theirs.backward(step), ours.backward(step)
        assert our_counts == their_counts, where
        for i, (a, b) in enumerate(zip(theirs.ddp.parameters(), ours.ddp.parameters(), strict=True)):
            assert (a.grad is None) == (b.grad is None), f"{where}, gradient {i}"
            if a.grad is not None and b.grad is not None:
                assert_parity(f"{where}, gradient {i}", a.grad, b.grad, exact=exact)
        if step < way.start:
            gradients = [p.grad for p in ours.ddp.parameters() if p.grad is not None]
            assert_same_on_ranks(where, gradients)
        theirs.update()
        ours.update()
        assert_models_agree(theirs.ddp, ours.ddp, where, exact=exact)
        if not exact:
            ours.ddp.load_state_dict(theirs.ddp.state_dict())
            ours.optim.optim.load_state_dict(copy.deepcopy(theirs.optim.optim.state_dict()))
        counts.append(our_counts)
    return counts


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("way", list(WAYS))
def test_gradients_counts_and_parameters_agree(ranks: RankPool, world: int, way: str) -> None:
    counts = ranks.run(world, train_side_by_side, way, 9)
    assert counts == [counts[0]] * world
    assert counts[0][-1][-1] == min(WAYS[way].start, 9)


def test_several_buckets_are_several(ranks: RankPool) -> None:
    """Otherwise the tests above would not show that only the last one counts."""
    assert min(ranks.run(2, buckets_of_a_backward)) > 2


def buckets_of_a_backward() -> int:
    seen = []

    def count(_: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        seen.append(bucket.index())
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    case, rank = CASES["mlp"], dist.get_rank()
    ddp = DistributedDataParallel(case.model(rank), **SMALL_BUCKETS)
    ddp.register_comm_hook(None, count)
    for step in range(2):  # DDP cuts its buckets anew after the first backward
        seen.clear()
        case.backward(ddp, rank, step)
    return len(seen)


def state_of(side: Side) -> list[Any]:
    lines: list[str] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(f"{record.levelname} {record.getMessage()}")

    logger = logging.getLogger(side.PostLocalSGDState.__module__)
    logger.setLevel(logging.INFO)
    logger.addHandler(Lines())
    state = side.PostLocalSGDState(None, None, 2)
    told = [getattr(state, name) for name in TORCH.PostLocalSGDState.__slots__]

    class Bucket:
        def __init__(self, last: bool) -> None:
            self.is_last = lambda: last

    for last in (False, True, False, True, True):
        state.maybe_increase_iter(Bucket(last))
        told.append(state.iter)
    return [told, lines, hasattr(state, "__dict__")]


def test_the_state_counts_and_logs_alike(ranks: RankPool) -> None:
    assert ranks.run(1, state_of, OURS) == ranks.run(1, state_of, TORCH)


def train_with(hook_of: Side, state_of_side: Side) -> list[torch.Tensor]:
    case, rank = CASES["mlp"], dist.get_rank()
    ddp = DistributedDataParallel(case.model(rank))
    subgroup, _ = dist.new_subgroups(1)
    state = state_of_side.PostLocalSGDState(None, subgroup, 2)
    ddp.register_comm_hook(state, hook_of.post_localSGD_hook)
    optim = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(5):
        optim.zero_grad()
        case.backward(ddp, rank, step)
        optim.step()
    return [p.detach() for p in ddp.parameters()]


@pytest.mark.parametrize(("hook_of", "state_of_side"), [(OURS, TORCH), (TORCH, OURS)])
def test_hook_and_state_mix_with_torchs(ranks: RankPool, hook_of: Side, state_of_side: Side) -> None:
    theirs = ranks.run(2, train_with, TORCH, TORCH)
    ours = ranks.run(2, train_with, hook_of, state_of_side)
    for rank in range(2):
        for a, b in zip(theirs[rank], ours[rank], strict=True):
            assert torch.equal(a, b)

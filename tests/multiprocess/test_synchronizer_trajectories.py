"""Every preset walks the way of its plain reference, step by step; DiLoCo and its streaming kind also by hand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import cadenza
from cadenza import LevelPlan, Strategy, codecs
from cadenza.testing import references as algorithms
from cadenza.testing.encoded_mean import EncodedMean, row_of
from cadenza.testing.references import Workers
from support.compare import same_bits
from support.models import CASES
from support.ranks import RankPool
from support.training import adam, momentum_sgd, one_number, train
from support.trajectories import PRESETS, assert_same_way

SHARED = {"CADENZA_SHARED_MEMORY": "1"}
GLOO = {"CADENZA_SHARED_MEMORY": "0"}
EITHER_TRANSPORT = pytest.mark.parametrize("env", [SHARED, GLOO], ids=["shared memory", "gloo"])


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Ranks have one thread each, and sums in another order would be other bits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_walks_the_way_of_its_reference(ranks: RankPool, name: str, world: int) -> None:
    strategy, reference, bits = PRESETS[name]
    traces = ranks.run(world, train, strategy, 10, env=SHARED)
    assert_same_way(traces, reference(Workers(CASES["mlp"], world, momentum_sgd)), bits=bits)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_walks_the_same_way_over_gloo(ranks: RankPool, name: str) -> None:
    strategy, reference, _ = PRESETS[name]
    traces = ranks.run(3, train, strategy, 10, env=GLOO)
    assert_same_way(traces, reference(Workers(CASES["mlp"], 3, momentum_sgd)), bits=False)


PAIRS, ALL = [[0, 1], [2, 3]], [[0, 1, 2, 3]]


@EITHER_TRANSPORT
def test_hierarchical_walks_the_way_of_its_reference(ranks: RankPool, env: dict[str, str]) -> None:
    traces = ranks.run(4, train, cadenza.hierarchical({2: 2, 6: "all"}), 10, env=env)
    workers = Workers(CASES["mlp"], 4, momentum_sgd)
    assert_same_way(traces, algorithms.hierarchical(workers, 10, levels={2: PAIRS, 6: ALL}), bits=False)


def test_groups_need_not_be_equal_or_contiguous(ranks: RankPool) -> None:
    groups = ((0, 2, 3), (1,))
    traces = ranks.run(4, train, cadenza.hierarchical({2: groups, 4: "all"}), 7)
    workers = Workers(CASES["mlp"], 4, momentum_sgd)
    assert_same_way(traces, algorithms.hierarchical(workers, 7, levels={2: groups, 4: ALL}), bits=False)


def test_levels_whose_periods_do_not_nest_meet_at_their_own_steps(ranks: RankPool) -> None:
    traces = ranks.run(4, train, cadenza.hierarchical({2: 2, 5: "all"}), 11)
    workers = Workers(CASES["mlp"], 4, momentum_sgd)
    assert_same_way(traces, algorithms.hierarchical(workers, 11, levels={2: PAIRS, 5: ALL}), bits=False)
    assert traces[0].rounds == [(2, 0, 0), (4, 0, 0), (5, 1, 0), (6, 0, 0), (8, 0, 0), (10, 1, 0), (11, 1, 0)]


def test_the_outer_optimizer_may_be_any_of_torch(ranks: RankPool) -> None:
    outer = cadenza.outer.optimizer(torch.optim.Adam, lr=0.01)
    traces = ranks.run(2, train, Strategy(levels=(LevelPlan(4, outer=outer),)), 8, optimizer=adam)
    workers = Workers(CASES["mlp"], 2, adam)
    anchor = workers.snapshot()[0]
    reference = torch.optim.Adam([anchor], lr=0.01)
    for n in range(1, 9):
        workers.local_step(n)
        if n % 4 == 0:
            anchor.grad = algorithms.mean([anchor - x for x in workers.snapshot()])
            reference.step()
            for tensors in workers.parameters:
                algorithms.unflatten(anchor, tensors)
        for rank, expected in enumerate(workers.snapshot()):
            torch.testing.assert_close(traces[rank].history[n - 1], expected, rtol=1e-5, atol=1e-6)


def number_after_each_step(strategy: Strategy, steps: int) -> list[float]:
    """A number at 1 that moves by −0.1 a step on rank 0 and by −0.3 on rank 1; the last is after `finish()`."""
    model, sync, step = one_number(strategy)
    seen = [step([1.0, 3.0][dist.get_rank()]) for _ in range(steps)]
    sync.finish()
    return [*seen, model.x.item()]


@EITHER_TRANSPORT
def test_diloco_by_hand(ranks: RankPool, env: dict[str, str]) -> None:
    first, second = ranks.run(2, number_after_each_step, cadenza.diloco(2, defaults="paper"), 5, env=env)
    # Step 2: the workers are at 0.8 and 0.4, so δ is 0.2 and 0.6, 0.4 in the mean. m = 0.4; the outer step is
    # δ + 0.9·m = 0.76; the anchor goes to 1 − 0.7·0.76 = 0.468.
    assert first[:2] == pytest.approx([0.9, 0.468], abs=1e-6)
    assert second[:2] == pytest.approx([0.7, 0.468], abs=1e-6)
    # Step 4: δ is 0.4 again. m = 0.9·0.4 + 0.4 = 0.76; 0.4 + 0.9·0.76 = 1.084; 0.468 − 0.7·1.084 = −0.2908.
    assert first[2:4] == pytest.approx([0.368, -0.2908], abs=1e-6)
    assert second[2:4] == pytest.approx([0.168, -0.2908], abs=1e-6)
    # Step 5 is local. The end: δ is 0.1 and 0.3, 0.2 in the mean. m = 0.9·0.76 + 0.2 = 0.884;
    # 0.2 + 0.9·0.884 = 0.9956; −0.2908 − 0.7·0.9956 = −0.98772.
    assert first[4:] == pytest.approx([-0.3908, -0.98772], abs=1e-6)
    assert second[4:] == pytest.approx([-0.5908, -0.98772], abs=1e-6)


@EITHER_TRANSPORT
def test_streaming_diloco_by_hand(ranks: RankPool, env: dict[str, str]) -> None:
    strategy = cadenza.streaming_diloco(3, delay=1, alpha=0.5, outer_lr=0.4, defaults="paper", codec=codecs.fp32())
    first, second = ranks.run(2, number_after_each_step, strategy, 7, env=env)
    # Step 3, launch: the workers are at 0.7 and 0.1; δ is 0.3 and 0.9, 0.6 in the mean. They stay where they are.
    assert first[:3] == pytest.approx([0.9, 0.8, 0.7], abs=1e-6)
    assert second[:3] == pytest.approx([0.7, 0.4, 0.1], abs=1e-6)
    # Step 4, landing: m = 0.6; 0.6 + 0.9·0.6 = 1.14; the anchor goes to 1 − 0.4·1.14 = 0.544. The workers have come to
    # 0.6 and −0.2, and go half the way: (0.6 + 0.544)/2 = 0.572 and (−0.2 + 0.544)/2 = 0.172.
    assert first[3:6] == pytest.approx([0.572, 0.472, 0.372], abs=1e-6)
    assert second[3:6] == pytest.approx([0.172, -0.128, -0.428], abs=1e-6)
    # Step 6, launch: δ is taken against the anchor: 0.544 − 0.372 = 0.172 and 0.544 + 0.428 = 0.972, mean 0.572.
    # Step 7, landing: m = 0.9·0.6 + 0.572 = 1.112; 0.572 + 0.9·1.112 = 1.5728; anchor 0.544 − 0.4·1.5728 = −0.08512.
    # The workers are at 0.272 and −0.728: (0.272 − 0.08512)/2 = 0.09344 and (−0.728 − 0.08512)/2 = −0.40656.
    assert first[6] == pytest.approx(0.09344, abs=1e-6)
    assert second[6] == pytest.approx(-0.40656, abs=1e-6)
    # The end, without mixing: δ is −0.08512 − 0.09344 = −0.17856 and −0.08512 + 0.40656 = 0.32144, mean 0.07144.
    # m = 0.9·1.112 + 0.07144 = 1.07224; 0.07144 + 0.9·1.07224 = 1.036456; −0.08512 − 0.4·1.036456 = −0.4997024.
    assert first[7] == second[7] == pytest.approx(-0.4997024, abs=1e-6)


@EITHER_TRANSPORT
def test_kept_progress_by_hand(ranks: RankPool, env: dict[str, str]) -> None:
    strategy = cadenza.streaming_diloco(3, delay=1, outer_lr=0.4, outer_momentum=0.9, codec=codecs.fp32())
    assert strategy.keep_progress
    first, second = ranks.run(2, number_after_each_step, strategy, 7, env=env)
    # Step 3, launch, and step 4, landing: the anchor goes to 0.544 as above. The workers have moved by −0.1 and −0.3
    # since the launch, which stays theirs: 0.444 and 0.244.
    assert first[2:6] == pytest.approx([0.7, 0.444, 0.344, 0.244], abs=1e-6)
    assert second[2:6] == pytest.approx([0.1, 0.244, -0.056, -0.356], abs=1e-6)
    # Step 6, launch: δ is 0.3 and 0.9, so nothing has counted twice, and nothing is lost. Step 7, landing:
    # m = 0.9·0.6 + 0.6 = 1.14; 0.6 + 0.9·1.14 = 1.626; anchor 0.544 − 0.4·1.626 = −0.1064.
    assert (first[6], second[6]) == pytest.approx((-0.2064, -0.4064), abs=1e-6)
    # The end: δ is 0.1 and 0.3, 0.2 in the mean. m = 0.9·1.14 + 0.2 = 1.226; 0.2 + 0.9·1.226 = 1.3034;
    # −0.1064 − 0.4·1.3034 = −0.62776.
    assert first[7] == second[7] == pytest.approx(-0.62776, abs=1e-6)


def test_a_late_mean_by_hand(ranks: RankPool) -> None:
    first, second = ranks.run(2, number_after_each_step, cadenza.local_sgd(3, delay=2), 5)
    # Step 3, launch at 0.7 and 0.1: the mean is 0.4. Step 5, landing: since then the workers have moved by −0.2 and
    # −0.6, which stays theirs: 0.2 and −0.2. The end: the mean of the two.
    assert first == pytest.approx([0.9, 0.8, 0.7, 0.6, 0.2, 0.0], abs=1e-6)
    assert second == pytest.approx([0.7, 0.4, 0.1, -0.2, -0.2, 0.0], abs=1e-6)


def test_slowmo_by_hand(ranks: RankPool) -> None:
    first, second = ranks.run(2, number_after_each_step, cadenza.slowmo(2, alpha=1.0, beta=0.5), 4)
    # Step 2: the mean of 0.8 and 0.4 is 0.6; m = (1 − 0.6)/0.1 = 4; 1 − 0.1·4 = 0.6.
    # Step 4: the mean of 0.4 and 0.0 is 0.2; m = 0.5·4 + (0.6 − 0.2)/0.1 = 6; 0.6 − 0.1·6 = 0.
    assert first == pytest.approx([0.9, 0.6, 0.5, 0.0, 0.0], abs=1e-6)
    assert second == pytest.approx([0.7, 0.6, 0.3, 0.0, 0.0], abs=1e-6)


LEVELS = Strategy(
    levels=(
        LevelPlan(2, groups=2, name="rack"),
        LevelPlan(4, codec=codecs.int8(block=16), outer=cadenza.nesterov(), name="sea"),
    )
)


def staged_int8(codec: Any, pairs: list[list[torch.Tensor]]) -> torch.Tensor:
    """Each of a pair reduces half of the values with its neighbour, and meets its like of the other pair over int8."""
    numel = pairs[0][0].numel()
    half = row_of(numel, members=2, block=16)
    parts = []
    for start in (0, half):
        sums = [algorithms.mean([x[start : start + half] for x in pair]) * 0.5 for pair in pairs]
        parts.append(EncodedMean(codec, 2, sums[0].numel())(sums, [1.0, 1.0]))
    return torch.cat(parts)


def test_levels_may_differ_in_codec_and_outer_update(ranks: RankPool) -> None:
    traces = ranks.run(4, train, LEVELS, 9)
    workers = Workers(CASES["mlp"], 4, momentum_sgd)
    anchor = algorithms.flat_in_blocks(workers.parameters[0], 16)
    outer = torch.optim.SGD([anchor], lr=0.7, momentum=0.9, nesterov=True)
    history = []

    def meet_all() -> None:
        deltas = [anchor - algorithms.flat_in_blocks(tensors, 16) for tensors in workers.parameters]
        anchor.grad = staged_int8(codecs.int8(block=16), [deltas[:2], deltas[2:]])
        outer.step()
        for tensors in workers.parameters:
            algorithms.out_of_blocks(anchor, tensors, 16)

    for n in range(1, 10):
        workers.local_step(n)
        if n % 4 == 0:
            meet_all()
        elif n % 2 == 0:
            for pair in PAIRS:
                algorithms.average(workers, pair)
        history.append(workers.snapshot())
    meet_all()
    history.append(workers.snapshot())
    assert_same_way(traces, history, bits=False)
    assert [(r.step, r.level_name, r.codec) for r in traces[0].reports] == [
        (2, "rack", "fp32"),
        (4, "sea", "int8"),
        (6, "rack", "fp32"),
        (8, "sea", "int8"),
        (9, "sea", "int8"),
    ]


def test_an_outer_landing_sets_inner_anchors_and_keeps_their_momentum(ranks: RankPool) -> None:
    inner = LevelPlan(2, groups=2, outer=cadenza.outer.sgd(lr=1.0, momentum=0.5))
    traces = ranks.run(4, train, Strategy(levels=(inner, LevelPlan(4))), 10)
    workers = Workers(CASES["mlp"], 4, momentum_sgd)
    anchors = [workers.snapshot()[0] for _ in PAIRS]
    momenta = [torch.zeros_like(anchors[0]) for _ in PAIRS]
    history = []
    for n in range(1, 11):
        workers.local_step(n)
        if n % 4 == 0:
            algorithms.average(workers)
            for anchor in anchors:
                anchor.copy_(workers.snapshot()[0])
        elif n % 2 == 0:
            for pair, anchor, momentum in zip(PAIRS, anchors, momenta, strict=True):
                delta = algorithms.mean([anchor - workers.snapshot()[rank] for rank in pair])
                momentum.mul_(0.5).add_(delta)
                anchor.sub_(momentum)
                for rank in pair:
                    algorithms.unflatten(anchor, workers.parameters[rank])
        history.append(workers.snapshot())
    algorithms.average(workers)
    assert_same_way(traces, [*history, workers.snapshot()], bits=False)


@pytest.mark.parametrize(
    "strategy",
    [
        cadenza.local_sgd(4),
        cadenza.diloco(4, codec=codecs.int8()),
        cadenza.sparse_loco(4, density=0.1),
        cadenza.diloco(4, codec=codecs.error_feedback(codecs.e3m0())),
        cadenza.streaming_diloco(4, layers=1, delay=2),
        cadenza.local_sgd(4, codec=codecs.bf16(), delay=2),
        LEVELS,
        cadenza.diloco(4, offload=True, clip=0.1),
    ],
    ids=lambda strategy: strategy.levels[-1].codec.name + str(strategy.delay),
)
@EITHER_TRANSPORT
def test_all_ranks_end_with_the_same_bits(ranks: RankPool, strategy: Strategy, env: dict[str, str]) -> None:
    traces = ranks.run(4, train, strategy, 9, env=env)
    assert all(same_bits(trace.finished, traces[0].finished) for trace in traces)
    if not strategy.delay:
        for n in (4, 8):
            assert all(same_bits(trace.history[n - 1], traces[0].history[n - 1]) for trace in traces)
        assert not same_bits(traces[0].history[8], traces[1].history[8])


def test_the_norm_of_the_mean_difference_is_clipped(ranks: RankPool) -> None:
    [trace, _] = ranks.run(2, train, cadenza.diloco(4, clip=0.05, outer_lr=1.0, outer_momentum=0.0), 4)
    start = Workers(CASES["mlp"], 1, momentum_sgd).snapshot()[0]
    assert (trace.finished - start).norm().item() == pytest.approx(0.05, rel=1e-4)


def test_groups_of_unequal_depth_find_each_other(ranks: RankPool) -> None:
    """Only four of the five ranks go through a stage at the middle level; all of them meet at the outer one."""
    inner = LevelPlan(1, groups=((0, 1), (2, 3), (4,)))
    middle = LevelPlan(2, groups=((0, 1, 2, 3), (4,)))
    traces = ranks.run(5, train, Strategy(levels=(inner, middle, LevelPlan(4))), 5, timeout_s=20)
    levels = {1: inner.groups, 2: middle.groups, 4: [[0, 1, 2, 3, 4]]}
    reference = algorithms.hierarchical(Workers(CASES["mlp"], 5, momentum_sgd), 5, levels=levels)
    assert_same_way(traces, reference, bits=False)

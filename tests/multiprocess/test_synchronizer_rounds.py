"""When rounds run, who counts how much in them, what lands, and what they report."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import cadenza
from cadenza import LevelPlan, RoundReport, Strategy, codecs
from cadenza.engine.header import HEADER_BYTES
from cadenza.testing import references as algorithms
from cadenza.testing.encoded_mean import row_of
from cadenza.testing.references import Workers
from support.compare import same_bits
from support.models import CASES
from support.ranks import RankPool, outcome
from support.training import OneNumber, Trace, everyone, momentum_sgd, one_number, plain_sgd, train, values

Rounds = list[tuple[int, int, int]]


def rounds_of(ranks: RankPool, world: int, strategy: Strategy, steps: int) -> Rounds:
    """The step, level and fragment of every round, the same on all ranks."""
    traces: list[Trace] = ranks.run(world, train, strategy, steps)
    assert all(trace.rounds == traces[0].rounds for trace in traces)
    return traces[0].rounds


# ---- when ----------------------------------------------------------------------------------------------------------


def test_a_round_runs_every_period_after_the_warm_up(ranks: RankPool) -> None:
    strategy = cadenza.post_local_sgd(4, warmup_steps=3)
    assert rounds_of(ranks, 2, strategy, 13) == [(7, 0, 0), (11, 0, 0), (13, 0, 0)]


def test_finish_adds_no_round_where_all_have_just_met(ranks: RankPool) -> None:
    assert rounds_of(ranks, 2, cadenza.local_sgd(4), 8) == [(4, 0, 0), (8, 0, 0)]


def test_only_the_largest_due_level_runs(ranks: RankPool) -> None:
    strategy = cadenza.hierarchical({1: 1, 2: 2, 4: "all"})
    assert rounds_of(ranks, 4, strategy, 9) == [(2, 1, 0), (4, 2, 0), (6, 1, 0), (8, 2, 0), (9, 2, 0)]


def test_fragments_take_turns(ranks: RankPool) -> None:
    strategy = cadenza.local_sgd(6, fragments=cadenza.by_layers(1))
    expected = [(2, 0, 0), (4, 0, 1), (6, 0, 2), (8, 0, 0), (10, 0, 1), (12, 0, 2)]
    assert rounds_of(ranks, 2, strategy, 12) == [*expected, (12, 0, 0), (12, 0, 1)]


def test_levels_of_fragments_meet_where_inner_rounds_would_be(ranks: RankPool) -> None:
    plans = (LevelPlan(2, groups=2), LevelPlan(4))
    strategy = Strategy(levels=plans, fragments=cadenza.by_layers(2))
    # Fragment 0 of 2 is due at n % 2 == 1, and at every second of these at the outer level; fragment 1 at n % 2 == 0.
    assert rounds_of(ranks, 4, strategy, 8)[:8] == [
        (1, 1, 0),
        (2, 0, 1),
        (3, 0, 0),
        (4, 1, 1),
        (5, 1, 0),
        (6, 0, 1),
        (7, 0, 0),
        (8, 1, 1),
    ]


def test_a_period_may_change_at_milestones(ranks: RankPool) -> None:
    strategy = cadenza.local_sgd(cadenza.changing({1: 2, 5: 3}))
    assert [step for step, _, _ in rounds_of(ranks, 2, strategy, 12)] == [2, 4, 6, 9, 12]


def test_an_adaptive_period_follows_the_drift_alike_on_all_ranks(ranks: RankPool) -> None:
    shrinking = cadenza.diloco(cadenza.adaptive(4, target_drift=1e-6, minimum=1, maximum=8))
    growing = cadenza.local_sgd(cadenza.adaptive(2, target_drift=1e3, minimum=1, maximum=8))
    assert [step for step, _, _ in rounds_of(ranks, 3, shrinking, 8)] == [4, 6, 7, 8]
    assert [step for step, _, _ in rounds_of(ranks, 3, growing, 16)] == [2, 6, 14, 16]


def test_an_adaptive_period_follows_the_drift_of_late_rounds_too(ranks: RankPool) -> None:
    strategy = cadenza.diloco(cadenza.adaptive(3, target_drift=1e3, minimum=3, maximum=12), delay=1)
    steps = [step for step, _, _ in rounds_of(ranks, 2, strategy, 20)]
    assert steps[:2] != [3, 6], "the drift of the first round is known at step 4, and asks for a longer period"


# ---- who counts how much -------------------------------------------------------------------------------------------


def ten_or_thirty(rank: int) -> float:
    return [10.0, 30.0][rank]


def test_samples_weigh(ranks: RankPool) -> None:
    for strategy in (cadenza.local_sgd(2, weight="samples"), cadenza.diloco(2, outer_lr=1.0, outer_momentum=0.0)):
        weighted = Strategy(levels=strategy.levels, weight="samples")
        traces = ranks.run(2, train, weighted, 2, samples=ten_or_thirty)
        workers = Workers(CASES["mlp"], 2, momentum_sgd)
        workers.local_step(1)
        workers.local_step(2)
        expected = algorithms.mean(workers.snapshot(), [0.25, 0.75])
        torch.testing.assert_close(traces[0].history[1], expected)
        assert traces[0].reports[0].weights == traces[1].reports[0].weights == (0.25, 0.75)


def samples_by_level() -> list[Any]:
    """Two pairs; until the global round at step 4 rank r has seen 2r + 2 samples, all but 2 of them before step 2."""
    reports: list[RoundReport] = []
    strategy = Strategy(levels=(LevelPlan(2, groups=2), LevelPlan(4)), weight="samples")
    _, sync, _ = one_number(strategy, observers=[reports.append])
    for samples in (2.0 * dist.get_rank(), 0.0, 1.0, 1.0):
        sync.step(samples=samples)
    return [(report.level, report.weights) for report in reports]


def test_a_level_weighs_by_the_samples_since_its_own_last_round(ranks: RankPool) -> None:
    results = ranks.run(4, samples_by_level)
    assert results[3][0] == (0, pytest.approx((0.4, 0.6)))
    for result in results:
        assert result[1] == (1, pytest.approx((0.1, 0.2, 0.3, 0.4)))


def weigh_by_a_function() -> Any:
    weight = 1.0 + dist.get_rank()
    reports: list[RoundReport] = []
    model, _, step = one_number(cadenza.local_sgd(1, weight=lambda: weight), observers=[reports.append])
    # −0.1 on rank 0 and −0.4 on rank 1: (0.9 + 2 · 0.6) / 3
    step(1.0 + 3 * dist.get_rank())
    return model.x.item(), reports[0].weights


def test_a_function_weighs(ranks: RankPool) -> None:
    for value, weights in ranks.run(2, weigh_by_a_function):
        assert value == pytest.approx(0.7)
        assert weights == pytest.approx((1 / 3, 2 / 3))


def forget_the_samples() -> Any:
    _, sync, step = one_number(cadenza.local_sgd(2, weight="samples"))
    results = [outcome(step, 1.0), sync.clock]
    other = OneNumber()
    results.append(outcome(cadenza.attach, other, plain_sgd(other), sync.strategy, auto=True))
    sync.step(samples=1)
    sync.drain()  # a worker that has run out of data has none to give
    return results


def test_a_weight_by_samples_asks_for_them_at_the_first_step(ranks: RankPool) -> None:
    for (kind, error, text), clock, (_, _, about_auto) in ranks.run(2, forget_the_samples, timeout_s=20):
        assert (kind, error, clock) == ("error", "ValueError", 0)
        assert "sync.step(samples=len(batch))" in text
        assert "auto=False" in about_auto


def run_out_of_data(strategy: Strategy, batches: list[int]) -> Any:
    """Each rank has its own number of batches, then answers rounds until everyone is through."""
    reports: list[RoundReport] = []
    model, sync, step = one_number(strategy, observers=[reports.append])
    for _ in range(batches[dist.get_rank()]):
        step(1.0)
    sync.drain()
    sync.finish()
    return model.x.item(), sync.clock, [(report.step, report.weights) for report in reports]


def test_a_worker_without_data_answers_with_weight_0(ranks: RankPool) -> None:
    results = ranks.run(2, run_out_of_data, cadenza.local_sgd(2), [2, 5])
    # After step 2 both are at 0.8. Rank 0 stays there; rank 1 goes to 0.6 at step 4, and only it counts. Step 6 finds
    # both without data, but rank 1 has taken a step since then, which counts.
    for value, clock, rounds in results:
        assert value == pytest.approx(0.5)
        assert clock == 6
        assert rounds == [(2, (0.5, 0.5)), (4, (0.0, 1.0)), (6, (0.0, 1.0))]


def stand_still_at_the_end(strategy: Strategy) -> tuple[list[float], list[tuple[float, ...]]]:
    """Where the model is after the last round that had data, after draining and after finishing."""
    reports: list[RoundReport] = []
    model, sync, step = one_number(strategy, observers=[reports.append])
    for _ in range(4):
        step(1.0)
    seen = [model.x.item()]
    sync.drain()
    seen.append(model.x.item())
    sync.finish()
    return [*seen, model.x.item()], [report.weights for report in reports]


@pytest.mark.parametrize("strategy", [cadenza.diloco(2), cadenza.slowmo(2), cadenza.diloco(2, codec=codecs.int8())])
def test_a_round_without_any_data_takes_no_outer_step(ranks: RankPool, strategy: Strategy) -> None:
    for seen, weights in ranks.run(2, stand_still_at_the_end, strategy):
        assert seen[0] == seen[1] == seen[2]
        assert weights == [(0.5, 0.5)] * 3


def drain_in_the_warm_up() -> Any:
    model, sync, _ = one_number(cadenza.post_local_sgd(2, warmup_steps=4))
    model(1.0).backward()
    sync.average_gradients()
    sync.step()
    return outcome(sync.drain if dist.get_rank() == 1 else sync.average_gradients)


def test_running_out_of_data_in_the_warm_up_raises_on_every_rank(ranks: RankPool) -> None:
    for kind, _, text in ranks.run(3, drain_in_the_warm_up, timeout_s=20):
        assert kind == "error"
        assert "On rank 1: this worker ran out of data at step 1 of the warm-up (4 steps)" in text
    [(_, error, text)] = ranks.run(1, drain_alone_in_the_warm_up)
    assert (error, text[:31]) == ("CadenzaError", "This worker ran out of data at ")


def drain_alone_in_the_warm_up() -> Any:
    _, sync, _ = one_number(cadenza.post_local_sgd(2, warmup_steps=4))
    return outcome(sync.drain)


@pytest.mark.parametrize("strategy", [cadenza.local_sgd(2), cadenza.diloco(2)])
def test_one_worker_alone_reports_its_rounds(ranks: RankPool, strategy: Strategy) -> None:
    [trace] = ranks.run(1, train, strategy, 4)
    assert trace.rounds == [(2, 0, 0), (4, 0, 0)]
    for report in trace.reports:
        assert (report.bytes_sent, report.encoded_bytes, report.raw_bytes) == (0, 4 * NUMEL, 4 * NUMEL)
        assert (report.weights, report.participants) == ((1.0,), (0,))
        assert report.drift == pytest.approx(0.0, abs=1e-5)


@pytest.mark.parametrize(
    "strategy",
    [
        cadenza.diloco(3),
        cadenza.diloco(3, codec=codecs.int8()),
        cadenza.diloco(4, delay=2),
        cadenza.streaming_diloco(4, delay=2),
        cadenza.diloco(3, balanced=True),
        cadenza.hierarchical({2: 2, 6: "all"}),
        cadenza.local_sgd(cadenza.changing({1: 2, 5: 3})),
    ],
    ids=["diloco", "int8", "late", "streaming", "balanced", "hierarchical", "changing"],
)
def test_unequal_amounts_of_data_end_in_one_model(ranks: RankPool, strategy: Strategy) -> None:
    results = ranks.run(4, run_out_of_data, strategy, [3, 3, 9, 11], timeout_s=20)
    assert len({value for value, _, _ in results}) == 1
    if not strategy.balanced:
        assert len({clock for _, clock, _ in results}) == 1


@pytest.mark.parametrize("strategy", [cadenza.local_sgd(2), cadenza.diloco(2), cadenza.local_sgd(2, balanced=True)])
def test_one_worker_alone_finishes(ranks: RankPool, strategy: Strategy) -> None:
    [(value, _, _)] = ranks.run(1, run_out_of_data, strategy, [3], timeout_s=10)
    assert math.isfinite(value)


# ---- balanced ------------------------------------------------------------------------------------------------------


def at_unequal_speed(strategy: Strategy, periods: int, pauses: list[float]) -> dict[str, Any]:
    """Rank r needs pauses[r] seconds for a step; all go on for as many periods."""
    reports: list[RoundReport] = []
    model, sync, step = one_number(strategy, observers=[reports.append])
    steps, before = [], 0
    seen: list[float] = []
    while len(reports) < periods:
        time.sleep(pauses[dist.get_rank()])
        had = len(reports)
        seen.append(step(1.0))
        if len(reports) > had:
            steps.append(sync.clock - before)
            before = sync.clock
    seen_by_all = everyone(model.x.item())
    sync.finish()
    return {"steps": steps, "met": seen_by_all, "finished": model.x.item(), "weights": [r.weights for r in reports]}


def test_faster_workers_take_more_steps_in_a_period(ranks: RankPool) -> None:
    slow, fast = ranks.run(2, at_unequal_speed, cadenza.diloco(6, balanced=True), 4, [0.05, 0.005])
    assert slow["steps"][0] == fast["steps"][0] == 6
    assert all(many > few for many, few in zip(fast["steps"][1:], slow["steps"][1:], strict=True))
    assert len(set(slow["met"])) == 1
    assert slow["finished"] == fast["finished"]


def test_unequal_steps_are_put_on_an_equal_footing(ranks: RankPool) -> None:
    """Both move by −0.1 a step, so normalised differences point one way: mean steps · −0.1."""
    strategy = cadenza.diloco(4, balanced=True, outer_lr=1.0, outer_momentum=0.0)
    slow, fast = ranks.run(2, at_unequal_speed, strategy, 3, [0.05, 0.005])
    walked = sum((a + b) / 2 for a, b in zip(slow["steps"], fast["steps"], strict=True))
    assert slow["met"][0] == pytest.approx(1 - 0.1 * walked, abs=1e-4)


def move_apart(strategy: Strategy) -> Any:
    """Rank 0 is slow and moves by −0.1 a step, rank 1 is fast and does not move at all."""
    reports: list[RoundReport] = []
    model, sync, step = one_number(strategy, observers=[reports.append])
    counts = []
    last = 0
    while len(reports) < 2:
        time.sleep([0.05, 0.005][dist.get_rank()])
        had = len(reports)
        step([1.0, 0.0][dist.get_rank()])
        if len(reports) > had:
            counts.append(sync.clock - last)
            last = sync.clock
    return counts, model.x.item()


@pytest.mark.parametrize(
    "strategy",
    [cadenza.local_sgd(4, balanced=True), cadenza.diloco(4, balanced=True, outer_lr=1.0, outer_momentum=0.0)],
    ids=["mean", "sgd"],
)
def test_balanced_differences_are_normalised_by_steps(ranks: RankPool, strategy: Strategy) -> None:
    (slow, value), (fast, other) = ranks.run(2, move_apart, strategy)
    # FedNova: each difference is divided by its number of steps; the mean of them is taken as far as the mean number of
    # steps. Rank 0's is −0.1 a step, rank 1's is 0.
    walked = sum((a + b) / 2 * -0.1 / 2 for a, b in zip(slow, fast, strict=True))
    assert value == other == pytest.approx(1 + walked, abs=1e-5)


def balanced_with(options: dict[str, Any]) -> Any:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 1))
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    reports: list[RoundReport] = []
    sync = cadenza.attach(model, inner, cadenza.diloco(4, balanced=True, **options), observers=[reports.append])
    averages = []
    while len(reports) < 3 * len(sync.replica.fragments()):
        time.sleep([0.03, 0.003][dist.get_rank()])
        had = len(reports)
        inner.zero_grad()
        model(torch.randn(4, 2)).sum().backward()
        inner.step()
        sync.step()
        if len(reports) > had:
            with sync.averaged():
                averages.append(values(model))
    sync.finish()
    return values(model), averages[-1]


@pytest.mark.parametrize(
    "options",
    [{}, {"buffers": True}, {"optimizer_state": "average"}],
    ids=["alone", "buffers", "optimizer state"],
)
def test_balanced_goes_with_the_other_choices(ranks: RankPool, options: dict[str, Any]) -> None:
    first, second = ranks.run(2, balanced_with, options, timeout_s=20)
    assert same_bits(first[0], second[0])
    assert same_bits(first[1], second[1])


# ---- landing late --------------------------------------------------------------------------------------------------


def what_happens_in_flight() -> list[float]:
    """Both move; the landing of what was launched at step 3 comes at step 5, however long rank 1 is away meanwhile."""
    _, sync, step = one_number(cadenza.local_sgd(3, delay=2))
    seen = [step(1.0 + 2 * dist.get_rank()) for _ in range(3)]
    if dist.get_rank() == 1:
        time.sleep(0.3)  # rank 0 goes on training: a round without delay would make it wait here
    seen += [step(1.0 + 2 * dist.get_rank()) for _ in range(2)]
    sync.close()
    return seen


def test_training_goes_on_during_the_flight(ranks: RankPool) -> None:
    first, second = ranks.run(2, what_happens_in_flight)
    assert first[3] == pytest.approx(0.6)
    assert second[3] == pytest.approx(-0.2)
    assert first[4] == pytest.approx(0.4 + 0.5 - 0.7)
    assert second[4] == pytest.approx(0.4 - 0.5 - 0.1)


def several_in_flight() -> int:
    strategy = cadenza.streaming_diloco(6, layers=1, delay=5)
    model = CASES["mlp"].model(dist.get_rank())
    inner = plain_sgd(model)
    sync = cadenza.attach(model, inner, strategy)
    most = 0
    for n in range(1, 13):
        inner.zero_grad()
        CASES["mlp"].backward(model, dist.get_rank(), n)
        inner.step()
        sync.step()
        most = max(most, len(sync.replica.state.pending))
    sync.finish()
    return most


def test_several_fragments_fly_at_once(ranks: RankPool) -> None:
    assert ranks.run(2, several_in_flight) == [3, 3]


def test_a_delay_that_a_changing_period_overtakes_lands_in_time(ranks: RankPool) -> None:
    strategy = cadenza.diloco(cadenza.changing({1: 6, 6: 3}), delay=2)
    traces = ranks.run(2, train, strategy, 14)
    assert [step for step, _, _ in traces[0].rounds] == [6, 9, 12, 14]
    assert same_bits(traces[0].finished, traces[1].finished)


# ---- averaged() ----------------------------------------------------------------------------------------------------


def look_at_the_mean(strategy: Strategy) -> Any:
    rank = dist.get_rank()
    model = CASES["conv_channels_last"].model(rank)
    inner = momentum_sgd(model)
    sync = cadenza.attach(model, inner, strategy)

    def step(n: int) -> None:
        inner.zero_grad()
        CASES["conv_channels_last"].backward(model, rank, n)
        inner.step()
        sync.step()

    for n in range(1, 4):
        step(n)
    own = values(model)
    everyones = everyone(own)
    with sync.averaged() as same_model:
        assert same_model is model
        inside = values(model)
    back = same_bits(values(model), own)
    try:
        with sync.averaged():
            raise KeyError
    except KeyError:
        back = back and same_bits(values(model), own)
    for n in range(4, 7):
        step(n)
    sync.finish()
    return inside, algorithms.mean(everyones), back, values(model)


def train_only(strategy: Strategy) -> torch.Tensor:
    return train(strategy, 6, case="conv_channels_last").finished


@pytest.mark.parametrize(
    "strategy",
    [cadenza.local_sgd(5), cadenza.diloco(5), cadenza.diloco(3, delay=2), cadenza.local_sgd(2, buffers=True)],
    ids=["mean", "diloco", "in flight", "buffers"],
)
def test_averaged_shows_the_mean_and_gives_the_own_values_back(ranks: RankPool, strategy: Strategy) -> None:
    results = ranks.run(2, look_at_the_mean, strategy)
    undisturbed = ranks.run(2, train_only, strategy)
    for (inside, mean, back, finished), other in zip(results, undisturbed, strict=True):
        assert same_bits(inside, mean)
        assert back
        assert same_bits(finished, other)


# ---- reports -------------------------------------------------------------------------------------------------------

NUMEL = 6 * 16 + 16 + 16 * 8 + 8 + 8 * 3 + 3


IN_BLOCKS = 6 * 16 + 16 + 16 * 8 + 16 + 32 + 3  # of 16 values, at whose multiples tensors start


def encoded_rows(codec: codecs.Codec, world: int) -> int:
    """The bytes of what one member owns."""
    return codec.encoded_bytes(row_of(IN_BLOCKS, world, codec.block))


@pytest.mark.parametrize("world", [2, 3, 4])
def test_reports_count_the_bytes(ranks: RankPool, world: int) -> None:
    int8, topk = codecs.int8(block=16), codecs.topk(0.1)
    row = encoded_rows(int8, world)
    expected = {
        cadenza.local_sgd(2): (2 * (world - 1) * 4 * NUMEL // world, 4 * NUMEL),
        cadenza.diloco(2): (2 * (world - 1) * 4 * NUMEL // world, 4 * NUMEL),
        cadenza.diloco(2, codec=int8): (2 * (world - 1) * row, world * row),
        cadenza.diloco(2, codec=topk): ((world - 1) * topk.encoded_bytes(NUMEL), topk.encoded_bytes(NUMEL)),
    }
    for strategy, (sent, encoded) in expected.items():
        for trace in ranks.run(world, train, strategy, 2):
            [report] = trace.reports
            assert report.raw_bytes == 4 * NUMEL
            assert report.encoded_bytes == encoded
            sketch = 0 if encoded == report.raw_bytes else 4 * (1 << (NUMEL - 1).bit_length())  # for the drift
            assert report.bytes_sent == sent + (world - 1) * (HEADER_BYTES + 24 + sketch)


def test_reports_count_the_header_too(ranks: RankPool) -> None:
    [trace, _] = ranks.run(2, train, cadenza.diloco(2), 2)
    assert trace.reports[0].bytes_sent >= 4 * NUMEL + HEADER_BYTES


def test_reports_tell_what_a_round_was(ranks: RankPool) -> None:
    plans = (LevelPlan(2, groups=2, name="rack"), LevelPlan(4, codec=codecs.int8(), outer=cadenza.nesterov()))
    traces = ranks.run(4, train, Strategy(levels=plans), 5)
    for rank, trace in enumerate(traces):
        inner, outer, last = trace.reports
        assert (inner.step, outer.step, last.step) == (2, 4, 5)
        assert (inner.level_name, outer.level_name) == ("rack", "level 1")
        assert inner.participants == ((0, 1) if rank < 2 else (2, 3))
        assert outer.participants == (0, 1, 2, 3)
        assert inner.weights == (0.5, 0.5)
        assert outer.weights == (0.25,) * 4
        assert (inner.codec, outer.codec) == ("fp32", "int8")
        assert inner.codec_error is None
        assert outer.codec_error is not None
        assert 0 < outer.codec_error < 0.05
        assert inner.delay == outer.delay == 0
        for report in trace.reports:
            assert report.stall_s > 0
            assert report.wire_s > 0


def test_reports_tell_how_late_a_round_landed(ranks: RankPool) -> None:
    [trace, _] = ranks.run(2, train, cadenza.diloco(4, delay=3), 9)
    # The round of step 8 lands early, in finish() after step 9.
    assert [(report.step, report.delay) for report in trace.reports] == [(4, 3), (8, 1), (9, 0)]


def drift(rows: list[torch.Tensor], weights: list[float] | None = None) -> float:
    """sqrt(mean‖x_i − mean‖²) / ‖mean‖, in double precision."""
    wide = [row.double() for row in rows]
    share = weights or [1 / len(rows)] * len(rows)
    mean = sum((w * row for w, row in zip(share, wide, strict=True)), torch.zeros_like(wide[0]))
    spread2 = sum(w * (row - mean).square().sum().item() for w, row in zip(share, wide, strict=True))
    return math.sqrt(spread2) / mean.norm().item()


def three_parts(rank: int) -> float:
    return 1.0 + rank


@pytest.mark.parametrize(
    ("strategy", "weights"),
    [
        (cadenza.local_sgd(3), None),
        (cadenza.local_sgd(3, delay=1), None),
        (cadenza.diloco(3), None),
        (cadenza.diloco(3, delay=1), None),
        (cadenza.local_sgd(3, weight="samples"), [1 / 6, 2 / 6, 3 / 6]),
        (cadenza.diloco(3, weight="samples"), [1 / 6, 2 / 6, 3 / 6]),
    ],
    ids=["mean", "late mean", "diloco", "late diloco", "weighted mean", "weighted diloco"],
)
def test_drift_is_how_far_the_workers_had_spread(
    ranks: RankPool, strategy: Strategy, weights: list[float] | None
) -> None:
    traces = ranks.run(3, train, strategy, 4, samples=three_parts)
    workers = Workers(CASES["mlp"], 3, momentum_sgd)
    for n in range(1, 4):
        workers.local_step(n)
    assert traces[0].reports[0].drift == pytest.approx(drift(workers.snapshot(), weights), rel=1e-4)
    assert len({trace.reports[0].drift for trace in traces}) == 1


def test_drift_of_a_staged_level_is_that_of_all_workers(ranks: RankPool) -> None:
    traces = ranks.run(4, train, cadenza.hierarchical({2: 2, 3: "all"}), 3)
    workers = Workers(CASES["mlp"], 4, momentum_sgd)
    algorithms.hierarchical(workers, 2, levels={2: [[0, 1], [2, 3]]})
    workers = Workers(CASES["mlp"], 4, momentum_sgd)
    for n in (1, 2):
        workers.local_step(n)
    for pair in ([0, 1], [2, 3]):
        algorithms.average(workers, pair)
    workers.local_step(3)
    assert traces[0].reports[1].drift == pytest.approx(drift(workers.snapshot()), rel=1e-4)
    assert len({trace.reports[1].drift for trace in traces}) == 1


def test_drift_is_none_where_it_is_not_measured(ranks: RankPool) -> None:
    for strategy in (cadenza.local_sgd(2, measure_drift=False), cadenza.diloco(2, measure_drift=False)):
        [trace, _] = ranks.run(2, train, strategy, 2)
        assert trace.reports[0].drift is None

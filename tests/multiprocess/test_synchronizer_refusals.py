"""What cannot work is refused: on every rank alike, with the reason, before anything is changed."""

from __future__ import annotations

import threading
import time
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

import cadenza
import cadenza.engine.attach
from cadenza import LevelPlan, Strategy, codecs
from support.models import CASES
from support.ranks import RankPool, outcome
from support.training import everyone, momentum_sgd, one_number, values

WORLD_OF_3 = 3


def mlp(rank: int | None = None) -> nn.Module:
    return CASES["mlp"].model(dist.get_rank() if rank is None else rank)


def try_to_attach(model: nn.Module, strategy: Strategy, **options: Any) -> tuple[tuple[Any, ...], bool]:
    """What came of `attach`, and whether the parameters are as they were."""
    before = [p.detach().clone() for p in model.parameters()]
    result = outcome(cadenza.attach, model, momentum_sgd(model), strategy, **options)
    same = all(torch.equal(p, was) for p, was in zip(model.parameters(), before, strict=True))
    return (result if result[0] == "error" else ("ok",)), same


def assert_refused(results: list[tuple[tuple[Any, ...], bool]], kind: str, *words: str) -> None:
    """Every rank got the same error, it says the words, and nothing has changed."""
    __tracebackhide__ = True
    for result, unchanged in results:
        assert result[:2] == ("error", kind), result
        assert result[2] == results[0][0][2]
        for word in words:
            assert word in result[2], result[2]
        assert unchanged


# ---- preflight ------------------------------------------------------------------------------------------------------


def with_strategies(*strategies: Strategy) -> Any:
    return try_to_attach(mlp(), strategies[dist.get_rank() % len(strategies)])


INT8 = codecs.int8()
STRATEGIES = {
    "period": (cadenza.diloco(4), cadenza.diloco(8)),
    "outer": (cadenza.diloco(4), cadenza.diloco(4, outer_lr=0.5)),
    "preset": (cadenza.diloco(4), cadenza.local_sgd(4)),
    "codec": (cadenza.diloco(4), cadenza.diloco(4, codec=INT8)),
    "block of the codec": (cadenza.diloco(4, codec=INT8), cadenza.diloco(4, codec=codecs.int8(block=64))),
    "decay": (
        cadenza.diloco(4, codec=codecs.error_feedback(INT8)),
        cadenza.diloco(4, codec=codecs.error_feedback(INT8, decay=0.5)),
    ),
    "bits of the codec": (
        cadenza.diloco(4, codec=codecs.topk(bits=2)),
        cadenza.diloco(4, codec=codecs.topk(bits=4)),
    ),
    "fragments": (cadenza.diloco(4), cadenza.diloco(4, fragments=cadenza.by_layers(1))),
    "warm-up": (cadenza.diloco(4), cadenza.diloco(4, warmup_steps=3)),
    "delay": (cadenza.diloco(4), cadenza.diloco(4, delay=3)),
    "alpha": (cadenza.diloco(4, delay=1), cadenza.diloco(4, delay=1, alpha=0.1)),
    "progress": (cadenza.diloco(4, delay=1), cadenza.diloco(4, delay=1, keep_progress=True)),
    "buffers": (cadenza.diloco(4), cadenza.diloco(4, buffers=True)),
    "optimizer state": (cadenza.diloco(4), cadenza.diloco(4, optimizer_state="reset")),
    "weights": (cadenza.diloco(4), cadenza.diloco(4, weight="samples")),
    "balance": (cadenza.diloco(4), cadenza.diloco(4, balanced=True)),
}


@pytest.mark.parametrize("what", STRATEGIES)
def test_different_strategies_are_refused_on_every_rank(ranks: RankPool, what: str) -> None:
    results = ranks.run(WORLD_OF_3, with_strategies, *STRATEGIES[what], timeout_s=20)
    assert_refused(results, "DisagreementError", "rank 1", "ranks 0, 2")


def test_only_the_first_difference_of_strategies_is_told(ranks: RankPool) -> None:
    [(_, _, text), *_] = [result for result, _ in ranks.run(2, with_strategies, *STRATEGIES["period"], timeout_s=20)]
    assert "strategy.levels[0].schedule.period: 4 on rank" in text
    assert "strategy.levels[0].schedule.period: 8 on rank" in text
    assert "fragments" not in text
    assert "parameters differ" not in text


def with_another_version() -> Any:
    version = "9.9.9" if dist.get_rank() == 2 else cadenza.__version__
    with patch.object(cadenza.engine.attach, "__version__", version):
        return try_to_attach(mlp(), cadenza.diloco(4))


def test_different_versions_are_refused_on_every_rank(ranks: RankPool) -> None:
    assert_refused(ranks.run(3, with_another_version), "DisagreementError", "Cadenza 9.9.9 on rank 2", "ranks 0, 1")


class Odd(nn.Module):
    """A model that can differ between ranks in one thing at a time."""

    def __init__(self, difference: str) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6 if difference == "shape" else 5)
        dtype = torch.float64 if difference == "dtype" else torch.float32
        self.second = nn.Conv2d(2, 3, 3, dtype=dtype)
        if difference == "name":
            self.late, self.third = nn.Linear(2, 2), None
        else:
            self.third = nn.Linear(2, 2)
        if difference == "one more":
            self.fourth = nn.Linear(2, 2)
        self.register_buffer("seen", torch.zeros(3 if difference == "buffer" else 2))
        if difference == "memory format":
            self.second.to(memory_format=torch.channels_last)
        if difference == "frozen":
            self.first.requires_grad_(False)


def with_models(difference: str) -> Any:
    torch.manual_seed(dist.get_rank())
    return try_to_attach(Odd(difference if dist.get_rank() == 1 else ""), cadenza.diloco(4))


@pytest.mark.parametrize(
    ("difference", "words"),
    [
        ("shape", ["first.weight: (5, 4)", "first.weight: (6, 4)", "on rank 1"]),
        ("dtype", ["second.weight", "float64", "on rank 1"]),
        ("name", ["third", "late"]),
        ("one more", ["fourth.weight", "on rank 1"]),
        ("buffer", ["seen: (2,)", "seen: (3,)"]),
        ("memory format", ["second.weight", "rank 1"]),
        ("frozen", ["first.weight", "rank 1"]),
    ],
)
def test_different_models_are_refused_on_every_rank(ranks: RankPool, difference: str, words: list[str]) -> None:
    results = ranks.run(3, with_models, difference, timeout_s=20)
    assert_refused(results, "DisagreementError", *words)


def with_a_model_that_cannot_work_on_one_rank() -> Any:
    model = mlp()
    if dist.get_rank() == 1:
        model.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return outcome(cadenza.attach, model, optimizer, cadenza.diloco(4))[:2]


def test_a_model_without_trained_parameters_on_one_rank_is_refused_on_every_rank(ranks: RankPool) -> None:
    first, second = ranks.run(2, with_a_model_that_cannot_work_on_one_rank, timeout_s=10)
    assert first[0] == second[0] == "error"


def attach_here_and_there() -> list[float]:
    """Ranks 0 and 1 attach among themselves first, then all of them together."""
    pair = dist.new_group([0, 1])
    if dist.get_rank() < 2:
        _, sync, step = one_number(cadenza.local_sgd(1), process_group=pair)
        step(float(dist.get_rank()))
        sync.finish()
    model, sync, step = one_number(cadenza.local_sgd(1))
    step(float(dist.get_rank()))
    sync.finish()
    return [model.x.item()]


def test_ranks_that_have_attached_elsewhere_before_still_find_each_other(ranks: RankPool) -> None:
    assert ranks.run(3, attach_here_and_there, timeout_s=20) == [[pytest.approx(0.9)]] * 3


# ---- wrong arguments ---------------------------------------------------------------------------------------------


def wrong_arguments() -> list[tuple[Any, ...]]:
    model = mlp()
    inner = momentum_sgd(model)
    strategy = cadenza.diloco(4)
    scaler = torch.amp.GradScaler("cpu")
    return [
        outcome(cadenza.attach, model, inner, "diloco"),
        outcome(cadenza.attach, model, inner, cadenza.diloco),
        outcome(cadenza.attach, "model", inner, strategy),
        outcome(cadenza.attach, model, "optimizer", strategy),
        outcome(cadenza.attach, model, [inner, "optimizer"], strategy),
        outcome(cadenza.attach, model, None, strategy),
        outcome(cadenza.attach, model, inner, strategy, process_group="world"),
        outcome(cadenza.attach, nn.ReLU(), inner, strategy),
        outcome(cadenza.attach, nn.Linear(2, 2, device="meta"), inner, strategy),
        outcome(cadenza.attach, model, inner, strategy, scaler=scaler),
        outcome(cadenza.attach, model, inner, cadenza.diloco(4, warmup_steps=2), auto=True, scaler=scaler),
        outcome(cadenza.attach, model, inner, strategy, topology=cadenza.Topology.from_sizes([1, 2], ranks=[0, 1])),
    ]


def test_wrong_arguments_are_named(ranks: RankPool) -> None:
    expected = [
        ("TypeError", "cadenza.Strategy is required"),
        ("TypeError", "cadenza.Strategy is required"),
        ("TypeError", "torch.nn.Module is required"),
        ("TypeError", "torch.optim.Optimizer is required"),
        ("TypeError", "torch.optim.Optimizer is required"),
        ("TypeError", "torch.optim.Optimizer is required"),
        ("TypeError", "process group is required"),
        ("UnsupportedModelError", "no parameter with requires_grad=True"),
        ("UnsupportedModelError", "meta device"),
        ("ValueError", "scaler belongs to auto=True"),
        ("ValueError", "before they are unscaled"),
        ("TopologyError", "2 levels and the strategy 1"),
    ]
    for results in ranks.run(2, wrong_arguments):
        for (kind, words), got in zip(expected, results, strict=True):
            assert got[0] == "error", (words, got)
            assert got[1] == kind, (words, got)
            assert words in got[2], (words, got)


def attach_without_a_group() -> Any:
    model = mlp(0)
    return outcome(cadenza.attach, model, momentum_sgd(model), cadenza.diloco(4))


def test_without_a_process_group_it_says_what_to_call(ranks: RankPool) -> None:
    [result] = ranks.run(1, attach_without_a_group, init=False)
    assert result[1] == "NotInitializedError"
    assert "init_process_group" in result[2]


def groups_that_leave_ranks_out() -> Any:
    return try_to_attach(mlp(), Strategy(levels=(LevelPlan(4, groups=((0, 1),)),)))[0][:2]


def test_groups_that_leave_ranks_out_are_refused_on_every_rank(ranks: RankPool) -> None:
    results = ranks.run(3, groups_that_leave_ranks_out, timeout_s=20)
    assert results == [("error", "TopologyError")] * 3


def more_fragments_than_steps(warmup_steps: int) -> Any:
    strategy = cadenza.diloco(2, fragments=cadenza.by_layers(1), warmup_steps=warmup_steps)
    return try_to_attach(mlp(), strategy)


@pytest.mark.parametrize("warmup_steps", [0, 2])
def test_more_fragments_than_steps_in_a_period_are_refused_at_the_door(ranks: RankPool, warmup_steps: int) -> None:
    results = ranks.run(2, more_fragments_than_steps, warmup_steps)
    assert_refused(results, "ValueError", "3 fragments cannot take turns within a period of 2 steps")


# ---- values that are not finite ------------------------------------------------------------------------------------


def spoil_and_repair(strategy: Strategy, bad: float) -> dict[str, Any]:
    """Rank 1 gets a bad value in its third parameter before the first round, and repairs it after the error."""
    rank = dist.get_rank()
    model = mlp()
    inner = momentum_sgd(model)
    sync = cadenza.attach(model, inner, strategy)
    seen: dict[str, Any] = {}

    def step(n: int) -> Any:
        inner.zero_grad()
        CASES["mlp"].backward(model, rank, n)
        inner.step()
        if n == 2 and rank == 1:
            seen["good"] = list(model.parameters())[2].detach().clone()
            with torch.no_grad():
                list(model.parameters())[2][3, 1] = bad
        before = [p.detach().clone() for p in model.parameters()]
        result = outcome(sync.step, samples=1)
        if result[0] == "error":
            seen["error"] = result
            seen["unchanged"] = all(
                torch.equal(a, b) or not torch.isfinite(b).all()
                for a, b in zip(model.parameters(), before, strict=True)
            )
            if rank == 1:
                with torch.no_grad():
                    list(model.parameters())[2].copy_(seen["good"])
        return result

    for n in range(1, 7):
        step(n)
    sync.finish()
    seen["finished"] = values(model)
    return seen


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "strategy",
    [
        cadenza.local_sgd(2),
        cadenza.diloco(2),
        cadenza.diloco(2, codec=INT8),
        cadenza.sparse_loco(2),
        cadenza.local_sgd(2, weight="samples"),
        cadenza.hierarchical({2: "all", 4: "all"}),
    ],
    ids=["mean", "nesterov", "int8", "sparse", "samples", "two levels"],
)
def test_a_bad_value_on_one_rank_is_told_to_all_and_can_be_repaired(
    ranks: RankPool, strategy: Strategy, bad: float
) -> None:
    results = ranks.run(3, spoil_and_repair, strategy, bad)
    for result in results:
        assert result["error"][1] == "NotFiniteError"
        assert "On rank 1: parameter 2.weight is not finite" in result["error"][2]
        assert "at step 2" in result["error"][2]
        assert result["error"][2] == results[0]["error"][2]
        assert result["unchanged"]
        assert torch.isfinite(result["finished"]).all()
        assert torch.equal(result["finished"], results[0]["finished"])


def spoil_late(delay: int) -> Any:
    rank = dist.get_rank()
    model, sync, step = one_number(cadenza.diloco(3, delay=delay))
    outcomes = []
    for n in range(1, 7):
        if n == 3 and rank == 1:
            with torch.no_grad():
                model.x.fill_(float("nan"))
        outcomes.append(outcome(step, 1.0)[:2])
        if outcomes[-1][0] == "error" and rank == 1:
            with torch.no_grad():
                model.x.fill_(0.5)
    sync.finish()
    return outcomes, model.x.item()


def test_a_bad_value_in_a_late_round_is_told_at_its_landing(ranks: RankPool) -> None:
    results = ranks.run(2, spoil_late, 2)
    for outcomes, finished in results:
        assert [kind for kind, _ in outcomes] == ["ok", "ok", "ok", "ok", "error", "ok"]
        assert outcomes[4][1] == "NotFiniteError"
        assert finished == results[0][1]


def a_wrong_weight() -> Any:
    weight = -1.0 if dist.get_rank() == 1 else 1.0
    _, _, step = one_number(cadenza.diloco(2, weight=lambda: weight))
    step(1.0)
    return outcome(step, 1.0)


def test_a_negative_weight_on_one_rank_is_told_to_all(ranks: RankPool) -> None:
    results = ranks.run(2, a_wrong_weight, timeout_s=15)
    assert [result[0] for result in results] == ["error", "error"]
    assert all("-1" in result[2] and "rank 1" in result[2] for result in results), results


# ---- the life of a synchronizer ------------------------------------------------------------------------------------


def use_after_finish() -> list[Any]:
    _, sync, step = one_number(cadenza.local_sgd(2))
    step(1.0)
    sync.finish()
    calls = [sync.step, sync.finish, sync.drain, sync.average_gradients, lambda: sync.averaged().__enter__()]
    results = [outcome(call) for call in calls]
    sync.close()  # closing twice does no harm
    return results


def test_a_finished_synchronizer_says_so(ranks: RankPool) -> None:
    for results in ranks.run(2, use_after_finish):
        for result in results:
            assert result[1] == "CadenzaError"
            assert "attach a new one" in result[2]


class Boom(Exception):
    pass


def leave_by_an_exception(strategy: Strategy, leaver: int) -> Any:
    _, sync, step = one_number(strategy)

    def block() -> None:
        with sync:
            for n in range(1, 9):
                step(1.0)
                if n == 3 and dist.get_rank() == leaver:
                    raise Boom

    result = outcome(block)
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("cadenza")]
    for thread in threads:
        thread.join(10)
    return result[:2], outcome(sync.step)[1], any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize("delay", [0, 2])
@pytest.mark.parametrize("env", [{}, {"CADENZA_SHARED_MEMORY": "0"}], ids=["shared memory", "gloo"])
def test_leaving_by_an_exception_starts_no_collective_and_lets_the_others_go(
    ranks: RankPool, env: dict[str, str], delay: int
) -> None:
    strategy = cadenza.diloco(4, delay=delay)
    left, stayed = ranks.run(
        2, leave_by_an_exception, strategy, 0, env=env, group_timeout_s=4, timeout_s=30, discard=True
    )
    assert left == (("error", "Boom"), "CadenzaError", False)
    assert stayed == (("error", "RoundAbortedError"), "CadenzaError", False)


def leave_together_in_mid_flight() -> Any:
    """Rank 1 never comes to the round that rank 0 has launched, and both leave."""
    _, sync, step = one_number(cadenza.diloco(4, delay=3))

    def block() -> None:
        with sync:
            for _ in range(5 if dist.get_rank() == 0 else 3):
                step(1.0)
            raise Boom

    result = outcome(block)
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("cadenza")]
    for thread in threads:
        thread.join(10)
    return result[1], any(thread.is_alive() for thread in threads)


def test_leaving_in_mid_flight_leaves_no_thread_behind(ranks: RankPool) -> None:
    results = ranks.run(2, leave_together_in_mid_flight, discard=True, group_timeout_s=60, timeout_s=40)
    assert results == [("Boom", False)] * 2


def stay_away() -> Any:
    _, _, step = one_number(cadenza.local_sgd(2))
    step(1.0)
    if dist.get_rank() == 1:
        time.sleep(4)
        return None
    return outcome(step, 1.0)[:2]


@pytest.mark.parametrize("env", [{}, {"CADENZA_SHARED_MEMORY": "0"}], ids=["shared memory", "gloo"])
def test_the_timeout_of_the_process_group_is_that_of_its_rounds(ranks: RankPool, env: dict[str, str]) -> None:
    [waited, _] = ranks.run(2, stay_away, group_timeout_s=2, timeout_s=20, env=env, discard=True)
    assert waited[0] == "error", waited


def blocks() -> Any:
    model, sync, step = one_number(cadenza.local_sgd(4))
    with sync as entered:
        assert entered is sync
        step(float(dist.get_rank()))
    after = model.x.item(), outcome(step, 0.0)[1]
    _, sync, step = one_number(cadenza.local_sgd(4))
    with sync:
        step(1.0)
        sync.finish()  # the end of the block does not mind
    return after


def test_the_end_of_a_block_finishes(ranks: RankPool) -> None:
    assert ranks.run(2, blocks) == [(pytest.approx(0.95), "CadenzaError")] * 2


def attach_many_times() -> int:
    for _ in range(5):
        model, sync, step = one_number(cadenza.diloco(2))
        for _ in range(3):
            step(float(dist.get_rank()))
        sync.finish()
    return len(everyone(model.x.item()))


def test_one_can_attach_again_and_again(ranks: RankPool) -> None:
    assert ranks.run(2, attach_many_times) == [2, 2]


def steps_apart() -> Any:
    model = mlp()
    inner = momentum_sgd(model)
    sync = cadenza.attach(model, inner, cadenza.local_sgd(2))
    sync.step()
    if dist.get_rank() == 1:
        sync.replica.state.clock += 2
    before = values(model)
    return outcome(sync.step), torch.equal(values(model), before)


def test_clocks_that_differ_are_told_to_all(ranks: RankPool) -> None:
    for result, unchanged in ranks.run(2, steps_apart):
        assert result[1] == "DisagreementError"
        assert "step 2 on rank 0" in result[2]
        assert "step 4 on rank 1" in result[2]
        assert unchanged


def observe_badly() -> Any:
    """Rank 0's observer raises at every round."""

    def fail(report: cadenza.RoundReport) -> None:
        if dist.get_rank() == 0:
            raise KeyError(report.step)

    model, sync, step = one_number(cadenza.local_sgd(2), observers=[fail])
    for _ in range(4):
        step(float(dist.get_rank()))
    sync.finish()
    return model.x.item()


def test_an_observer_that_raises_does_not_end_the_run(ranks: RankPool) -> None:
    assert ranks.run(2, observe_badly) == [pytest.approx(0.8)] * 2


def attached_inside_its_ddp(over: str) -> tuple[Any, ...]:
    """What is said to a module that was taken out of the DDP that still averages its gradients."""
    alone = dist.new_subgroups(1)[0] if over == "itself" else None
    model = torch.nn.Linear(3, 2)
    whole = torch.nn.Sequential(model) if over == "everyone, as a part" else model
    wrapped = torch.nn.parallel.DistributedDataParallel(whole, process_group=alone)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    return outcome(lambda: cadenza.attach(model, optimizer, cadenza.local_sgd(4)).clock)


def test_a_module_whose_ddp_goes_on_averaging_is_refused(ranks: RankPool) -> None:
    for over in ("everyone", "everyone, as a part"):
        for kind, name, text in ranks.run(2, attached_inside_its_ddp, over):
            assert (kind, name) == ("error", "UnsupportedModelError")
            assert "Pass the DistributedDataParallel itself to attach()" in text
    assert ranks.run(2, attached_inside_its_ddp, "itself") == [("ok", 0)] * 2, "a DDP of fewer ranks is no harm"

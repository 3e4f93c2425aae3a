"""Workers that die, hang, come late, come back and lie, while the others train on."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

import cadenza
from cadenza.errors import TurnedAwayError
from cadenza.participants.store import serve
from support.faults import QUICK, build, join, kill, rank, stop_for, train
from support.ranks import RankPool, outcome


def strategies() -> dict[str, cadenza.Strategy]:
    faults = cadenza.shrink(**QUICK)
    feedback = cadenza.codecs.error_feedback(cadenza.codecs.int8())
    return {
        "mean": cadenza.local_sgd(period=5, faults=faults),
        "feedback": cadenza.diloco(period=5, outer_lr=0.5, codec=feedback, faults=faults),
        "late": cadenza.streaming_diloco(period=6, delay=2, layers=1, faults=faults),
        "adaptive": cadenza.sparse_loco(cadenza.adaptive(4, target_drift=0.1, minimum=3, maximum=12), faults=faults),
    }


def killed_at(port: int, name: str, step: int, steps: int) -> dict[str, Any]:
    at = {step: kill} if rank() == 1 else None
    return train(port, 3, strategies()[name], steps, at=at, step_s=0.02)


@pytest.mark.parametrize("name", ["mean", "feedback", "late", "adaptive"])
def test_the_others_go_on_when_a_worker_is_killed(ranks: RankPool, store: int, name: str) -> None:
    results = ranks.run(3, killed_at, store, name, 18, 30, init=False, expect_dead={1})
    first, last = results[0], results[2]
    assert first["taken"] == last["taken"] == 30
    assert torch.equal(first["values"], last["values"])
    assert first["participants"][0] == (0, 1, 2)
    assert first["participants"][-1] == (0, 2)
    assert first["rounds"] == last["rounds"]


def killed_and_started_again(port: int) -> Any:
    strategy = cadenza.diloco(period=5, outer_lr=0.5, faults=cadenza.shrink(**QUICK))
    if rank() < 3:
        return train(port, 3, strategy, 60, at={12: kill} if rank() == 1 else None, step_s=0.04)
    time.sleep(1.5)  # worker 1 is dead by then, or dies yet: its place is taken either way
    return train(port, 3, strategy, 60, worker=1, step_s=0.04)


def test_a_worker_that_is_started_again_takes_the_others_state_and_step(ranks: RankPool, store: int) -> None:
    first, _, third, again = ranks.run(4, killed_and_started_again, store, init=False, expect_dead={1})
    assert torch.equal(first["values"], third["values"])
    assert torch.equal(first["values"], again["values"])
    assert again["joined_at"] > 0
    assert again["taken"] == 60 - again["joined_at"]
    assert first["taken"] == 60
    assert first["participants"][-1] == (0, 1, 2)


def killed_before_the_first_round(port: int) -> Any:
    strategy = cadenza.diloco(period=40, outer_lr=0.5, faults=cadenza.shrink(**QUICK))
    if rank() < 3:
        return train(port, 3, strategy, 120, at={5: kill} if rank() == 1 else None, step_s=0.05)
    time.sleep(1.0)
    return train(port, 3, strategy, 120, worker=1, step_s=0.05)


def test_a_worker_that_died_before_the_first_round_is_not_taken_for_its_next_process(
    ranks: RankPool, store: int
) -> None:
    first, _, _, again = ranks.run(4, killed_before_the_first_round, store, init=False, expect_dead={1})
    assert again["joined_at"] in (40, 80)
    assert torch.equal(first["values"], again["values"])


def all_die(port: int) -> None:
    train(port, 2, cadenza.local_sgd(period=5, faults=cadenza.shrink(**QUICK)), 100, at={12: kill})


def all_are_new(port: int) -> tuple[Any, ...]:
    strategy = cadenza.local_sgd(period=5, faults=cadenza.shrink(grace_s=0.8, first_s=20.0))
    return outcome(train, port, 2, strategy, 100)


def test_workers_of_which_none_has_trained_do_not_wait_for_those_who_have(ranks: RankPool, store: int) -> None:
    ranks.run(2, all_die, store, init=False, expect_dead={0, 1})
    told = ranks.run(2, all_are_new, store, init=False)
    assert [one[:2] for one in told] == 2 * [("error", "NobodyLeftError")]


def stopped(port: int) -> dict[str, Any]:
    strategy = cadenza.diloco(period=5, outer_lr=0.5, faults=cadenza.shrink(**QUICK))
    return train(port, 3, strategy, 80, at={13: stop_for(2.0)} if rank() == 1 else None, step_s=0.05)


def test_a_worker_that_hangs_is_left_out_and_comes_back_with_its_work(ranks: RankPool, store: int) -> None:
    results = ranks.run(3, stopped, store, init=False)
    assert all(torch.equal(results[0]["values"], other["values"]) for other in results)
    assert (0, 2) in results[0]["participants"]
    assert results[0]["participants"][-1] == (0, 1, 2)
    assert results[0]["taken"] == results[2]["taken"] == 80
    assert results[1]["taken"] < 80, "it went on from the step of the others"
    assert results[1]["clock"] == 80


def poisoned(port: int, how: str, policy: str) -> dict[str, Any]:
    def poison(sync: Any) -> None:
        with torch.no_grad():
            for parameter in sync.replica.view.model.parameters():
                parameter.mul_(float("nan") if how == "nan" else 1e4)

    faults = cadenza.shrink(poison=policy, **QUICK)  # type: ignore[arg-type]
    strategy = cadenza.diloco(period=5, outer_lr=0.5, faults=faults)
    return train(port, 3, strategy, 20, at={10: poison} if rank() == 1 else None)


@pytest.mark.parametrize(("how", "policy"), [("nan", "leave_out"), ("explosion", "leave_out"), ("nan", "skip")])
def test_poison_reaches_nobody_and_its_worker_starts_from_the_anchor(
    ranks: RankPool, store: int, how: str, policy: str
) -> None:
    results = ranks.run(3, poisoned, store, how, policy, init=False)
    assert all(torch.equal(results[0]["values"], other["values"]) for other in results)
    assert results[0]["values"].isfinite().all()
    assert results[0]["values"].abs().max() < 100
    for result in results:
        assert any("worker 1 " in reason for reason in result["reasons"])
        assert 10 in result["rounds" if policy == "leave_out" else "failed"]
        assert result["rounds"][-1] == 20


def with_secrets(port: int) -> Any:
    strategy = cadenza.diloco(period=5, faults=cadenza.shrink(**QUICK))
    if rank() < 2:
        return outcome(train, port, 2, strategy, 40, secret="our word", step_s=0.05)
    time.sleep(0.5)
    strategy = cadenza.diloco(period=5, faults=cadenza.shrink(grace_s=1.0, first_s=2.0))
    return outcome(train, port, 2, strategy, 40, secret="another" if rank() == 2 else None, step_s=0.05)


@pytest.mark.parametrize("private", [False, True])
def test_who_does_not_know_the_secret_is_turned_away(ranks: RankPool, private: bool) -> None:
    store = serve(host="127.0.0.1", secret="our word" if private else None)
    first, second, *strangers = ranks.run(4, with_secrets, store.port, init=False)
    assert first[0] == second[0] == "ok"
    assert torch.equal(first[1]["values"], second[1]["values"])
    assert set(first[1]["participants"]) == {(0, 1)}
    for stranger in strangers:
        assert stranger[:2] == ("error", TurnedAwayError.__name__)
        assert "CADENZA_SECRET" in stranger[2]


def another_model(port: int) -> Any:
    strategy = cadenza.diloco(period=5, faults=cadenza.shrink(**QUICK))
    if rank() < 2:
        return outcome(train, port, 2, strategy, 40, step_s=0.05)
    time.sleep(0.5)
    model, _ = build(2)
    model.append(torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return outcome(cadenza.attach, model, optimizer, strategy, membership=join(port, 2, 2))


def test_a_worker_with_another_model_is_turned_away(ranks: RankPool, store: int) -> None:
    first, second, stranger = ranks.run(3, another_model, store, init=False)
    assert torch.equal(first[1]["values"], second[1]["values"])
    assert stranger[:2] == ("error", TurnedAwayError.__name__)
    assert "model" in stranger[2]


def all_needed(port: int) -> dict[str, Any]:
    strategy = cadenza.diloco(period=5, outer_lr=0.5, faults=cadenza.skip_round(**QUICK))
    return train(port, 3, strategy, 60, at={13: stop_for(1.5)} if rank() == 1 else None, step_s=0.04)


def test_under_skip_round_a_round_waits_for_nobody_and_goes_on_with_everybody(ranks: RankPool, store: int) -> None:
    results = ranks.run(3, all_needed, store, init=False)
    assert all(torch.equal(results[0]["values"], other["values"]) for other in results)
    assert set(results[0]["participants"]) == {(0, 1, 2)}
    assert results[0]["failed"], "without the third worker no round was held"
    assert results[0]["rounds"][-1] == 60

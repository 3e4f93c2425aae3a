"""The two kinds of crews: what one worker decides for all, what is summed, and who writes what came of a run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

import cadenza
from cadenza.errors import CadenzaError, StoreLostError, UsageError
from cadenza.participants.store import serve
from cadenza.training import Config, elastic_crew, runs, stop_agreement
from cadenza.training.connections import DirectConnection
from cadenza.training.crew import Crew
from cadenza.training.elastic_crew import ElasticCrew
from cadenza.training.fixed_crew import fixed_crew
from cadenza.training.metrics import MetricsWriter, Stopwatch
from cadenza.training.stop_agreement import StopAgreement

ELASTIC = Config().with_(**{"faults.policy": "shrink", "launch.workers": 2, "faults.grace_s": 0.3})


@pytest.fixture
def elastic() -> Iterator[list[ElasticCrew]]:
    store = serve(host="127.0.0.1")
    members = [cadenza.join(f"127.0.0.1:{store.port}", worker=w, workers=2, lease_s=0.3) for w in range(2)]
    yield [ElasticCrew(ELASTIC, member) for member in members]
    for member in members:
        member.close()


@pytest.fixture
def fixed() -> Iterator[Crew]:
    with fixed_crew(Config()) as crew:
        yield crew


def test_one_elastic_worker_decides_also_if_others_would_answer_the_same(elastic: list[ElasticCrew]) -> None:
    decisions = [crew.decide("resume", lambda: "step-00000004") for crew in elastic]
    assert [decision.answer for decision in decisions] == 2 * ["step-00000004"]
    assert [decision.mine for decision in decisions] == [True, False]


def test_the_first_answer_of_elastic_workers_holds(elastic: list[ElasticCrew]) -> None:
    assert elastic[1].decide("resume", lambda: "none").mine
    assert elastic[0].decide("resume", lambda: "step-00000004").answer == "none"


def test_a_worker_takes_over_from_a_leader_that_does_not_write(
    elastic: list[ElasticCrew], fixed: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elastic_crew, "_RESULTS_S", 0.2)
    assert elastic[1].takes_over(lambda: False)
    assert not elastic[1].takes_over(lambda: True)
    assert not fixed.takes_over(lambda: pytest.fail("fixed workers leave it to worker 0"))


def test_sums_are_of_all_workers(elastic: list[ElasticCrew], fixed: Crew) -> None:
    assert elastic[0].add_up([1.5, 2.0], workers=3) == [4.5, 6.0]
    assert fixed.add_up([1.5, 2.0], workers=1) == [1.5, 2.0]


def test_an_elastic_worker_goes_on_counting_from_the_latest_of_all(elastic: list[ElasticCrew], tmp_path: Path) -> None:
    run = runs.create(tmp_path / "run", ELASTIC)
    for worker, elapsed in ((0, 50.0), (1, 10.0)):
        with MetricsWriter(run.metrics_of(worker), Stopwatch(elapsed)) as writer:
            writer.write("step", 7, loss=1.0, samples=28 + worker, bytes_sent=0, stall_s=0.0)
    record = elastic[1].last_record(run)
    assert record.elapsed >= 50
    assert record.counts["samples"] == 29


def test_shares_that_do_not_come_are_left_out_of_the_mean(elastic: list[ElasticCrew]) -> None:
    first, second = (crew.shares("evaluate") for crew in elastic)
    first.post(4, (0, 1), {"loss": (6.0, 2.0)})
    second.post(4, (0, 1), {"loss": (2.0, 2.0)})
    assert [(found.step, found.metrics["loss"], found.write) for found in first.collect(wait=True)] == [(4, 2.0, True)]
    first.post(8, (0, 1), {"loss": (6.0, 2.0)})
    began = time.monotonic()
    assert [found.metrics["loss"] for found in first.collect(wait=True)] == [3.0]
    assert time.monotonic() - began < 5
    assert second.collect(wait=True) == []


def test_fixed_workers_know_a_loss_at_once_and_refuse_an_empty_one(fixed: Crew) -> None:
    shares = fixed.shares("evaluate of the task x")
    shares.post(4, (0,), {"loss": (6.0, 2.0)})
    assert [(found.step, found.metrics["loss"], found.write) for found in shares.collect()] == [(4, 3.0, True)]
    assert shares.collect() == []
    with pytest.raises(UsageError, match="evaluate of the task x has evaluated nothing"):
        shares.post(8, (0,), {"loss": (0.0, 0.0)})


def test_an_error_that_came_first_is_named(fixed: Crew) -> None:
    fixed.connection.call(lambda store: store.set("failed", "3"))
    assert fixed.explain(ValueError("no")) == "Stopped, because worker 3 failed. (ValueError: no)"


# ---- stopping --------------------------------------------------------------------------------------------------------


def test_fixed_workers_do_not_stop_without_one_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop_agreement, "_ANSWER_S", 0.2)
    store = DirectConnection(dist.HashStore())
    agreement = StopAgreement(store, store, expected=lambda: {0, 1, 2}, all_must_answer=True)
    agreement.post(0, 5)
    agreement.post(2, 6)
    with pytest.raises(CadenzaError, match="worker 1 did not answer"):
        agreement.last_step(5)


def test_a_store_that_is_lost_is_not_asked_again() -> None:
    asked = 0

    def fail(store: dist.Store) -> None:
        nonlocal asked
        asked += 1
        raise RuntimeError("Broken pipe")

    connection = DirectConnection(dist.HashStore())
    for _ in range(2):
        with pytest.raises(StoreLostError):
            connection.call(fail)
    assert asked == 1
    agreement = StopAgreement(connection, connection, expected=lambda: {0, 1}, all_must_answer=True)
    agreement.post(0, 5)
    assert not agreement.is_asked()
    with pytest.raises(CadenzaError, match="worker 0 did not answer"):
        agreement.last_step(5)

"""The simulator: the same for a seed, near the formulas where these are exact, and right about faults."""

from __future__ import annotations

import pytest

import cadenza
from cadenza import Strategy, codecs
from cadenza.errors import UsageError
from cadenza.planning import Cluster, Faults, Link, Model, predict
from cadenza.planning.simulator import simulate

MODEL = Model(10_000_000)


def cluster(workers: int = 64, **more: object) -> Cluster:
    return Cluster(workers, Link(1e9, latency_s=0.001), 0.5, **more)  # type: ignore[arg-type]


STRATEGIES = {
    "diloco": cadenza.diloco(20, codec=codecs.int8()),
    "late": cadenza.local_sgd(10, codec=codecs.int8(), delay=2),
    "streaming": cadenza.streaming_diloco(40),
    "hierarchical": cadenza.hierarchical({4: 8, 16: "all"}),
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_without_chance_it_is_what_the_formulas_say(name: str) -> None:
    run = simulate(STRATEGIES[name], cluster(), MODEL, rounds=200)
    assert run.utilisation == pytest.approx(predict(STRATEGIES[name], cluster(), MODEL).utilisation, rel=0.02)


def test_with_jitter_and_stragglers_it_is_near_the_formulas() -> None:
    rough = cluster(jitter=0.2, straggle=1e-4, straggle_s=4.0)
    strategy = STRATEGIES["diloco"]
    run = simulate(strategy, rough, MODEL, rounds=300)
    assert run.utilisation == pytest.approx(predict(strategy, rough, MODEL).utilisation, rel=0.05)
    assert run.utilisation < predict(strategy, cluster(), MODEL).utilisation


def test_a_seed_decides_everything() -> None:
    rough = cluster(jitter=0.2, slowest=1.3, straggle=1e-3, straggle_s=1.0, faults=Faults(20_000))
    runs = [simulate(STRATEGIES["diloco"], rough, MODEL, rounds=50, seed=seed) for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


@pytest.mark.parametrize(
    ("policy", "failed"), [(cadenza.raise_error, False), (cadenza.shrink, False), (cadenza.skip_round, True)]
)
def test_faults_cost_what_the_policy_says(policy: type, failed: bool) -> None:
    strategy = cadenza.diloco(20, codec=codecs.int8(), faults=policy())
    failing = cluster(faults=Faults(50_000, restart_s=60, checkpoint_s=600))
    run = simulate(strategy, failing, MODEL, rounds=300)
    quiet = simulate(strategy, cluster(), MODEL, rounds=300)
    assert run.utilisation < quiet.utilisation
    assert any(round.failed for round in run.rounds) == failed
    assert run.events


def test_restarting_all_costs_more_than_going_on() -> None:
    failing = cluster(faults=Faults(50_000, restart_s=60, checkpoint_s=600))

    def used(strategy: Strategy) -> float:
        return simulate(strategy, failing, MODEL, rounds=300).utilisation

    assert used(cadenza.diloco(20)) < used(cadenza.diloco(20, faults=cadenza.shrink()))


def test_ten_thousand_workers_are_played() -> None:
    large = Cluster(10_000, Link(1e9), 0.5, sites=10, uplink=Link(1e10), jitter=0.1, faults=Faults(30 * 86400))
    run = simulate(cadenza.diloco(100, faults=cadenza.shrink()), large, MODEL, rounds=5)
    assert len(run.rounds) == 5


def test_nothing_to_play_is_refused() -> None:
    with pytest.raises(UsageError, match="at least one round"):
        simulate(STRATEGIES["diloco"], cluster(), MODEL, rounds=0)
    with pytest.raises(UsageError, match="no rounds to simulate"):
        simulate(cadenza.local_sgd(1, warmup_steps=2**62), cluster(), MODEL, rounds=1)

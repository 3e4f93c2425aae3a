"""Bytes of real rounds, and memory that was measured, against what was planned."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import cadenza
from cadenza import RoundReport, Strategy, codecs
from cadenza.planning import Cluster, Link, Model, Work, costs_of, memory_of
from cadenza.testing import Worker, workers

ROOT = Path(__file__).parents[3]
NUMEL = 300_000
STRATEGIES = {
    "local_sgd": cadenza.local_sgd(1, measure_drift=False),
    "diloco": cadenza.diloco(1, measure_drift=False),
    "bf16": cadenza.diloco(1, codec=codecs.bf16(), measure_drift=False),
    "int8": cadenza.diloco(1, codec=codecs.int8(), measure_drift=False),
    "e3m0 and int8": cadenza.diloco(1, codec=codecs.e3m0(back=codecs.int8()), measure_drift=False),
    "sparse_loco": cadenza.sparse_loco(1, measure_drift=False),
    "hierarchical": cadenza.hierarchical({1: 2, 2: "all"}, codec=codecs.int8(), measure_drift=False),
}


def reports_of(strategy: Strategy) -> list[RoundReport]:
    def train(worker: Worker) -> list[RoundReport]:
        model = torch.nn.Module()
        model.weight = torch.nn.Parameter(torch.zeros(NUMEL))
        found: list[RoundReport] = []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sync = cadenza.attach(model, optimizer, strategy, observers=[found.append])
        for _ in range(2):
            model.weight.sum().backward()
            optimizer.step()
            sync.step()
        sync.close()
        return found

    with workers(4) as pool:
        return pool.run(train)[0]


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_round_sends_the_bytes_that_were_planned(name: str) -> None:
    strategy, cluster, model = STRATEGIES[name], Cluster(4, Link(1e9), 0.1), Model(NUMEL, layers=1)
    reports = reports_of(strategy)
    for report in reports:
        planned = costs_of(strategy, report.level, NUMEL, cluster, model, work=Work())
        assert planned.sent == report.bytes_sent
    assert {report.level for report in reports} == set(range(len(strategy.levels)))


@pytest.mark.parametrize(
    ("settings", "strategy"),
    [
        ({}, cadenza.local_sgd(1)),
        ({"codec": "fp32"}, cadenza.diloco(1)),
        ({"codec": "int8"}, cadenza.diloco(1, codec=codecs.int8())),
        ({"codec": "e3m0"}, cadenza.diloco(1, codec=codecs.e3m0())),
    ],
)
def test_memory_is_what_the_lab_measured(settings: dict[str, str], strategy: Strategy) -> None:
    runs = json.loads((ROOT / "lab/results/race_syncs.json").read_text())["runs"]
    method = "Cadenza diloco" if settings else "Cadenza local_sgd"

    def peak(method: str, settings: dict[str, str]) -> int:
        return min(
            run["peak_bytes"]
            for run in runs
            if (run["job"]["method"], run["job"]["settings"], run["job"]["millions"]) == (method, settings, 100)
        )

    extra = peak(method, settings) - peak("compute alone", {})
    planned = memory_of(strategy, Cluster(4, Link(1e9), 0.1), Model(100_000_000)).extra
    assert planned == pytest.approx(extra, rel=0.1)


def test_a_plan_needs_no_torch() -> None:
    """A package of the same name that imports nothing stands for cadenza, and torch cannot be imported."""
    script = f"""
import sys, types
sys.modules["torch"] = sys.modules["numpy"] = None
package = types.ModuleType("cadenza")
package.__path__ = [{str(ROOT / "src/cadenza")!r}]
sys.modules["cadenza"] = package
import cadenza.planning
from cadenza.planning import choices, idealised, simulator
print(cadenza.planning.loss_of(335e6, 4, 30).percent)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "0.9", done.stderr

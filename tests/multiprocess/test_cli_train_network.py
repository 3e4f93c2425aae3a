"""`cadenza train` over emulated networks: two nodes, and strategies compared over a slow link."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from cadenza import emulation
from cadenza.emulation import Network
from cadenza.training.runs import open_run, read_metrics
from support.commands import PATIENCE_S, QUIET, TASK, cadenza, command, environment

pytestmark = [
    pytest.mark.skipif(emulation.available() is not None, reason=str(emulation.available())),
    pytest.mark.timeout(300),
]


def test_two_nodes_with_two_workers_each_train_one_model(tmp_path: Path) -> None:
    run = tmp_path / "run"
    meeting = ["--nnodes", 2, "--rdzv-endpoint", "10.77.0.1:29400", "--workers", 2]
    line = command("train", TASK, *meeting, "--steps", 24, "--period", 4, "--run", run, "--no-report", *QUIET)
    path = os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/sbin"])
    with Network(2) as network:
        nodes = [
            subprocess.Popen(
                host.command(line),
                env={**environment(), "PATH": path},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for host in network.hosts
        ]
        printed = [node.communicate(timeout=PATIENCE_S)[0] for node in nodes]
        sent = [host.bytes_sent() for host in network.hosts]
    assert [node.returncode for node in nodes] == [0, 0], printed
    assert read_metrics(run).workers == [0, 1, 2, 3]
    assert {read_metrics(run).status(worker) for worker in range(4)} == {"finished"}
    rounds = read_metrics(run).of("round", 3)
    assert rounds[-1]["participants"] == [0, 1, 2, 3]
    assert min(sent) > sum(line["bytes_sent"] for line in rounds)  # they met on the wire
    assert "held-out loss, last" in printed[0]  # the node at the endpoint tells what came of it
    assert "held-out loss, last" not in printed[1]


def test_strategies_are_compared_over_a_link_on_the_same_data(tmp_path: Path) -> None:
    # In fp32: of a model of 200 values, a codec's blocks and the measure of its drift would be most of what is sent.
    flags = ["--workers", 2, "--steps", 16, "--period", 8, "--codec", "fp32", "--set", "evaluate.every=8", *QUIET]
    race = ["--compare", "ddp,diloco", "--link", "50mbit", "--run", "race"]
    printed = cadenza("train", TASK, *flags, *race, folder=tmp_path)
    ddp, diloco = (open_run(tmp_path / "race" / name) for name in ("ddp", "diloco"))
    assert (ddp.config().strategy.name, diloco.config().strategy.arguments["period"]) == ("ddp", 8)
    first = [read_metrics(run.folder).of("step", 1)[0]["loss"] for run in (ddp, diloco)]
    assert first[0] == first[1]
    assert ddp.summary()["bytes_sent"] > diloco.summary()["bytes_sent"]
    for run in (ddp, diloco):
        link = run.environment()["link"]
        assert link["rate"] == "50mbit"
        assert min(link["interface_bytes"]) > run.summary()["bytes_sent"]
    assert "ddp: the task's own learning rate; no recipe has one tuned for it" in printed
    assert "time to held-out loss" in printed
    assert "left all interfaces (50mbit links)" in printed
    assert printed.rstrip().endswith("Report: race/report.html")


def test_a_worker_that_dies_behind_its_link_does_not_end_the_run(tmp_path: Path) -> None:
    dying = ["--set", "options.event=die", "--set", "options.at=10", "--set", "options.worker=1"]
    flags = ["--workers", 2, "--steps", 24, "--period", 4, "--faults", "shrink", "--set", "faults.restarts=0", *QUIET]
    printed = cadenza("train", TASK, "--link", "50mbit", "--run", "run", *flags, *dying, folder=tmp_path)
    metrics = read_metrics(tmp_path / "run")
    assert [metrics.status(worker) for worker in range(2)] == ["finished", "lost"]
    assert metrics.of("round", 0)[0]["participants"] == [0, 1]
    assert metrics.of("round", 0)[-1]["participants"] == [0]
    assert "Worker 1 was ended by SIGKILL" in printed
    assert "left all interfaces (50mbit links)" in printed

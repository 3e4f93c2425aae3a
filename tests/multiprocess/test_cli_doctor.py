"""The doctor on real ranks: what it measures, whom it misses, what it says of a network that cannot work."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from cadenza import emulation
from cadenza.cli.app import main
from cadenza.cli.doctor import links, member
from cadenza.emulation import Network
from support.ranks import RankPool

ROOT = Path(__file__).parents[2]
needs_network = pytest.mark.skipif(emulation.available() is not None, reason=str(emulation.available()))


def run_doctor(
    *arguments: str, of_rank: dict[int, dict[str, str]] | None = None, absent: int = -1, apart: bool = False
) -> tuple[Any, ...]:
    """Run the command on this rank; return its exit code and what it wrote."""
    rank = int(os.environ["RANK"])
    if rank == absent:
        return 0, "", ""
    os.environ.update((of_rank or {}).get(rank, {}))
    out, err = io.StringIO(), io.StringIO()
    with ExitStack() as stack:
        if apart:  # as if the ranks were on machines of their own
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            patch.setattr(member, "network_id", lambda: str(rank))
        stack.enter_context(redirect_stdout(out))
        stack.enter_context(redirect_stderr(err))
        ended = stack.enter_context(pytest.raises(SystemExit))
        main(["doctor", "--json", *arguments])
    return int(ended.value.code or 0), out.getvalue(), err.getvalue()


def found(text: str, subject: str) -> dict[str, Any]:
    [finding] = [f for f in json.loads(text)["findings"] if f["subject"] == subject and f["level"] == "problem"]
    return dict(finding)


def test_ranks_of_one_machine_are_measured_and_rank_0_alone_prints(ranks: RankPool) -> None:
    plan = ["--parameters", "1M", "--step-seconds", "0.1", "--share", "10"]
    first, *others = ranks.run(3, run_doctor, "--timeout", "50", "--seconds", "20", *plan, init=False)
    assert others == [(0, "", "")] * 2
    code, out, err = first
    report = json.loads(out)
    assert (code, report["problems"], err) == (0, 0, "")
    assert [rank["rank"] for rank in report["ranks"]] == [0, 1, 2]
    assert {(link["a"], link["b"]) for link in report["links"]} == {(0, 1), (0, 2), (1, 2)}
    assert all(link["bytes_per_s_to_a"] > 0 and link["bytes_per_s_to_b"] > 0 for link in report["links"])
    assert report["all_at_once"]["bytes_per_s"] > 0
    assert [cost["codec"] for cost in report["plan"]["costs"]] == ["fp32", "bf16", "int8", "e3m0"]


def test_when_the_time_is_up_the_links_that_were_measured_are_told(ranks: RankPool) -> None:
    code, out, _ = ranks.run(4, run_doctor, "--timeout", "50", "--seconds", "0.001", init=False)[0]
    report = json.loads(out)
    assert (code, len(report["links"])) == (0, 1)
    assert report["all_at_once"] is not None
    assert any("1 of 6 pairs" in finding["text"] for finding in report["findings"])


def test_an_interface_that_does_not_exist_stops_the_doctor_before_it_hangs(ranks: RankPool) -> None:
    wrong = {1: {"GLOO_SOCKET_IFNAME": "eth-nowhere", "GROUP_RANK": "1"}}
    first, second = ranks.run(2, run_doctor, "--timeout", "50", of_rank=wrong, init=False)
    assert (first[0], second) == (1, (1, "", ""))
    [finding] = [f for f in json.loads(first[1])["findings"] if "eth-nowhere" in f["text"]]
    assert finding["level"] == "problem"
    assert "node 1" in finding["where"][0]
    assert json.loads(first[1])["links"] == []


def test_loopback_between_two_hosts_is_found_before_anything_hangs(ranks: RankPool) -> None:
    hosts = {rank: {"GLOO_SOCKET_IFNAME": "lo", "GROUP_RANK": str(rank)} for rank in range(2)}
    answers = ranks.run(2, run_doctor, "--timeout", "50", of_rank=hosts, apart=True, init=False)
    assert [answer[0] for answer in answers] == [1, 1]
    assert "which no other host can reach" in found(answers[0][1], "Gloo address")["text"]
    assert found(answers[0][1], "MASTER_ADDR")  # it is 127.0.0.1 too
    assert json.loads(answers[0][1])["links"] == []


def test_two_launchers_on_one_machine_may_use_loopback(ranks: RankPool) -> None:
    nodes = {rank: {"GLOO_SOCKET_IFNAME": "lo", "GROUP_RANK": str(rank)} for rank in range(2)}
    code, out, _ = ranks.run(2, run_doctor, "--timeout", "50", "--seconds", "1", of_rank=nodes, init=False)[0]
    assert (code, len(json.loads(out)["links"])) == (0, 1)


def test_a_rank_that_never_comes_is_named(ranks: RankPool) -> None:
    code, out, _ = ranks.run(2, run_doctor, "--timeout", "1", absent=1, init=False)[0]
    finding = found(out, "ranks")
    assert (code, finding["text"]) == (1, "rank 1 of 2 did not come in time")
    assert finding["advice"]


def measured(shift_s: float) -> links.Link | None:
    me = dist.get_rank()
    ahead = int(shift_s * 1e9) * me
    return links.measure(me, 1 - me, torch.device("cpu"), clock=lambda: time.time_ns() + ahead)


def test_a_clock_that_is_ahead_is_found_within_its_uncertainty(ranks: RankPool) -> None:
    link, nothing = ranks.run(2, measured, 5.0)
    assert nothing is None
    assert abs(link.offset_s - 5) <= link.uncertainty_s + 1e-3  # both ranks read one clock, in fact
    assert 0 < link.uncertainty_s < 5


# ---- as users start it ----------------------------------------------------------------------------------------------


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}


def test_under_torchrun(tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launch, "-m", "cadenza.cli.doctor", "--seconds", "2"]
    done = subprocess.run(command, env=environment(), cwd=tmp_path, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("2 ranks on 1 host") == 1
    assert "No problem found." in done.stdout
    assert "from \\ to" in done.stdout


@needs_network
def test_a_link_is_measured_as_it_is(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "cadenza.cli.doctor", "--json", "--parameters", "124M", "--step-seconds", "0.5"]
    with Network(2, rate="100mbit") as network:
        first, second = network.run(command, env=environment(), timeout_s=110)
    report = json.loads(first)
    assert second == ""
    [link] = report["links"]
    rates = [link["bytes_per_s_to_a"], link["bytes_per_s_to_b"], report["all_at_once"]["bytes_per_s"]]
    assert 50e6 < 8 * max(rates) < 200e6, rates  # on a busy machine any one of them may come out too low
    assert [finding["level"] for finding in report["findings"] if finding["subject"] == "clocks"] == ["ok"]
    assert report["plan"]["choice"] != "fp32"

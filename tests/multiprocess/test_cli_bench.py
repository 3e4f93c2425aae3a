"""The bench on real ranks: everybody has their turn, the bytes are those of the codecs, one rank speaks."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from cadenza.cli.app import main
from support.ranks import RankPool


def run_bench(*arguments: str) -> str:
    with redirect_stdout(io.StringIO()) as out:
        main_without_exit(["bench", *arguments])
    return out.getvalue()


def main_without_exit(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert not ended.value.code


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_contenders_send_what_their_codecs_say(ranks: RankPool, dtype: str) -> None:
    arguments = ["--parameters", "200k", "--tensors", "7", "--codec", "fp32,int8", "--codec", "topk+feedback"]
    first, *others = ranks.run(3, run_bench, *arguments, "--dtype", dtype, "--repeats", "2", "--json", init=False)
    assert others == ["", ""]
    report = json.loads(first)
    sent = {result["name"]: result["bytes_sent"] for result in report["results"]}
    assert list(sent) == [
        "all-reduce",
        "torch averager",
        "cadenza drop-in",
        "diloco, fp32",
        "diloco, int8",
        "diloco, topk+feedback",
    ]
    assert sent["all-reduce"] == 200_000 * (4 if dtype == "fp32" else 2) * 4 // 3
    assert 0.2 < sent["diloco, int8"] / sent["diloco, fp32"] < 0.3
    assert all(len(result["times_s"]) == 2 and min(result["times_s"]) > 0 for result in report["results"])
    assert (report["ranks"], report["way"]) == (3, "shared memory")


def test_without_shared_memory_gloo_is_measured(ranks: RankPool) -> None:
    env = {"CADENZA_SHARED_MEMORY": "0"}
    first, _ = ranks.run(2, run_bench, "--parameters", "20k", "--repeats", "1", "--json", init=False, env=env)
    assert json.loads(first)["way"] == "gloo"


def test_alone_it_starts_workers_itself(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "cadenza.cli.bench", "--workers", "2", "--parameters", "50k", "--repeats", "1"]
    path = os.pathsep.join(filter(None, sys.path))
    env = {**os.environ, "PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("cadenza bench: 0.05 M fp32 parameters in 148 tensors, 2 ranks of") == 1
    assert "diloco, e3m0" in done.stdout

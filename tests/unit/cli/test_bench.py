"""What `cadenza bench` refuses, and what it says about its figures."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from cadenza.cli.app import main
from cadenza.cli.bench.contest import RAW, TORCH, Case, Result, needed_bytes
from cadenza.cli.bench.showing import in_words, show, to_plain
from cadenza.codecs.kernels import implementations

CASE = Case(parameters=25_000_000, tensors=148, dtype="fp32", codecs=("fp32", "int8"), repeats=3)
RESULTS = [
    Result(RAW, (0.3, 0.2, 0.1), 150_000_000, 0),
    Result(TORCH, (0.4, 0.4, 0.4), 150_000_000, 100_000_000),
    Result("diloco, int8", (0.1, 0.1, 0.5), 38_000_000, None),
]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--parameters", "lots"], "such as 25M"),
        (["--parameters", "0"], "such as 25M"),
        (["--parameters", "100", "--tensors", "101"], "between 1 and"),
        (["--tensors", "0"], "between 1 and"),
        (["--dtype", "fp8"], "fp32 or bf16"),
        (["--codec", "int8", "--codec", "e3m1"], 'Did you mean "e3m0"?'),
        (["--codec", "fp32+feedback"], "fp32"),
        (["--repeats", "0"], "at least 1"),
        (["--workers", "1"], "between 2 and"),
        (["--backend", "mpi"], "gloo or nccl"),
        (["--device", "tpu"], "--device is cuda, or cpu"),
        (["--backend", "nccl", "--device", "cpu"], "--device is cuda, or cpu"),
        (["--parameters", "900G"], "need about"),
    ],
)
def test_bad_input_is_told_in_a_paragraph(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(SystemExit) as ended:
        main(["bench", *arguments])
    assert ended.value.code == 2
    assert words in " ".join(capsys.readouterr().err.split())


def test_one_rank_has_nobody_to_synchronise_with(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        main(["bench"])
    assert ended.value.code == 2
    assert "at least two" in capsys.readouterr().err


def test_memory_grows_with_codecs() -> None:
    one = Case(1000, 1, "fp32", ("fp32",), 1)
    two = Case(1000, 1, "fp32", ("fp32", "int8"), 1)
    assert needed_bytes(two) - needed_bytes(one) == 8000  # an anchor and a momentum


def test_the_table_compares_medians_with_the_all_reduce() -> None:
    file = io.StringIO()
    show(CASE, RESULTS, 4, "gloo", Console(file=file, width=80))
    names = (TORCH, "diloco, int8")
    rows = {name: row.split() for row in file.getvalue().splitlines() for name in names if row.startswith(f"  {name}")}
    assert "2.00" in rows[TORCH]
    assert "0.50" in rows["diloco, int8"]
    assert rows["diloco, int8"][-1] == "–"
    assert max(map(len, file.getvalue().splitlines())) <= 80


def test_shared_memory_is_owned_up_to() -> None:
    assert "CADENZA_SHARED_MEMORY=0" in " ".join(in_words(RESULTS, "shared memory"))
    assert "CADENZA_SHARED_MEMORY" not in "".join(in_words(RESULTS, "gloo"))


def test_a_device_has_columns_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cadenza.cli.bench.showing._name", lambda device: "an accelerator")
    file, results = io.StringIO(), [replace(result, host_bytes=3_000_000) for result in RESULTS]
    show(CASE, results, 4, "nccl", Console(file=file, width=100), device=torch.device("cuda"))
    assert "on cuda" in file.getvalue()
    row = next(line for line in file.getvalue().splitlines() if line.startswith(f"  {TORCH}"))
    assert row.split()[-4:] == ["100", "MB", "3", "MB"]
    assert "The model is on an accelerator" in " ".join(file.getvalue().split())


def test_scripts_get_every_repeat() -> None:
    plain = json.loads(json.dumps(to_plain(CASE, RESULTS, 4, "gloo")))
    assert plain["case"]["parameters"] == 25_000_000
    assert plain["device"] == {"kind": "cpu", "name": "cpu", "codecs": implementations(torch.device("cpu"))[0]}
    assert [result["ratio"] for result in plain["results"]] == [1.0, 2.0, 0.5]
    assert plain["results"][0]["times_s"] == [0.3, 0.2, 0.1]
    assert plain["results"][0]["effective_bytes_per_s"] == pytest.approx(1.5 * 1e8 / 0.2)

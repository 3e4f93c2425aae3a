"""Compiling the kernels: only if asked to, never at import, and with the same bytes as without."""

from __future__ import annotations

import shutil
import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch

from cadenza.codecs import Codec, int8, integers
from cadenza.codecs.fused import fused

NUMEL = 300_001  # more than a piece


def run(codec: Codec) -> list[torch.Tensor]:
    values = torch.randn(NUMEL, generator=torch.Generator().manual_seed(0))
    data = torch.empty(codec.encoded_bytes(NUMEL), dtype=torch.uint8)
    out, total = torch.empty(NUMEL), torch.ones(NUMEL)
    codec.encode(values, data)
    codec.decode(data, out)
    codec.decode_add(data, total, 0.3)
    return [data, out, total]


def never(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("torch.compile was called")


def test_import_starts_no_compiler() -> None:
    script = (
        "import sys, torch; before = set(sys.modules); import cadenza.codecs\n"
        "print([name for name in set(sys.modules) - before if name.startswith('torch._inductor')])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("chosen", [None, "0"])
def test_nothing_is_compiled_unless_asked_for(monkeypatch: pytest.MonkeyPatch, chosen: str | None) -> None:
    monkeypatch.delenv("CADENZA_COMPILE", raising=False)
    if chosen:
        monkeypatch.setenv("CADENZA_COMPILE", chosen)
    monkeypatch.setattr(torch, "compile", never)
    run(int8())


def test_small_inputs_are_not_worth_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CADENZA_COMPILE", "1")
    monkeypatch.setattr(torch, "compile", never)
    codec = int8()
    codec.encode(torch.ones(1000), torch.empty(codec.encoded_bytes(1000), dtype=torch.uint8))


def test_a_kernel_that_cannot_be_compiled_warns_once_and_runs_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*args: Any, **kwargs: Any) -> Any:
        def kernel(*args: Any) -> None:
            raise RuntimeError("no C++ compiler")

        return kernel

    @fused
    def double(rows: torch.Tensor, out: torch.Tensor) -> None:
        torch.mul(rows, 2, out=out)

    monkeypatch.setenv("CADENZA_COMPILE", "1")
    monkeypatch.setattr(torch, "compile", failing)
    rows = torch.ones(1024, 256)
    first, second = torch.empty_like(rows), torch.empty_like(rows)
    with pytest.warns(RuntimeWarning, match=r"eagerly: no C\+\+ compiler\. Unset CADENZA_COMPILE"):
        double(rows, first)
    double(rows, second)
    assert (first == 2).all()
    assert (second == 2).all()


@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler")
@pytest.mark.timeout(600)  # the compiler starts slowly on a busy machine
def test_compiled_kernels_give_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CADENZA_COMPILE", raising=False)
    data, out, total = run(int8())
    monkeypatch.setenv("CADENZA_COMPILE", "1")
    compiled: list[str] = []
    compile_as_torch_does = torch.compile

    def noting(kernel: Any, **options: Any) -> Any:
        compiled.append(kernel.__name__)
        return compile_as_torch_does(kernel, **options)

    monkeypatch.setattr(torch, "compile", noting)
    for name in ("_encode", "_decode", "_decode_add"):
        monkeypatch.setattr(integers, name, fused(getattr(integers, name).__wrapped__))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        compiled_data, compiled_out, compiled_total = run(int8())
    assert [str(warning.message) for warning in warned if warning.category is RuntimeWarning] == []
    assert compiled == ["_encode", "_decode", "_decode_add"]
    assert torch.equal(data, compiled_data)
    assert torch.equal(out, compiled_out)
    torch.testing.assert_close(total, compiled_total)

"""Triton's kernels without a GPU: their bits in its interpreter, and what its compilers make of them for GPUs.

The interpreter must be chosen before Triton is imported, so that all of it runs in a process of its own.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from cadenza.codecs import kernels, native, triton_launch
from cadenza.testing.implementations import CODECS

pytestmark = pytest.mark.skipif(triton_launch.triton_version() is None, reason="needs Triton")
SCRIPT = """
import json, warnings, torch
from cadenza.codecs import int8, topk
from cadenza.codecs.kernels import using
from cadenza.testing.implementations import CODECS, compare_implementations

warnings.filterwarnings("ignore", "overflow encountered", RuntimeWarning)  # which is clamped afterwards
warnings.filterwarnings("error", "invalid value encountered in cast", RuntimeWarning)
torch.set_num_threads(1)
found = {}
for number, codec in enumerate(CODECS):
    try:
        found[number] = compare_implementations(torch.device("cpu"), ["triton"], of=[codec])[0]
    except Exception as error:
        found[number] = f"{type(error).__name__}: {error}"

def residuals(codec, way):
    left = torch.zeros(300)
    for n in range(3):
        wanted = torch.randn(300, generator=torch.Generator().manual_seed(n)) + left
        data = torch.empty(codec.encoded_bytes(300), dtype=torch.uint8)
        got = torch.empty(300)
        with using(way):
            codec.encode(wanted, data)
            codec.decode(data, got)
        left = wanted - got
    return left

fed_back = all(torch.equal(residuals(c, "triton"), residuals(c, "torch")) for c in (int8(), topk(0.1, chunk=64)))
with using("triton"):
    around = torch.zeros(8192)
    broken = torch.full((topk(0.25, chunk=16).encoded_bytes(16),), 255, dtype=torch.uint8)
    topk(0.25, chunk=16).decode_add(broken, around[:16], 1.0)
print(json.dumps({"compared": found, "fed_back": fed_back, "untouched": not around.any()}))
"""


@pytest.fixture(scope="module")
def interpreted() -> dict[str, Any]:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", range(len(CODECS)), ids=lambda number: repr(CODECS[number]))
def test_kernels_give_the_bits_of_torchs_operations(interpreted: dict[str, Any], number: int) -> None:
    assert interpreted["compared"][str(number)] == "triton agrees on 9 cases"


def test_residuals_are_the_same_over_rounds(interpreted: dict[str, Any]) -> None:
    assert interpreted["fed_back"]


def test_places_outside_of_a_chunk_touch_nothing(interpreted: dict[str, Any]) -> None:
    assert interpreted["untouched"]


def test_one_place_decides_which_implementation_works_where() -> None:
    cpu, values = torch.device("cpu"), torch.ones(3)
    assert kernels.kernels_for(values) is native.kernels()
    assert kernels.kernels_for(values, values.to("meta")) is None
    assert kernels.kernels_for(values.to("meta")) is None
    with kernels.using("triton"):  # which cannot run on a CPU without its interpreter
        assert kernels.kernels_for(values) is None
    assert kernels.implementations(cpu)[-1] == "torch"


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_device_on_which_nothing_compiles_has_torchs_operations() -> None:
    assert kernels.implementations(torch.device("cuda", 0)) == ["torch"]


def test_triton_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CADENZA_TRITON", "0")
    assert triton_launch.triton_version() is None


VALUES, BYTES, COUNT, WEIGHT = "*fp32", "*u8", "i32", "fp32"
SIGNATURES: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "int8_encode": (
        {"values": VALUES, "data": BYTES, "count": COUNT, "block": COUNT, "blocks": COUNT},
        {"ROWS": 8, "WIDTH": 256},
    ),
    "int8_decode": (
        {"out": VALUES, "data": BYTES, "weight": WEIGHT, "count": COUNT, "block": COUNT, "blocks": COUNT},
        {"ROWS": 8, "WIDTH": 256, "ADD": True},
    ),
    "e3m0_encode": (
        {"values": VALUES, "scales": BYTES, "fine": BYTES, "codes": BYTES, "powers": VALUES}
        | {"groups": COUNT, "blocks": COUNT},
        {"ROWS": 4, "WIDTH": 32},
    ),
    "e3m0_decode": (
        {"out": VALUES, "scales": BYTES, "fine": BYTES, "codes": BYTES, "inverses": VALUES, "weight": WEIGHT}
        | {"groups": COUNT, "blocks": COUNT},
        {"ROWS": 4, "WIDTH": 32, "ADD": True},
    ),
    "topk_choose": (
        {"values": VALUES, "chosen": VALUES, "places": "*i16", "width": COUNT, "kept": COUNT},
        {"WIDTH": 512},
    ),
    "topk_write": (
        {"chosen": VALUES, "places": "*i16", "data": BYTES, "kept": COUNT},
        {"BITS": 2, "KEPT": 64},
    ),
    "topk_decode": (
        {"data": BYTES, "out": VALUES, "weight": WEIGHT, "width": COUNT, "kept": COUNT},
        {"BITS": 2, "KEPT": 64, "ADD": True},
    ),
}


def compiled(name: str, backend: str, architecture: int | str, lanes: int) -> dict[str, Any]:
    """What Triton makes of a kernel for a GPU that need not be here."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from cadenza.codecs import triton_kernels

    kernel, (signature, sizes) = getattr(triton_kernels, name), SIGNATURES[name]
    source = ASTSource(
        kernel,
        signature={**signature, **dict.fromkeys(sizes, "constexpr")},
        constexprs={(kernel.arg_names.index(size),): value for size, value in sizes.items()},
    )
    made = triton.compile(source, target=GPUTarget(backend, architecture, lanes), options=triton_launch.EXACT)
    return dict(made.asm)


@pytest.fixture
def no_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.usefixtures("no_cache")
@pytest.mark.parametrize("name", SIGNATURES)
def test_kernels_compile_for_cuda_and_round_every_product_and_quotient(name: str) -> None:
    made = compiled(name, "cuda", 80, 32)
    assert made["cubin"]
    assert not re.findall(r"\b(?:fma|mad)\.\w*\.?f32", made["ptx"])  # rounds a product and a sum at once
    assert set(re.findall(r"\b(?:div|rcp|ex2|lg2)\.[\w.]*f32", made["ptx"])) <= {"div.rn.f32"}
    assert ".ftz" not in made["ptx"]  # subnormal numbers count


@pytest.mark.usefixtures("no_cache")
@pytest.mark.parametrize("name", ["int8_encode", "int8_decode", "e3m0_decode", "topk_write", "topk_decode"])
def test_kernels_compile_for_rocm(name: str) -> None:
    made = compiled(name, "hip", "gfx942", 64)
    assert made["hsaco"]
    if "decode" in name:  # a division is made of such instructions, which round as it must
        assert not re.findall(r"v_(?:fma|mad|fmac|mac)_f32", made["amdgcn"])

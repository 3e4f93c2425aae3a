"""Triton's kernels in its interpreter: bit for bit what torch's operations and the machine code give.

The interpreter must be chosen before Triton is imported, so that all of it runs in a process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
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

"""Machine code for the codecs: the same as torch's operations give, made once a machine, and never needed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cadenza.codecs import Codec, native, topk
from cadenza.codecs.kernels import using
from cadenza.testing.implementations import CODECS

pytestmark = pytest.mark.skipif(native.compiler() is None, reason="needs a C compiler")
SIZES = [1, 37, 256, 513, 2637, 300_001]
USE = (
    "import torch; from cadenza.codecs import int8, native\n"
    "codec, data = int8(), torch.empty(int8().encoded_bytes(3), dtype=torch.uint8)\n"
    "codec.encode(torch.tensor([127.0, -2.4, 0.0]), data)\n"
    "print(bytes(data.tolist()[4:]).hex(), native.kernels() is not None)"
)


def values_of(numel: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(numel)
    return torch.randn(numel, generator=generator) * torch.rand(numel, generator=generator) ** 3


def encoded(codec: Codec, values: torch.Tensor) -> torch.Tensor:
    data = torch.empty(codec.encoded_bytes(values.numel()), dtype=torch.uint8)
    codec.encode(values, data)
    return data


def decoded(codec: Codec, data: torch.Tensor, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
    out, total = torch.empty(numel), torch.ones(numel)
    codec.decode(data, out)
    codec.decode_add(data, total, 0.3)
    return out, total


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("codec", CODECS)
def test_machine_code_gives_the_bytes_of_torchs_operations(codec: Codec, numel: int) -> None:
    values = values_of(numel)
    compiled = encoded(codec, values)
    with using("torch"):
        assert torch.equal(compiled, encoded(codec, values))


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("codec", CODECS)
def test_equal_bytes_give_equal_values_either_way(codec: Codec, numel: int) -> None:
    data = encoded(codec, values_of(numel))
    values, total = decoded(codec, data, numel)
    with using("torch"):
        eager, eager_total = decoded(codec, data, numel)
    assert torch.equal(values, eager)
    assert torch.equal(total, eager_total)


def use(**environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", USE], env={**os.environ, **environment}, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_it_is_compiled_once_and_kept(tmp_path: Path) -> None:
    assert use(XDG_CACHE_HOME=str(tmp_path)) == "7ffe00 True"
    [kept] = (tmp_path / "cadenza").iterdir()
    made = kept.stat().st_mtime_ns
    assert use(XDG_CACHE_HOME=str(tmp_path)) == "7ffe00 True"
    assert [(path, path.stat().st_mtime_ns) for path in (tmp_path / "cadenza").iterdir()] == [(kept, made)]


def test_several_ranks_may_compile_at_once(tmp_path: Path) -> None:
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    ranks = [
        subprocess.Popen([sys.executable, "-c", USE], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    assert [rank.communicate()[0].strip() for rank in ranks] == ["7ffe00 True"] * 3
    assert len(list((tmp_path / "cadenza").iterdir())) == 1


def test_without_a_place_to_keep_it_it_is_made_for_this_process(tmp_path: Path) -> None:
    nowhere = tmp_path / "a file"
    nowhere.touch()
    assert use(XDG_CACHE_HOME=str(nowhere)) == "7ffe00 True"


def test_a_user_without_a_home_has_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody_knows() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", nobody_knows)
    assert native._cache() is None


def test_code_is_not_kept_where_others_could_put_theirs(tmp_path: Path) -> None:
    (tmp_path / "cadenza").mkdir()
    (tmp_path / "cadenza").chmod(0o777)
    assert use(XDG_CACHE_HOME=str(tmp_path)) == "7ffe00 True"
    assert list((tmp_path / "cadenza").iterdir()) == []


def test_it_can_be_switched_off(tmp_path: Path) -> None:
    assert use(XDG_CACHE_HOME=str(tmp_path), CADENZA_NATIVE="0") == "7ffe00 False"
    assert list(tmp_path.iterdir()) == []


def test_a_compiler_that_fails_costs_nothing_but_time(tmp_path: Path) -> None:
    assert use(XDG_CACHE_HOME=str(tmp_path), CC="false") == "7ffe00 False"
    assert list((tmp_path / "cadenza").iterdir()) == []


def test_import_compiles_nothing(tmp_path: Path) -> None:
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    subprocess.run([sys.executable, "-c", "import cadenza.codecs"], env=environment, check=True)
    assert list(tmp_path.iterdir()) == []


def test_places_outside_of_a_chunk_touch_nothing() -> None:
    codec = topk(0.25, chunk=16)
    data, around = torch.full((codec.encoded_bytes(16),), 255, dtype=torch.uint8), torch.zeros(8192)
    codec.decode_add(data, around[:16], 1.0)
    assert not around.any()

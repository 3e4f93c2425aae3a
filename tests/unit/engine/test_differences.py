"""The kernel and torch's operations: the same differences, sketches and checksums, whatever the sizes."""

from __future__ import annotations

import math

import pytest
import torch

from cadenza.codecs.native import kernels
from cadenza.common.checksums import checksum
from cadenza.common.sketches import Sketch
from cadenza.engine import differences
from cadenza.engine.differences import take_differences

pytestmark = pytest.mark.skipif(kernels() is None, reason="there is no C compiler")
SIZES = [[1], [15, 16, 17], [127, 128, 129], [4095, 4097], [65535, 65536], [65537, 200_003], [0, 5]]


def flats(sizes: list[int], seed: int) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=made) for size in sizes]


def both_ways(
    monkeypatch: pytest.MonkeyPatch, anchors: list[torch.Tensor], values: list[torch.Tensor]
) -> list[tuple[float, int, bytes, list[torch.Tensor]]]:
    """Norm, checksum, sketch and differences by the kernel and without it; the values are written over."""
    found = []
    for kernel in (True, False):
        sketch, own = Sketch(sum(flat.numel() for flat in values)), [flat.clone() for flat in values]
        with monkeypatch.context() as patch:
            if not kernel:
                patch.setattr(differences, "kernels_for", lambda *_: None)
            norm2, mark = take_differences(anchors, own, own, sketch=sketch)
        found.append((norm2, mark, sketch.pack(), own))
    return found


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_the_kernel_does_what_torch_does(monkeypatch: pytest.MonkeyPatch, sizes: list[int]) -> None:
    anchors, values = flats(sizes, 1), flats(sizes, 2)
    (norm2, mark, sketch, made), (torch_norm2, torch_mark, torch_sketch, torch_made) = both_ways(
        monkeypatch, anchors, values
    )
    assert mark == torch_mark == checksum(*anchors)
    assert sketch == torch_sketch
    for one, other, anchor, value in zip(made, torch_made, anchors, values, strict=True):
        assert torch.equal(one, anchor - value)
        assert torch.equal(other, anchor - value)
    true = sum(float((a.double() - v.double()).square().sum()) for a, v in zip(anchors, values, strict=True))
    assert norm2 == pytest.approx(true, rel=1e-5)
    assert torch_norm2 == pytest.approx(true, rel=1e-5)


def test_what_is_not_finite_is_told_and_what_is_large_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    anchors = [torch.zeros(10_000)]
    for at, value in ((3, math.nan), (9_999, math.inf)):
        values = [torch.zeros(10_000)]
        values[0][at] = value
        assert all(not math.isfinite(norm2) for norm2, *_ in both_ways(monkeypatch, anchors, values))
    large = [torch.full((10_000,), 1e30)]  # a square of which overflows fp32
    assert [norm2 for norm2, *_ in both_ways(monkeypatch, anchors, large)] == [pytest.approx(1e64)] * 2


def test_a_part_of_a_tensor_has_its_own_checksum() -> None:
    whole = flats([1000], 3)[0]
    for start in (1, 2, 7):  # at addresses that are no multiple of 8 or 64
        part = whole[start:]
        assert take_differences([part], [part.clone()], [torch.empty_like(part)]) == (0.0, checksum(part.clone()))


def test_other_kinds_of_numbers_take_torchs_way() -> None:
    anchor, value = torch.ones(5, dtype=torch.float64), torch.zeros(5, dtype=torch.float64)
    assert take_differences([anchor], [value], [value], marked=False) == (5.0, 0)
    assert torch.equal(value, anchor)

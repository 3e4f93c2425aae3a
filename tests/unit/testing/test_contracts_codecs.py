"""The contract of codecs: for each promise a piece that breaks it, and the words that say so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from cadenza import codecs
from cadenza.codecs.integers import Integers
from cadenza.testing import (
    check_codec,
)


class Shorter(Integers):
    def encoded_bytes(self, numel: int) -> int:
        return super().encoded_bytes(numel) + (numel > 0)

    def encode(self, values: torch.Tensor, out: torch.Tensor) -> None:
        Integers(self.block).encode(values, out[:-1] if len(out) else out)

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        Integers(self.block).decode(data[:-1] if len(data) else data, out)

    def decode_add(self, data: torch.Tensor, out: torch.Tensor, weight: float) -> None:
        Integers(self.block).decode_add(data[:-1] if len(data) else data, out, weight)


class Overwrites(Integers):
    def encode(self, values: torch.Tensor, out: torch.Tensor) -> None:
        super().encode(values, out)
        values.zero_()


class AddsWithoutWeight(Integers):
    def decode_add(self, data: torch.Tensor, out: torch.Tensor, weight: float) -> None:
        super().decode_add(data, out, 1.0)


class Claims(Integers):
    exact = True  # type: ignore[misc]


class Shifts(Integers):
    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        super().decode(data, out)
        out.add_(0.125)

    def decode_add(self, data: torch.Tensor, out: torch.Tensor, weight: float) -> None:
        super().decode_add(data, out, weight)
        out.add_(0.125 * weight)


class TakesMuchScratch(Integers):
    def encode(self, values: torch.Tensor, out: torch.Tensor) -> None:
        super().encode(values * 1.0, out)


class WaitsForTheDevice(Integers):
    def encode(self, values: torch.Tensor, out: torch.Tensor) -> None:
        if len(values) and values[0].item() is None:
            return
        super().encode(values, out)


class Forgets(Integers):
    """Sends nothing at all, so that error feedback never makes up for it."""

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        out.zero_()

    def decode_add(self, data: torch.Tensor, out: torch.Tensor, weight: float) -> None:
        out.add_(0.0)


class LargerBlocks(Integers):
    """Says that it can be cut at 16, but has one scale for 256."""

    @property
    def _inner(self) -> Integers:
        return Integers(256)

    def encoded_bytes(self, numel: int) -> int:
        return self._inner.encoded_bytes(numel)

    def encode(self, values: torch.Tensor, out: torch.Tensor) -> None:
        self._inner.encode(values, out)

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        self._inner.decode(data, out)

    def decode_add(self, data: torch.Tensor, out: torch.Tensor, weight: float) -> None:
        self._inner.decode_add(data, out, weight)


class ShapedOnly(Integers):
    shaped = True  # type: ignore[misc]


class Overflows(Integers):
    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        super().decode(data, out)
        out.mul_(2.0).div_(2.0)


class SparseOnTheWayBack(Integers):
    @property
    def back(self) -> codecs.Codec:
        return codecs.topk()


class Sums(Integers):
    def combine(self, contributions: Sequence[torch.Tensor], out: torch.Tensor, weights: Sequence[float]) -> None:
        out.zero_()
        for data in contributions:
            self.decode_add(data, out, 1.0)


CODECS = {
    "every byte": (Shorter(256), "every one of encoded_bytes"),
    "values are left alone": (Overwrites(256), "leaves the values alone"),
    "weights": (AddsWithoutWeight(256), "weight times what decode gives"),
    "exact": (Claims(256), "exact codec returns the values"),
    "zeros and signs": (Shifts(256), "negative of x|zero comes back"),
    "scratch": (TakesMuchScratch(256), "scratch memory"),
    "waiting": (WaitsForTheDevice(256), "waits for a device"),
    "error feedback": (Forgets(256), "error feedback makes up"),
    "blocks": (LargerBlocks(16), "cut at multiples of block"),
    "fp32's end": (Overflows(256), "finite values stay finite; not values near fp32's end"),
    "way back": (SparseOnTheWayBack(256), "back writes every value"),
    "mean": (Sums(256), "mean of equal contributions"),
    "shapes": (ShapedOnly(256), "shaped codec is sparse"),
    "members": (object(), "all members; name, exact"),
}


@pytest.mark.parametrize(("codec", "words"), CODECS.values(), ids=CODECS)
def test_broken_codecs_are_found(codec: Any, words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        check_codec(codec)


@dataclass(frozen=True)
class Matrices:
    """A shaped codec: it must be told the shapes, though it makes little of them."""

    shapes: tuple[tuple[int, ...], ...] = ()
    shaped: bool = True
    inner: Any = field(default_factory=lambda: codecs.topk(1.0, chunk=128, bits=8))
    name: str = "matrices"
    exact: bool = False
    sparse: bool = True
    aligned: bool = False
    block: int = 128
    feedback: float | None = None

    @property
    def back(self) -> Matrices:
        return self

    def for_shapes(self, shapes: Sequence[tuple[int, ...]]) -> Matrices:
        return replace(self, shapes=tuple(shapes))

    def split(self, row_bytes: int) -> list[tuple[int, Matrices]]:
        total = sum(torch.Size(shape).numel() for shape in self.shapes)
        counts = [min(8192, total - start) for start in range(0, total, 8192)]
        return [(count, self.for_shapes([(count,)])) for count in counts]

    def encoded_bytes(self, numel: int) -> int:
        size: int = self.inner.encoded_bytes(numel)
        return size

    def encode(self, values: torch.Tensor, out: torch.Tensor) -> None:
        assert sum(torch.Size(shape).numel() for shape in self.shapes) == values.numel()
        self.inner.encode(values, out)

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        self.inner.decode(data, out)

    def decode_add(self, data: torch.Tensor, out: torch.Tensor, weight: float) -> None:
        self.inner.decode_add(data, out, weight)


def test_a_shaped_codec_is_given_shapes() -> None:
    check_codec(Matrices())

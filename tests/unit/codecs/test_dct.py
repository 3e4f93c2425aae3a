"""The codec of frequencies: what its authors' code computes, cut anywhere, the same bits everywhere."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from cadenza import LevelPlan, codecs
from cadenza.codecs import Codec, CombiningCodec, ShapedCodec, dct, error_feedback
from cadenza.testing import check_codec

SHAPES: list[tuple[int, ...]] = [(64, 128), (12,), (), (29 * 7, 50), (131,), (8, 3, 5, 5), (0, 4), (1, 70), (300, 2)]


def normal(numel: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def bound(k: int, shapes: Sequence[tuple[int, ...]], chunk: int = 64) -> Any:
    return dct(k, chunk=chunk).for_shapes(shapes)


def numel(shapes: Sequence[tuple[int, ...]]) -> int:
    return sum(math.prod(shape) for shape in shapes)


def encoded(codec: Codec, values: torch.Tensor) -> torch.Tensor:
    data = torch.zeros(codec.encoded_bytes(values.numel()), dtype=torch.uint8)
    codec.encode(values, data)
    return data


def returned(codec: Codec, values: torch.Tensor) -> torch.Tensor:
    out = torch.full_like(values, math.nan)
    codec.decode(encoded(codec, values), out)
    return out


def matrix(n: int) -> torch.Tensor:
    """The orthonormal DCT-II, a column a frequency."""
    i, f = torch.arange(n, dtype=torch.float64)[:, None], torch.arange(n, dtype=torch.float64)[None]
    scale = torch.full((n,), math.sqrt(2 / n), dtype=torch.float64)
    scale[0] = math.sqrt(1 / n)
    return scale * torch.cos(math.pi * (2 * i + 1) * f / (2 * n))


def side(length: int, chunk: int) -> int:
    return max(n for n in range(1, min(length, chunk) + 1) if length % n == 0)


def plain(values: torch.Tensor, shape: tuple[int, int], k: int, chunk: int) -> torch.Tensor:
    """What the values of a matrix come back as, block by block."""
    out, whole = torch.zeros(shape, dtype=torch.float64), values.double().view(shape)
    height, width = side(shape[0], chunk), side(shape[1], chunk)
    high, wide = matrix(height), matrix(width)
    for y in range(0, shape[0], height):
        for x in range(0, shape[1], width):
            place = slice(y, y + height), slice(x, x + width)
            frequencies = high.T @ whole[place] @ wide
            least = frequencies.abs().flatten().topk(min(k, height * width)).values[-1]
            out[place] = high @ frequencies.where(frequencies.abs() >= least, 0.0) @ wide.T
    return out.view(-1).float()


@pytest.mark.parametrize("codec", [dct(), dct(3, chunk=8), error_feedback(dct(), decay=0.999)])
def test_it_keeps_the_promises_of_codecs(codec: Codec) -> None:
    check_codec(codec)


def test_the_matrix_is_the_one_of_the_production_code() -> None:
    """Values from psyche's own test."""
    torch.testing.assert_close(
        matrix(4)[:2].float(),
        torch.tensor([[0.5, 0.6533, 0.5, 0.2706], [0.5, 0.2706, -0.5, -0.6533]]),
        atol=1e-4,
        rtol=0,
    )


@pytest.mark.parametrize("shape", [(64, 128), (203, 50), (12, 1), (1, 70), (7, 131)])
@pytest.mark.parametrize(("k", "chunk"), [(32, 64), (3, 8), (1, 1), (5, 256)])
def test_it_keeps_the_largest_frequencies_of_each_block(shape: tuple[int, int], k: int, chunk: int) -> None:
    values = normal(math.prod(shape))
    torch.testing.assert_close(
        returned(bound(min(k, chunk**2), [shape], chunk), values), plain(values, shape, k, chunk), rtol=1e-5, atol=1e-5
    )


def test_a_tensor_of_more_dimensions_is_a_matrix_and_a_vector_is_cut_too() -> None:
    values = normal(8 * 75)
    assert torch.equal(returned(bound(2, [(8, 3, 5, 5)]), values), returned(bound(2, [(8, 75)]), values))
    torch.testing.assert_close(
        returned(bound(2, [(600,)], 8), values), plain(values, (600, 1), 2, 8), rtol=1e-5, atol=1e-5
    )
    assert torch.equal(returned(dct(2, chunk=8), values), returned(bound(2, [(600,)], 8), values))


def test_all_frequencies_give_the_values_back() -> None:
    values = normal(numel(SHAPES))
    torch.testing.assert_close(returned(bound(4096, SHAPES), values), values, rtol=0, atol=3e-6)


def test_tensors_do_not_touch_each_other() -> None:
    values = normal(numel(SHAPES))
    alone = [
        returned(bound(3, [shape]), part)
        for shape, part in zip(SHAPES, values.split([math.prod(shape) for shape in SHAPES]), strict=True)
        if part.numel()
    ]
    assert torch.equal(returned(bound(3, SHAPES), values), torch.cat(alone))


@pytest.mark.parametrize("row_bytes", [45, 60, 300, 1 << 20])
def test_messages_fit_and_give_together_what_the_whole_gives(row_bytes: int) -> None:
    codec, values = bound(3, SHAPES), normal(numel(SHAPES))
    messages = codec.split(row_bytes)
    assert all(part.encoded_bytes(size) <= row_bytes for size, part in messages)
    parts = values.split([size for size, _ in messages])
    back = [returned(part, piece) for (_, part), piece in zip(messages, parts, strict=True)]
    assert torch.equal(torch.cat(back), returned(codec, values))
    assert len(messages) > 1 or row_bytes == 1 << 20


def test_parts_of_a_tensor_keep_the_blocks_of_the_whole() -> None:
    """Of 29 · 31 the largest divisor up to 64 is 31, and of two bands of it 62."""
    codec, values = bound(3, [(31 * 29, 2)]), normal(31 * 29 * 2)
    band = codec.encoded_bytes(values.numel()) // 29
    messages = codec.split(2 * band)
    sizes = [size for size, _ in messages]
    assert sizes == [2 * 31 * 2] * 14 + [31 * 2]
    back = [returned(part, piece) for (_, part), piece in zip(messages, values.split(sizes), strict=True)]
    assert torch.equal(torch.cat(back), returned(codec, values))


def test_a_message_has_a_bounded_number_of_values() -> None:
    messages = bound(1, [(1 << 12, 1 << 10)]).split(1 << 30)
    assert [size for size, _ in messages] == [1 << 20] * 4


def test_a_frequency_is_averaged_over_those_who_sent_it() -> None:
    """One block of four values, k = 1: two members send the constant part, one the slope."""
    codec, basis = bound(1, [(4,)]), matrix(4).float()
    contributions = [encoded(codec, v) for v in (2 * basis[:, 0], 4 * basis[:, 0], 6 * basis[:, 1])]
    out = torch.full((4,), math.nan)
    codec.combine(contributions, out, [1 / 3] * 3)
    torch.testing.assert_close(out, 3 * basis[:, 0] + 6 * basis[:, 1], rtol=1e-6, atol=1e-6)
    codec.combine(contributions, out, [0.25, 0.75, 0.0])
    torch.testing.assert_close(out, 3.5 * basis[:, 0], rtol=1e-6, atol=1e-6)
    codec.combine([encoded(codec, torch.zeros(4)), contributions[0]], out, [0.5, 0.5])
    torch.testing.assert_close(out, 2 * basis[:, 0], rtol=1e-6, atol=1e-6)
    codec.combine(contributions, out, [0.0, 0.0, 0.0])
    assert (out == 0).all()


def test_decode_add_is_decode_and_a_weighted_sum() -> None:
    codec, start = bound(3, SHAPES), normal(numel(SHAPES), seed=1)
    values = normal(numel(SHAPES))
    total = start.clone()
    codec.decode_add(encoded(codec, values), total, 0.3)
    torch.testing.assert_close(total, start + 0.3 * returned(codec, values), rtol=1e-6, atol=1e-6)


def test_bytes_may_lie_at_any_address_and_all_of_them_are_written() -> None:
    codec, values = bound(3, SHAPES), normal(numel(SHAPES))
    data = encoded(codec, values)
    for offset in (1, 2, 3):
        buffer = torch.full((data.numel() + 8,), 77, dtype=torch.uint8)
        place = buffer[offset : offset + data.numel()]
        codec.encode(values, place)
        out = torch.empty_like(values)
        codec.decode(place, out)
        assert torch.equal(place, data)
        assert torch.equal(out, returned(codec, values))
        assert (buffer[:offset] == 77).all()
        assert (buffer[offset + data.numel() :] == 77).all()


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 1e25])
def test_signs_and_powers_of_two_are_treated_alike_and_the_number_of_threads_does_not_count(scale: float) -> None:
    codec, values = bound(3, SHAPES), normal(numel(SHAPES)) * scale
    back = returned(codec, values)
    assert back.isfinite().all()
    assert torch.equal(returned(codec, -values), -back)
    assert torch.equal(returned(codec, values * 4), back * 4)
    assert (returned(codec, torch.zeros_like(values)) == 0).all()
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1 if threads > 1 else 2)
        assert torch.equal(returned(codec, values), back)
    finally:
        torch.set_num_threads(threads)


def test_the_way_back_is_exact_whatever_the_order_of_the_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    codec, values = bound(60, [(256, 512)], 256), normal(256 * 512) * 10 ** normal(256 * 512, seed=1)
    data, out, other = encoded(codec, values), torch.empty_like(values), torch.empty_like(values)
    codec.decode(data, out)
    multiply = torch.Tensor.__matmul__

    def backwards(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        half = a.shape[-1] // 2
        return multiply(a[..., half:].flip(-1), b[..., half:, :].flip(-2)) + multiply(a[..., :half], b[..., :half, :])

    monkeypatch.setattr(torch.Tensor, "__matmul__", backwards)
    codec.decode(data, other)
    assert torch.equal(out, other)


def test_what_is_not_finite_stays_in_its_block() -> None:
    for bad in (math.nan, math.inf):
        codec, values = bound(3, [(16, 8)], 8), normal(128)
        values[3] = bad
        assert torch.equal(returned(codec, values)[64:], returned(codec, normal(128))[64:])


def test_bytes_are_few() -> None:
    assert bound(32, [(4096, 4096)]).encoded_bytes(1 << 24) == (1 << 24) // 4096 * 32 * 6
    assert bound(32, [(64,)]).encoded_bytes(64) == 32 * 5  # places below 256 are one byte
    assert dct().encoded_bytes(0) == 0


def test_it_is_a_shaped_codec_that_combines_also_inside_error_feedback() -> None:
    codec = error_feedback(dct(3), decay=0.9)
    assert isinstance(dct(), ShapedCodec)
    assert isinstance(codec, ShapedCodec)
    assert (codec.shaped, codec.sparse, codec.exact, codec.feedback) == (True, True, False, 0.9)
    assert LevelPlan(1, codec=codec).anchored
    [(size, part)] = codec.for_shapes([(4, 4), (3,)]).split(1 << 20)  # type: ignore[attr-defined]
    assert size == 19
    assert isinstance(part, CombiningCodec)
    assert not isinstance(codecs.topk(), CombiningCodec)
    assert pickle.loads(pickle.dumps(codec)) == codec != error_feedback(dct(4), decay=0.9)
    assert dct(3).for_shapes([(4,)]) != dct(3).for_shapes([(5,)])


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: dct(0), ValueError, "k is 0; give a whole number from 1 to 4096."),
        (lambda: dct(1.5), TypeError, "k is 1.5; give a whole number from 1 to 4096."),
        (lambda: dct(5, chunk=2), ValueError, "k is 5; give a whole number from 1 to 4."),
        (lambda: dct(chunk=257), ValueError, "chunk is 257; give a whole number from 1 to 256."),
        (lambda: dct(chunk=True), TypeError, "chunk is True; give a whole number"),
        (lambda: dct().split(100), ValueError, r"call for_shapes\(shapes\) first"),
        (lambda: bound(32, [(64, 640)]).split(100), ValueError, "64 x 640 takes 1920 bytes .* choose a smaller k"),
        (lambda: bound(1, [(4,)]).encoded_bytes(5), ValueError, "tensors of 4 values in all; got 5"),
    ],
)
def test_bad_options_say_what_is_allowed(make: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def test_tensors_that_do_not_fit_are_refused() -> None:
    codec, values = bound(3, [(2, 5)]), normal(10)
    data = encoded(codec, values)
    with pytest.raises(TypeError, match="contiguous 1-D float32"):
        codec.encode(values.double(), data)
    with pytest.raises(TypeError, match="contiguous 1-D uint8"):
        codec.combine([data.float()], values, [1.0])
    with pytest.raises(ValueError, match=r"10 values take exactly \d+"):
        codec.decode_add(data[:-1], values, 1.0)

"""Each codec's own format: the levels, the bytes and the options, against plain references and by hand."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cadenza.codecs import Codec, CombiningCodec, bf16, e3m0, error_feedback, fp16, fp32, int8, topk
from cadenza.codecs.sparse import _pack_codes, _pack_places, _unpack_codes, _unpack_places

pytestmark = pytest.mark.usefixtures("either_way")


def encoded(codec: Codec, values: torch.Tensor) -> torch.Tensor:
    data = torch.empty(codec.encoded_bytes(values.numel()), dtype=torch.uint8)
    codec.encode(values, data)
    return data


def returned(codec: Codec, values: torch.Tensor) -> torch.Tensor:
    out = torch.full_like(values, math.nan)
    codec.decode(encoded(codec, values), out)
    return out


def normal(numel: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def bytes_of(data: torch.Tensor) -> bytes:
    return bytes(data.tolist())


# Floats


def test_fp32_is_the_memory_of_the_values() -> None:
    values = torch.tensor([1.0, -0.0, math.pi, 3e38])
    assert bytes_of(encoded(fp32(), values)) == struct.pack("<4f", *values.tolist())


@pytest.mark.parametrize(("codec", "dtype"), [(bf16(), torch.bfloat16), (fp16(), torch.float16)])
def test_16_bits_are_torchs_own_rounding(codec: Codec, dtype: torch.dtype) -> None:
    assert torch.equal(returned(codec, normal(1000)), normal(1000).to(dtype).float())


@pytest.mark.parametrize("codec", [bf16(), fp16()])
def test_16_bits_end_at_their_largest_number_instead_of_infinity(codec: Codec) -> None:
    largest = torch.finfo(torch.float32).max
    back = returned(codec, torch.tensor([largest, -largest]))
    assert back.isfinite().all()
    assert back[0] == -back[1] > 6e4


# int8


def test_int8_bytes_by_hand() -> None:
    values = torch.zeros(18)
    values[0], values[1], values[2], values[16], values[17] = 254.0, -1.0, 3.1, -1.0, 0.5
    integers = [127, 0, 2] + [0] * 13 + [-127, 64]  # −1 is half a step, which goes to the even 0
    assert bytes_of(encoded(int8(block=16), values)) == struct.pack("<2f18b", 2.0, 1 / 127, *integers)


def test_int8_equals_the_plain_formula() -> None:
    for block in (16, 256, 1000):
        expected = []
        for part in normal(5000).double().split(block):
            scale = part.abs().max() / 127
            expected.append((part / scale).round() * scale)
        torch.testing.assert_close(
            returned(int8(block=block), normal(5000)), torch.cat(expected).float(), rtol=1e-5, atol=1e-8
        )


def test_int8_loses_less_in_smaller_blocks() -> None:
    values = normal(1 << 16) * normal(1 << 16, seed=1).exp()
    errors = [(returned(int8(block=block), values) - values).norm() for block in (64, 256, 1024, 4096)]
    assert errors == sorted(errors)


# E3M0


LEVELS = [0.0] + [2.0**e for e in range(-6, 1)]


def test_e3m0_has_zero_and_seven_powers_of_two_of_either_sign() -> None:
    values = torch.tensor(LEVELS + [-level for level in LEVELS]) * 3.7
    torch.testing.assert_close(returned(e3m0(block=16), values), values, rtol=1e-6, atol=0)
    tried = returned(e3m0(block=16), torch.linspace(-1, 1, 16))
    assert set((tried.abs() / tried.abs().max()).tolist()) <= set(LEVELS)


def test_e3m0_bytes_by_hand() -> None:
    values = torch.zeros(21)
    values[0], values[1], values[8], values[9], values[16], values[18] = 8.0, -4.0, -0.1, 0.125, 1.0, -0.5
    nibbles = {0: 7, 1: 8 + 6, 8: 8 + 1, 9: 1}  # the sign is the highest bit, and −0.1 is nearer to −1/8 than to 0
    first = [nibbles.get(j, 0) | nibbles.get(j + 8, 0) << 4 for j in range(8)]
    last = [7, 0, 8 + 6]  # five values and a zero: the second half is empty
    scales = struct.pack("<2f2B", 8.0 * 2**0.25, 2**0.25, 1, 1)  # 2^¼ · the largest · 2^(−1/4) is the largest itself
    assert bytes_of(encoded(e3m0(block=16), values)) == scales + bytes(first + last)


def test_e3m0_gives_every_group_a_scale_of_its_own() -> None:
    groups = torch.tensor([1.0, 2.0**-10, 2.0**13, 2.0**-21])
    values = torch.tensor(LEVELS + [-level for level in LEVELS])[:, None] * groups  # value i belongs to group i mod 4
    torch.testing.assert_close(returned(e3m0(block=64), values.flatten()), values.flatten(), rtol=1e-6, atol=0)


def test_e3m0_takes_the_scale_that_loses_less_and_then_the_nearest_level() -> None:
    values = normal(16 * 500).view(500, 16) * normal(500, seed=1).exp()[:, None]
    back = returned(e3m0(block=16), values.flatten()).view(500, 16).double()
    exact, largest = values.double(), values.double().abs().amax(dim=1, keepdim=True)
    lost = []
    for scale in (2**0.25, 1.0):
        levels = torch.tensor(LEVELS).double() * scale
        distance = (exact.abs()[:, :, None] - largest[:, :, None] * levels).abs().amin(dim=2)
        lost.append(distance.square().sum(dim=1))
    least = torch.stack(lost).amin(dim=0)
    torch.testing.assert_close((back - exact).square().sum(dim=1), least, rtol=0.02, atol=0)
    assert (back * exact >= 0).all()


def test_e3m0_rounds_to_the_nearest_level() -> None:
    values = torch.tensor([1.0] * 9 + [0.76, 0.74, -0.38, -0.37, 1 / 40, 1 / 120, 1 / 140])
    expected = torch.tensor([1.0] * 9 + [1.0, 0.5, -0.5, -0.25, 1 / 32, 1 / 64, 0.0])
    torch.testing.assert_close(returned(e3m0(block=16), values), expected, rtol=1e-6, atol=0)


def test_e3m0_stays_in_its_levels_up_to_the_largest_numbers() -> None:
    values = torch.tensor([1e36, -9e35, 5e35, 1e30] * 4)
    back = returned(e3m0(), values)
    assert ((back - values).abs() <= values.abs() / 2.99 + 1e36 / 90).all()


@pytest.mark.parametrize("largest", [1e37, 1e38, torch.finfo(torch.float32).max])
@pytest.mark.parametrize(
    ("codec", "share"), [(int8(), 0.01), (e3m0(), 0.2), (e3m0(block=16), 0.2), (topk(1.0, bits=8), 0.01)], ids=repr
)
def test_values_near_the_end_of_fp32_lose_little(codec: Codec, share: float, largest: float) -> None:
    values = torch.tensor([1.0, -0.9, 0.5, 1e-6, 0.0, -0.3, 0.7, 1.0] * 40, dtype=torch.float64) * largest
    back = returned(codec, values.float()).double()
    assert (back - values).norm() <= share * values.norm()


# Top-k


def test_topk_sends_the_largest_of_each_chunk_and_nothing_else() -> None:
    values = normal(10_000)
    back = returned(topk(0.05, chunk=1000, bits=8), values)
    for sent, part in zip(back.split(1000), values.split(1000), strict=True):
        chosen = part.abs().topk(50).indices
        assert set(sent.nonzero().view(-1).tolist()) == set(chosen.tolist())
        torch.testing.assert_close(sent[chosen], part[chosen], rtol=0.01, atol=0.0)


def test_topk_cuts_the_last_chunk_by_its_own_length() -> None:
    codec = topk(0.1, chunk=100)
    assert (returned(codec, torch.arange(1.0, 131.0)) != 0).sum() == 10 + 3
    assert (returned(codec, torch.arange(1.0, 105.0)) != 0).sum() == 10 + 1
    assert codec.encoded_bytes(100) == 15 + 3 + 4  # places, 2 bits each, two scales
    assert codec.encoded_bytes(130) == codec.encoded_bytes(100) + 6 + 1 + 4


def test_topk_of_two_bits_sends_the_means_of_the_small_and_of_the_large_ones() -> None:
    values = torch.zeros(16)
    values[[1, 3, 5, 7]] = torch.tensor([1.0, -2.0, 6.0, -10.0])
    back = returned(topk(0.25, chunk=16), values)
    assert back[[1, 3, 5, 7]].tolist() == [1.5, -1.5, 8.0, -8.0]


def test_topk_is_not_misled_by_an_outlier() -> None:
    values = normal(4096)
    values[7] = 1e4
    back = returned(topk(), values)
    sent = back.nonzero().view(-1)
    others = sent[sent != 7]
    assert back[7] == pytest.approx(1e4, rel=0.01)
    assert (back[others] / values[others]).sub(1).abs().max() < 0.5


def test_topk_sends_nothing_where_nothing_is_even_if_there_is_room() -> None:
    values = torch.zeros(4096)
    values[100:110] = torch.arange(1.0, 11.0)
    assert (returned(topk(), values)[values == 0] == 0).all()


def test_topk_of_senders_divides_by_the_weights_of_those_who_sent() -> None:
    codec, out = topk(0.25, chunk=16, bits=8, mean_of="senders"), torch.full((20,), math.nan)
    assert isinstance(codec, CombiningCodec)
    one, two = torch.zeros(20), torch.zeros(20)
    one[[0, 1, 17]], two[[1, 2, 17]] = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([6.0, 1.0, -3.0])
    codec.combine([encoded(codec, one), encoded(codec, two)], out, [0.75, 0.25])
    wanted = torch.zeros(20)
    wanted[[0, 1, 2, 17]] = torch.tensor([1.0, 0.75 * 2 + 0.25 * 6, 1.0, 0.75 * 3 - 0.25 * 3])
    torch.testing.assert_close(out, wanted, rtol=0.01, atol=0)


@settings(deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 4095), min_size=1, max_size=40))
def test_places_survive_packing_into_12_bits(places: list[int]) -> None:
    packed = _pack_places(torch.tensor([places, places[::-1]]))
    assert packed.shape == (2, 3 * ((len(places) + 1) // 2))
    assert int(packed.max()) < 256
    assert _unpack_places(packed.to(torch.uint8))[:, : len(places)].tolist() == [places, places[::-1]]


@settings(deadline=None, derandomize=True)
@given(st.sampled_from([2, 4, 8]), st.lists(st.integers(0, 255), min_size=1, max_size=40))
def test_codes_survive_packing(bits: int, numbers: list[int]) -> None:
    codes = torch.tensor([numbers]).remainder(1 << bits).to(torch.uint8)
    packed = _pack_codes(codes, bits)
    assert packed.shape == (1, math.ceil(len(numbers) * bits / 8))
    assert torch.equal(_unpack_codes(packed, bits)[:, : len(numbers)], codes)


# Error feedback


def test_error_feedback_writes_what_the_codec_inside_writes() -> None:
    inside, outside = e3m0(block=32), error_feedback(e3m0(block=32), decay=0.5)
    assert torch.equal(encoded(outside, normal(100)), encoded(inside, normal(100)))
    assert (outside.feedback, inside.feedback) == (0.5, None)
    assert (outside.block, outside.exact, outside.sparse) == (32, False, False)
    assert outside.name == "error_feedback(e3m0)"


def test_error_feedback_passes_the_way_back_on() -> None:
    codec = error_feedback(e3m0(back=int8()))
    assert (codec.back, codec.name) == (int8(), "error_feedback(e3m0(back=int8))")
    assert error_feedback(int8()).back == int8()
    assert isinstance(error_feedback(topk(mean_of="senders")), CombiningCodec)
    assert not isinstance(error_feedback(topk()), CombiningCodec)


# Options


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: int8(block=0), ValueError, "block is 0; give a whole number from 16 to 65536."),
        (lambda: int8(block=256.0), TypeError, "block is 256.0; give a whole number from 16 to 65536."),
        (lambda: int8(block=True), TypeError, "block is True; give a whole number"),
        (lambda: e3m0(block=33), ValueError, "block is 33; give a multiple of 16 from 16 to 65536."),
        (lambda: topk(0.0), ValueError, "density is 0.0; give the share of values to send, above 0 and up to 1."),
        (lambda: topk(math.nan), ValueError, "density is nan; give the share"),
        (lambda: topk("2%"), TypeError, "density is '2%'; give the share"),
        (lambda: topk(chunk=8192), ValueError, "chunk is 8192; give a whole number from 16 to 4096."),
        (lambda: topk(bits=3), ValueError, "bits is 3; give 2, 4 or 8 bits"),
        (lambda: topk(mean_of="some"), ValueError, 'mean_of is \'some\'; give "all" members or the "senders"'),
        (lambda: e3m0(back="int8"), TypeError, "back is 'int8'; give the codec that writes the mean, such as int8()"),
        (lambda: e3m0(back=topk()), ValueError, r"back is topk\(0.02\); give a codec that writes every value"),
        (lambda: e3m0(back=error_feedback(int8())), ValueError, "Error feedback goes around both ways"),
        (lambda: error_feedback(fp32()), ValueError, "fp32 loses nothing to feed back; use it alone."),
        (
            lambda: error_feedback(error_feedback(int8())),
            ValueError,
            "its loss is fed back already; wrap a codec once.",
        ),
        (lambda: error_feedback(int8), TypeError, r"takes a codec, not .*; write error_feedback\(int8\(\)\)."),
        (lambda: error_feedback("int8"), TypeError, r"takes a codec, not 'int8'; write error_feedback\(int8\(\)\)."),
        (lambda: error_feedback(int8(), decay=0), ValueError, "decay is 0; give the share of the loss to keep"),
        (lambda: error_feedback(int8(), decay=1.5), ValueError, "decay is 1.5; give the share of the loss to keep"),
        (lambda: error_feedback(int8(), decay=None), TypeError, "decay is None; give the share of the loss to keep"),
    ],
)
def test_bad_options_say_what_is_allowed(make: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def test_codecs_with_other_options_are_other_codecs() -> None:
    assert int8() == int8(block=256) != int8(block=128)
    assert topk(0.02) != topk(0.03)
    assert repr(error_feedback(topk(0.01), decay=0.95)) == (
        "ErrorFeedback(codec=TopK(density=0.01, block=4096, bits=2), feedback=0.95)"
    )

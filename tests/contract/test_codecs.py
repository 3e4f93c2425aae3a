"""What every codec promises. To hold a new one to it, add a line to CODECS."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cadenza import codecs
from cadenza.codecs import Codec
from cadenza.testing import check_codec

pytestmark = pytest.mark.usefixtures("either_way")
Bound = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Case:
    """A codec, at most how many of fp32's bytes it takes, and how far off a value may come back.

    `bound` is given the magnitudes, and the largest magnitude in each one's block.
    """

    codec: Codec
    bytes_share: float
    bound: Bound = field(repr=False)


CODECS = [
    Case(codecs.fp32(), 1.0, lambda size, largest: 0 * size),
    Case(codecs.bf16(), 0.5, lambda size, largest: size * 2**-8),
    Case(codecs.fp16(), 0.5, lambda size, largest: size * 2**-11 + 2**-25 + (size - 65504).clamp(min=0)),
    Case(codecs.int8(), 0.27, lambda size, largest: largest / 253.9),
    Case(codecs.int8(block=100), 0.27, lambda size, largest: largest / 253.9),
    Case(codecs.e3m0(), 0.15, lambda size, largest: torch.maximum(size / 2.99, largest / 90.4)),
    Case(codecs.e3m0(block=64), 0.16, lambda size, largest: torch.maximum(size / 2.99, largest / 90.4)),
    Case(codecs.e3m0(back=codecs.int8()), 0.15, lambda size, largest: torch.maximum(size / 2.99, largest / 90.4)),
    Case(codecs.auto(), 0.5, lambda size, largest: size * 2**-8),
    Case(codecs.topk(), 0.01, lambda size, largest: largest * 1.01),
    Case(codecs.topk(0.3, chunk=50, bits=4), 0.3, lambda size, largest: largest * 1.01),
    Case(codecs.topk(1.0, chunk=128, bits=8), 0.7, lambda size, largest: largest / 200),
    Case(codecs.topk(mean_of="senders"), 0.01, lambda size, largest: largest * 1.01),
    Case(codecs.error_feedback(codecs.int8()), 0.27, lambda size, largest: largest / 253.9),
    Case(codecs.error_feedback(codecs.topk(), decay=0.95), 0.01, lambda size, largest: largest * 1.01),
]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Many small operations on two threads wait for each other longer than they work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


every_codec = pytest.mark.parametrize("case", CODECS, ids=lambda case: repr(case.codec))
LARGEST = torch.finfo(torch.float32).max
LARGE = 300_001  # values: several pieces, and a last block that is not full


def normal(numel: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def encoded(codec: Codec, values: torch.Tensor) -> torch.Tensor:
    data = torch.empty(codec.encoded_bytes(values.numel()), dtype=torch.uint8)
    codec.encode(values, data)
    return data


def decoded(codec: Codec, data: torch.Tensor, numel: int) -> torch.Tensor:
    out = torch.full((numel,), math.nan)
    codec.decode(data, out)
    return out


def returned(codec: Codec, values: torch.Tensor) -> torch.Tensor:
    """The values as they come back."""
    return decoded(codec, encoded(codec, values), values.numel())


def largest_in_block(codec: Codec, values: torch.Tensor) -> torch.Tensor:
    filled = torch.nn.functional.pad(values.abs(), (0, -values.numel() % codec.block))
    return filled.view(-1, codec.block).amax(dim=1).repeat_interleave(codec.block)[: values.numel()]


finite = st.floats(-(2.0**90), 2.0**90, width=32)
any_values = st.one_of(
    st.lists(finite, min_size=1, max_size=600),
    st.lists(st.sampled_from([0.0, -0.0, 1.0, -1.0, 0.75, 1e-3, -1e6]), min_size=1, max_size=600),
    st.lists(st.floats(-1, 1, width=32), min_size=1, max_size=600),
).map(lambda numbers: torch.tensor(numbers, dtype=torch.float32))


def for_all(*strategies: st.SearchStrategy[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    return lambda test: settings(deadline=None, derandomize=True, max_examples=60)(given(*strategies)(test))


@every_codec
def test_keeps_its_contract(case: Case) -> None:
    check_codec(case.codec)


@every_codec
def test_fulfils_the_protocol(case: Case) -> None:
    assert isinstance(case.codec, Codec)
    assert case.codec.block >= 1
    assert case.codec.exact == (case.bound(torch.ones(1), torch.ones(1)).item() == 0)


@every_codec
def test_is_a_value_that_can_be_compared_hashed_and_sent(case: Case) -> None:
    again = pickle.loads(pickle.dumps(case.codec))
    assert again == case.codec
    assert hash(again) == hash(case.codec)
    assert len({c.codec for c in CODECS}) == len(CODECS)


@every_codec
def test_takes_no_more_than_its_share_of_bytes(case: Case) -> None:
    assert case.codec.encoded_bytes(1 << 20) <= case.bytes_share * (4 << 20)
    assert case.codec.encoded_bytes(0) == 0


@every_codec
@for_all(any_values)
def test_error_is_bounded(case: Case, values: torch.Tensor) -> None:
    error = (returned(case.codec, values) - values).abs()
    assert (error <= case.bound(values.abs(), largest_in_block(case.codec, values)) + 2**-99).all()


@every_codec
@for_all(any_values)
def test_what_is_lost_is_no_more_than_what_was_there(case: Case, values: torch.Tensor) -> None:
    values = values.double().clamp(-1e15, 1e15).float()
    lost = (returned(case.codec, values) - values).double().norm()
    assert lost <= 1.01 * values.double().norm() + 1e-7  # otherwise error feedback would run away


@every_codec
def test_error_is_bounded_over_many_pieces(case: Case) -> None:
    values = normal(LARGE)
    error = (returned(case.codec, values) - values).abs()
    assert (error <= case.bound(values.abs(), largest_in_block(case.codec, values))).all()


@every_codec
@for_all(any_values)
def test_zeros_come_back_as_zeros(case: Case, values: torch.Tensor) -> None:
    values[::3] = 0.0
    assert (returned(case.codec, values)[values == 0] == 0).all()
    assert (returned(case.codec, torch.zeros_like(values)) == 0).all()


@every_codec
@for_all(any_values)
def test_signs_are_treated_alike(case: Case, values: torch.Tensor) -> None:
    assert torch.equal(returned(case.codec, -values), -returned(case.codec, values))


@every_codec
@for_all(any_values)
def test_finite_values_stay_finite(case: Case, values: torch.Tensor) -> None:
    assert returned(case.codec, values).isfinite().all()


@every_codec
@for_all(st.lists(st.floats(-LARGEST, LARGEST, width=32), min_size=1, max_size=600).map(torch.tensor))
def test_finite_values_stay_finite_up_to_the_end_of_fp32(case: Case, values: torch.Tensor) -> None:
    total = torch.zeros_like(values)
    case.codec.decode_add(encoded(case.codec, values), total, 0.5)
    assert returned(case.codec, values).isfinite().all()
    assert total.isfinite().all()


@every_codec
def test_tensors_that_do_not_fit_are_refused(case: Case) -> None:
    codec, values = case.codec, normal(10)
    data = encoded(codec, values)
    for wrong in (values.double(), values.view(2, 5), normal(20)[::2]):
        with pytest.raises(TypeError, match="contiguous 1-D float32"):
            codec.encode(wrong, data)
        with pytest.raises(TypeError, match="contiguous 1-D float32"):
            codec.decode(data, wrong)
    for wrong in (data.float(), torch.zeros(2 * data.numel(), dtype=torch.uint8)[::2]):
        with pytest.raises(TypeError, match="contiguous 1-D uint8"):
            codec.encode(values, wrong)
    with pytest.raises(ValueError, match=r"10 values take exactly \d+"):
        codec.encode(values, data[:-1])
    with pytest.raises(ValueError, match=r"10 values take exactly \d+"):
        codec.decode_add(data[:-1], values, 1.0)

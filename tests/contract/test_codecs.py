"""What every codec promises. To hold a new one to it, add a line to CODECS."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from cadenza import codecs
from cadenza.codecs import Codec

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
    Case(codecs.topk(), 0.01, lambda size, largest: largest * 1.01),
    Case(codecs.topk(0.3, chunk=50, bits=4), 0.3, lambda size, largest: largest * 1.01),
    Case(codecs.topk(1.0, chunk=128, bits=8), 0.7, lambda size, largest: largest / 200),
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
LARGE = 300_001  # values: several pieces, and a last block that is not full


def numels(codec: Codec) -> list[int]:
    block = codec.block
    return sorted({0, 1, 2, 3, 7, 8, block - 1, block, block + 1, 3 * block, 3 * block + 5, 5000})


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
def test_encoded_size_is_exact_and_every_byte_of_it_is_written(case: Case) -> None:
    for numel in numels(case.codec):
        size = case.codec.encoded_bytes(numel)
        first, second = torch.zeros(size + 2, dtype=torch.uint8), torch.full((size + 2,), 255, dtype=torch.uint8)
        for buffer in (first, second):
            case.codec.encode(normal(numel), buffer[1:-1])
        assert torch.equal(first[1:-1], second[1:-1])
        assert first[[0, -1]].tolist() == [0, 0]
        assert second[[0, -1]].tolist() == [255, 255]


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
def test_decode_add_is_decode_and_a_weighted_sum(case: Case) -> None:
    for numel in [*numels(case.codec), LARGE]:
        data, start = encoded(case.codec, normal(numel)), normal(numel, seed=1)
        total = start.clone()
        case.codec.decode_add(data, total, 0.3)
        torch.testing.assert_close(total, start + 0.3 * decoded(case.codec, data, numel), rtol=1e-6, atol=1e-6)


@every_codec
def test_equal_values_give_equal_bytes(case: Case) -> None:
    values = normal(LARGE)
    alone = encoded(case.codec, values)
    torch.set_num_threads(2)
    assert torch.equal(alone, encoded(case.codec, values.clone()))


@every_codec
def test_encoding_leaves_the_values_alone(case: Case) -> None:
    values = normal(LARGE)
    encoded(case.codec, values)
    assert torch.equal(values, normal(LARGE))


@every_codec
@pytest.mark.parametrize("numel", [5, 1000, LARGE])
def test_bytes_may_lie_at_any_address(case: Case, numel: int) -> None:
    values, start = normal(numel), normal(numel, seed=1)
    plain = encoded(case.codec, values)
    expected = start.clone()
    case.codec.decode_add(plain, expected, 2.0)
    for offset in (1, 2, 4, 7):
        buffer = torch.full((plain.numel() + 16,), 77, dtype=torch.uint8)
        place = buffer[offset : offset + plain.numel()]
        case.codec.encode(values, place)
        total = start.clone()
        case.codec.decode_add(place, total, 2.0)
        assert torch.equal(place, plain)
        assert torch.equal(decoded(case.codec, place, numel), decoded(case.codec, plain, numel))
        assert torch.equal(total, expected)
        assert (buffer[:offset] == 77).all()
        assert (buffer[offset + plain.numel() :] == 77).all()


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
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_does_no_harm_to_other_blocks(case: Case, bad: float) -> None:
    block = 64 * case.codec.block if case.codec.block < 64 else case.codec.block
    values = normal(3 * block + 3)
    values[block + 1] = bad
    back, good = returned(case.codec, values), returned(case.codec, normal(3 * block + 3))
    assert torch.equal(back[:block], good[:block])
    assert torch.equal(back[2 * block :], good[2 * block :])


@every_codec
def test_parts_cut_at_blocks_come_back_as_the_whole_does(case: Case) -> None:
    block, values = case.codec.block, normal(LARGE)
    cuts = [0, block, 7 * block, LARGE // block // 2 * block, LARGE]
    parts = [returned(case.codec, values[a:b]) for a, b in pairwise(cuts)]
    assert torch.equal(torch.cat(parts), returned(case.codec, values))


class Watch(TorchDispatchMode):
    """Notes the largest memory that any operation allocates, and operations that would wait for a device."""

    WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal.default", "unique")

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0
        self.waiting: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = {x.untyped_storage().data_ptr() for x in tensors((args, kwargs or {}))}
        result = func(*args, **(kwargs or {}))
        for tensor in tensors(result):
            if tensor.untyped_storage().data_ptr() not in given:
                self.largest = max(self.largest, tensor.untyped_storage().nbytes())
        self.waiting += [str(func)] if any(name in str(func) for name in self.WAITING) else []
        return result


def tensors(thing: Any) -> Iterator[torch.Tensor]:
    if isinstance(thing, torch.Tensor):
        yield thing
    elif isinstance(thing, dict):
        yield from tensors(list(thing.values()))
    elif isinstance(thing, list | tuple):
        for part in thing:
            yield from tensors(part)


@every_codec
@pytest.mark.parametrize("offset", [0, 1])
def test_scratch_does_not_grow_with_the_values_and_nothing_waits_for_a_device(case: Case, offset: int) -> None:
    largest = []
    for numel in (1_100_003, 2_200_003):
        values, out = torch.ones(numel), torch.zeros(numel)
        data = torch.empty(case.codec.encoded_bytes(numel) + offset, dtype=torch.uint8)[offset:]
        with Watch() as watch:
            case.codec.encode(values, data)
            case.codec.decode(data, out)
            case.codec.decode_add(data, out, 0.5)
        assert watch.waiting == []
        largest.append(watch.largest)
    assert largest[0] == largest[1] <= 2 << 20


LOSSY = [case for case in CODECS if not case.codec.exact]


@pytest.mark.parametrize("case", LOSSY, ids=lambda case: repr(case.codec))
def test_error_feedback_sends_in_the_end_what_was_lost_at_first(case: Case) -> None:
    values = normal(2 * case.codec.block + 50)
    residual, total = torch.zeros_like(values), torch.zeros_like(values)
    off = []
    for n in range(1, 401):
        wanted = values + residual
        sent = returned(case.codec, wanted)
        residual = wanted - sent
        total += sent
        if n in (1, 100, 400):
            off.append(((total / n - values).norm() / values.norm()).item())
    assert off[2] <= 0.02 or off[2] <= 0.4 * off[1]  # the mean gets nearer as 1 / n
    assert off[2] <= 0.15 * off[0] + 1e-6


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

"""Packing: every element exactly once, in place, in an order that two ranks with equal digests share."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

from cadenza.engine.bucket import Bucket
from cadenza.engine.packing import Fragment, wire_dtype


def for_all(*strategies: st.SearchStrategy[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test on many examples, the same ones every time and however long each takes."""
    return lambda test: settings(deadline=None, derandomize=True, max_examples=200)(given(*strategies)(test))


DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.complex64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]
LAYOUTS = ["contiguous", "channels_last", "transposed", "sliced rows", "sliced columns", "part"]
Tie = Literal["same", "shared", "flattened"]


@dataclass(frozen=True)
class Spec:
    """A tensor to build, or a tie to one built before."""

    shape: tuple[int, ...] = (2, 3)
    dtype: torch.dtype = torch.float32
    layout: str = "contiguous"
    takes: bool = True
    tie: tuple[Tie, int] | None = None


def laid_out(shape: tuple[int, ...], dtype: torch.dtype, layout: str) -> torch.Tensor:
    """A tensor of zeros that lies in memory in the given way, as far as its shape allows."""
    if layout == "channels_last" and len(shape) == 4:
        return torch.zeros(shape, dtype=dtype).contiguous(memory_format=torch.channels_last)
    if layout == "transposed":
        return torch.zeros(shape[::-1], dtype=dtype).permute([*reversed(range(len(shape)))])
    if layout == "sliced rows" and shape:
        return torch.zeros((shape[0] * 2, *shape[1:]), dtype=dtype)[::2]
    if layout == "sliced columns" and shape:
        return torch.zeros((*shape[:-1], shape[-1] * 3), dtype=dtype)[..., ::3]
    if layout == "part" and shape:
        return torch.zeros([size + 2 for size in shape], dtype=dtype)[tuple(slice(1, size + 1) for size in shape)]
    return torch.zeros(shape, dtype=dtype)


def build(specs: list[Spec], seed: int = 0) -> list[nn.Parameter]:
    """Parameters with random values."""
    generator = torch.Generator().manual_seed(seed)
    built: list[nn.Parameter] = []
    for spec in specs:
        if spec.tie is not None and built:
            kind, other = spec.tie[0], built[spec.tie[1] % len(built)]
            if kind == "same":
                built.append(other)
            elif kind == "flattened" and other.is_contiguous():
                built.append(nn.Parameter(other.detach().view(-1)))
            else:
                built.append(nn.Parameter(other.detach()))
            continue
        tensor = laid_out(spec.shape, spec.dtype, spec.layout)
        real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        real.copy_(torch.randn(real.shape, generator=generator))
        built.append(nn.Parameter(tensor))
    return built


def fragment_of(specs: list[Spec], seed: int = 0) -> Fragment:
    return Fragment(build(specs, seed), taking=[spec.takes for spec in specs])


def addresses(tensor: torch.Tensor) -> list[int]:
    """Where every real value of a tensor lies."""
    plain = tensor.detach()
    real = torch.view_as_real(plain) if plain.is_complex() else plain
    return [
        real.data_ptr() + real.element_size() * sum(i * stride for i, stride in zip(index, real.stride(), strict=True))
        for index in product(*map(range, real.shape))
    ]


def all_same_bits(before: Iterable[torch.Tensor], after: Iterable[torch.Tensor]) -> bool:
    def bits(tensor: torch.Tensor) -> torch.Tensor:
        fresh = tensor.detach().clone(memory_format=torch.contiguous_format)
        return fresh.view(-1).view(torch.uint8)

    return all(torch.equal(bits(a), bits(b)) for a, b in zip(before, after, strict=True))


def at_most(capacity: int) -> Callable[[torch.device, torch.dtype], int]:
    return lambda device, dtype: capacity


def packed(bucket: Bucket) -> torch.Tensor:
    memory = torch.empty(bucket.numel, dtype=bucket.dtype)
    bucket.pack(memory)
    return memory


shapes = st.lists(st.integers(0, 4), max_size=4).map(tuple)
specs = st.builds(
    Spec,
    shape=shapes,
    dtype=st.sampled_from(DTYPES),
    layout=st.sampled_from(LAYOUTS),
    takes=st.booleans(),
    tie=st.none() | st.tuples(st.sampled_from(["same", "shared", "flattened"]), st.integers(0, 5)),
)
spec_lists = st.lists(specs, max_size=6)
capacities = st.integers(1, 12) | st.just(10_000)


@for_all(spec_lists, capacities)
def test_every_element_that_takes_part_is_packed_exactly_once(given_specs: list[Spec], capacity: int) -> None:
    parameters = build(given_specs)
    fragment = Fragment(parameters, taking=[spec.takes for spec in given_specs])
    pieces = Counter(a for bucket in fragment.buckets(at_most(capacity)) for p in bucket.pieces for a in addresses(p))
    taking = {a for p, spec in zip(parameters, given_specs, strict=True) if spec.takes for a in addresses(p)}
    assert set(pieces) == taking
    assert set(pieces.values()) <= {1}
    assert fragment.numel == len(taking)


@for_all(spec_lists, capacities)
def test_buckets_stay_within_their_capacity_and_hold_one_dtype(given_specs: list[Spec], capacity: int) -> None:
    for bucket in fragment_of(given_specs).buckets(at_most(capacity)):
        assert 0 < bucket.numel <= capacity
        assert bucket.numel == sum(bucket.sizes) == sum(piece.numel() for piece in bucket.pieces)
        assert len({piece.dtype for piece in bucket.pieces}) == 1
        assert {wire_dtype(piece.dtype) for piece in bucket.pieces} == {bucket.dtype}


@for_all(spec_lists, capacities)
def test_unpacking_what_was_packed_gives_the_same_bits_back(given_specs: list[Spec], capacity: int) -> None:
    parameters = build(given_specs)
    before = [p.detach().clone() for p in parameters]
    fragment = Fragment(parameters, taking=[spec.takes for spec in given_specs])
    buckets = fragment.buckets(at_most(capacity))
    memories = [packed(bucket) for bucket in buckets]
    with torch.no_grad():
        for p, spec in zip(parameters, given_specs, strict=True):
            if spec.takes:
                (torch.view_as_real(p) if p.is_complex() else p).copy_(torch.ones(()))
    for bucket, memory in zip(buckets, memories, strict=True):
        bucket.unpack(memory)
    assert all_same_bits(before, parameters)


@for_all(spec_lists, capacities)
def test_unpacking_leaves_addresses_strides_and_ties_alone(given_specs: list[Spec], capacity: int) -> None:
    parameters = build(given_specs)

    def places() -> list[tuple[int, int, tuple[int, ...], tuple[int, ...]]]:
        return [(p.data_ptr(), p.untyped_storage().data_ptr(), p.shape, p.stride()) for p in parameters]

    before = places()
    fragment = Fragment(parameters, taking=[spec.takes for spec in given_specs])
    taken = {a for p, spec in zip(parameters, given_specs, strict=True) if spec.takes for a in addresses(p)}
    other = [p.detach().clone() for p, s in zip(parameters, given_specs, strict=True) if not taken & set(addresses(p))]
    for bucket in fragment.buckets(at_most(capacity)):
        bucket.unpack(torch.zeros(bucket.numel, dtype=bucket.dtype))
    assert places() == before
    untouched = [p for p in parameters if not taken & set(addresses(p))]
    assert all_same_bits(other, untouched)
    assert all(
        (p.detach() == 0).all() for p, spec in zip(parameters, given_specs, strict=True) if spec.takes and p.numel()
    )


@for_all(st.sampled_from(LAYOUTS), shapes, st.integers(1, 5))
def test_unpacking_writes_nothing_beside_the_tensor(layout: str, shape: tuple[int, ...], capacity: int) -> None:
    tensor = laid_out(shape, torch.float32, layout)
    whole = torch.as_strided(tensor, (tensor.untyped_storage().nbytes() // 4,), (1,), 0)
    whole.fill_(7)
    for bucket in Fragment([tensor]).buckets(at_most(capacity)):
        bucket.unpack(torch.zeros(bucket.numel))
    assert (tensor == 0).all()
    assert int((whole == 7).sum()) == whole.numel() - tensor.numel()


@for_all(spec_lists)
def test_the_digest_is_the_same_for_the_same_structure(given_specs: list[Spec]) -> None:
    assert fragment_of(given_specs, seed=1).digest == fragment_of(given_specs, seed=2).digest


@for_all(shapes, st.sampled_from(LAYOUTS), st.sampled_from(LAYOUTS))
def test_two_layouts_have_one_digest_exactly_if_they_are_packed_in_one_order(
    shape: tuple[int, ...], one: str, other: str
) -> None:
    numbers = torch.arange(math.prod(shape), dtype=torch.float64).view(shape)
    a, b = (Fragment([laid_out(shape, torch.float64, layout).copy_(numbers)]) for layout in (one, other))
    packings = [[packed(bucket).tolist() for bucket in fragment.buckets(at_most(5))] for fragment in (a, b)]
    orders = [[value for bucket in packing for value in bucket] for packing in packings]
    assert (a.digest == b.digest) == (orders[0] == orders[1])
    if a.digest == b.digest:
        assert packings[0] == packings[1], "one order, but other buckets"


@for_all(st.lists(specs.filter(lambda spec: spec.tie is None), min_size=1, max_size=5), st.data())
def test_the_digest_differs_when_shape_dtype_or_taking_differ(given_specs: list[Spec], data: st.DataObject) -> None:
    i = data.draw(st.integers(0, len(given_specs) - 1))
    spec = given_specs[i]
    changed = data.draw(
        st.sampled_from(
            [
                replace(spec, shape=(*spec.shape, 1)),
                replace(spec, shape=(1, *spec.shape)),
                replace(spec, shape=(*spec.shape[:-1], spec.shape[-1] + 1) if spec.shape else (2,)),
                replace(spec, dtype=DTYPES[DTYPES.index(spec.dtype) - 1]),
                replace(spec, takes=not spec.takes),
            ]
        )
    )
    others = [*given_specs[:i], changed, *given_specs[i + 1 :]]
    assert fragment_of(given_specs).digest != fragment_of(others).digest


@for_all(st.lists(specs.filter(lambda spec: spec.tie is None), min_size=2, max_size=5))
def test_the_digest_differs_when_positions_differ(given_specs: list[Spec]) -> None:
    turned = [*given_specs[1:], given_specs[0]]
    assume([(s.shape, s.dtype, s.takes) for s in turned] != [(s.shape, s.dtype, s.takes) for s in given_specs])
    assert fragment_of(given_specs).digest != fragment_of(turned).digest


@for_all(spec_lists, specs)
def test_the_digest_differs_when_a_position_is_added(given_specs: list[Spec], last: Spec) -> None:
    assert fragment_of(given_specs).digest != fragment_of([*given_specs, last]).digest


def test_equal_numbers_of_values_in_other_shapes_have_different_digests() -> None:
    digests = {Fragment([torch.zeros(shape)]).digest for shape in [(6,), (2, 3), (3, 2), (6, 1), (1, 6)]}
    assert len(digests) == 5


def test_fp16_and_bf16_of_one_shape_have_different_digests() -> None:
    half, brain = (Fragment([torch.zeros(4, dtype=dtype)]) for dtype in (torch.float16, torch.bfloat16))
    assert half.digest != brain.digest


@pytest.mark.parametrize("kind", ["same", "shared"])
def test_the_digest_tells_tied_parameters_from_separate_ones(kind: Tie) -> None:
    tied = fragment_of([Spec(), Spec(tie=(kind, 0))])
    assert tied.digest != fragment_of([Spec(), Spec()]).digest


def test_the_digest_tells_to_which_parameter_another_is_tied() -> None:
    first = fragment_of([Spec(), Spec(), Spec(tie=("shared", 0))])
    assert first.digest != fragment_of([Spec(), Spec(), Spec(tie=("shared", 1))]).digest


def test_one_parameter_twice_and_two_that_share_memory_are_the_same_tie() -> None:
    assert fragment_of([Spec(), Spec(tie=("same", 0))]).digest == fragment_of([Spec(), Spec(tie=("shared", 0))]).digest


def test_a_tie_to_a_parameter_that_takes_no_part_is_packed_by_itself() -> None:
    parameters = build([Spec(), Spec(tie=("shared", 0))])
    fragment = Fragment(parameters, taking=[False, True])
    assert fragment.numel == parameters[1].numel()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((4, 3, 5, 5), "channels_last"),
        ((6, 5), "transposed"),
        ((2, 3, 4), "transposed"),
    ],
)
def test_the_digest_differs_when_the_order_in_memory_differs(one: tuple[int, ...], other: str) -> None:
    assert Fragment([laid_out(one, torch.float32, other)]).digest != Fragment([torch.zeros(one)]).digest


@pytest.mark.parametrize("shape", [(4, 1, 5, 5), (4, 3, 1, 1), (1, 1, 1, 1)])
def test_a_channels_last_tensor_that_lies_like_a_contiguous_one_is_compatible_with_it(shape: tuple[int, ...]) -> None:
    assert Fragment([laid_out(shape, torch.float32, "channels_last")]).digest == Fragment([torch.zeros(shape)]).digest


@pytest.mark.parametrize("layout", ["sliced rows", "sliced columns", "part"])
def test_a_sliced_tensor_is_compatible_with_a_contiguous_one(layout: str) -> None:
    values = torch.arange(12.0).view(3, 4)
    sliced = laid_out((3, 4), torch.float32, layout).copy_(values)
    assert not sliced.is_contiguous()
    fragments = [Fragment([sliced]), Fragment([values])]
    assert fragments[0].digest == fragments[1].digest
    for capacity in (1, 5, 100):
        packings = [[packed(b).tolist() for b in f.buckets(at_most(capacity))] for f in fragments]
        assert packings[0] == packings[1]


def test_the_cut_into_buckets_does_not_depend_on_strides() -> None:
    generous = [(5, 7), (3,), (2, 2, 9)]
    plain = Fragment([torch.zeros(shape) for shape in generous])
    sliced = Fragment([laid_out(shape, torch.float32, "part") for shape in generous])
    for capacity in range(1, 40):
        cuts = [[bucket.numel for bucket in f.buckets(at_most(capacity))] for f in (plain, sliced)]
        assert cuts[0] == cuts[1]


def test_views_that_begin_together_and_end_apart_are_both_packed() -> None:
    table = torch.arange(120.0).view(6, 20)
    wide, tall = table[:2, :6], table[:6, :2]  # equal address, strides and number of elements
    pieces = {a for b in Fragment([wide, tall]).buckets(at_most(100)) for p in b.pieces for a in addresses(p)}
    assert pieces == {*addresses(wide), *addresses(tall)}


def test_a_sliced_tensor_larger_than_a_bucket_is_not_shattered_into_its_rows() -> None:
    rows = 20_000
    buckets = Fragment([torch.zeros(rows, 7)[:, :5]]).buckets(at_most(1024))
    pieces = sum(len(bucket.pieces) for bucket in buckets)
    assert pieces < 10 * len(buckets), f"{pieces} pieces for {rows} rows in {len(buckets)} buckets"


def test_many_small_tensors_share_a_bucket() -> None:
    fragment = Fragment([torch.zeros(3) for _ in range(1000)])
    assert [bucket.numel for bucket in fragment.buckets(at_most(3000))] == [3000]


def test_each_kind_of_value_is_cut_by_its_own_capacity() -> None:
    fragment = Fragment([torch.zeros(8), torch.zeros(8, dtype=torch.bfloat16), torch.zeros(8)])
    buckets = fragment.buckets(lambda device, dtype: 64 // dtype.itemsize)
    assert [(bucket.dtype, bucket.numel) for bucket in buckets] == [(torch.float32, 16), (torch.bfloat16, 8)]


def test_packing_leaves_the_rest_of_a_larger_memory_alone() -> None:
    [bucket] = Fragment([torch.ones(2, 2), torch.ones(3)]).buckets(at_most(100))
    memory = torch.full((20,), 5.0)
    bucket.pack(memory)
    assert memory.tolist() == [1.0] * 7 + [5.0] * 13


def test_parameters_that_require_a_gradient_are_unpacked_without_recording_it() -> None:
    weight = nn.Parameter(torch.zeros(2, 3))
    [bucket] = Fragment([weight]).buckets(at_most(100))
    bucket.unpack(torch.ones(6))
    assert weight.is_leaf
    assert weight.requires_grad
    assert weight.detach().eq(1).all()


REFUSED: dict[str, tuple[Callable[[], torch.Tensor], list[str]]] = {
    "int64": (lambda: torch.zeros(3, dtype=torch.int64), ["int64", "floating-point"]),
    "bool": (lambda: torch.zeros(3, dtype=torch.bool), ["bool", "floating-point"]),
    "uint8": (lambda: torch.zeros(3, dtype=torch.uint8), ["uint8", "floating-point"]),
    "sparse": (lambda: torch.eye(3).to_sparse(), ["sparse", "strided"]),
    "meta": (lambda: torch.zeros(3, device="meta"), ["meta", "materialise"]),
    "expanded": (lambda: torch.zeros(3, 1).expand(3, 4), ["expanded", ".clone()"]),
    "expanded scalar": (lambda: torch.zeros(()).expand(2), ["expanded", ".clone()"]),
    "conjugate": (lambda: torch.zeros(3, dtype=torch.complex64).conj(), ["conjugate", ".resolve_conj()"]),
    "negated": (lambda: torch.zeros(3, dtype=torch.complex64).conj().imag, [".resolve_neg()"]),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_tensor_without_a_mean_is_refused_with_its_position_and_the_fix(kind: str) -> None:
    make, words = REFUSED[kind]
    problem = Fragment([torch.zeros(2), make(), make()]).problem
    assert problem is not None
    assert problem.startswith("parameter 1 ")
    assert "parameter 2" not in problem, "the first is enough"
    assert all(word in problem for word in words), problem


@pytest.mark.parametrize("kind", REFUSED)
def test_a_tensor_without_a_mean_is_no_problem_if_it_takes_no_part(kind: str) -> None:
    fragment = Fragment([torch.zeros(2), REFUSED[kind][0]()], taking=[True, False])
    assert fragment.problem is None
    assert fragment.numel == 2


def test_a_refused_tensor_is_called_by_its_own_name() -> None:
    fragment = Fragment([torch.zeros(2, dtype=torch.int32)], label=lambda i: f"parameter {i} of group 3 (head.count)")
    assert fragment.problem is not None
    assert fragment.problem.startswith("parameter 0 of group 3 (head.count) has dtype int32")


def test_a_size_one_dimension_with_stride_zero_is_not_called_expanded() -> None:
    assert (
        Fragment([torch.zeros(1, 3).expand(1, 3), torch.zeros(4, 2)[:, :1].as_strided((4, 1), (2, 0))]).problem is None
    )


def test_description_has_a_line_a_position_with_all_that_can_differ() -> None:
    fragment = Fragment(
        [
            torch.zeros(2, 3),
            torch.zeros((), dtype=torch.bfloat16),
            laid_out((2, 3, 2, 2), torch.float64, "channels_last"),
        ],
        taking=[True, False, True],
    )
    assert fragment.describe() == [
        "parameter 0: (2, 3) float32 on cpu, takes part",
        "parameter 1: () bfloat16 on cpu, has no gradient",
        "parameter 2: (2, 3, 2, 2) float64 on cpu with strides (12, 1, 6, 3), takes part",
    ]


def test_counts_say_what_was_given_and_what_takes_part() -> None:
    fragment = Fragment(
        [torch.zeros(2), torch.zeros(3, dtype=torch.complex64), torch.zeros(5)], taking=[True, True, False]
    )
    assert (fragment.given, fragment.taken, fragment.numel) == (3, 2, 2 + 6)
    assert (Fragment([]).given, Fragment([]).taken, Fragment([]).buckets(at_most(1))) == (0, 0, [])

"""Fragments: every parameter in one of them, none empty, all ranks alike."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cadenza.common.identity import identity
from cadenza.fragments import Fragmentation, by_bytes, by_layers, whole

names = st.lists(
    st.tuples(
        st.one_of(
            st.builds("layers.{}.weight".format, st.integers(0, 12)),
            st.builds("blocks.{}.attention.{}.bias".format, st.integers(0, 5), st.integers(0, 3)),
            st.sampled_from(["embed", "head.weight", "norm1", "h2o.weight", "7", "3.weight"]),
        ),
        st.integers(0, 100),
    ),
    max_size=30,
    unique_by=lambda pair: pair[0],
)
fragmentations = st.one_of(
    st.just(whole()),
    st.builds(by_layers, st.integers(1, 5), strided=st.booleans()),
    st.builds(by_bytes, st.integers(1, 300)),
)


@settings(deadline=None, derandomize=True, max_examples=300)
@given(fragmentations, names)
def test_every_parameter_is_in_one_fragment_and_none_is_empty(
    fragmentation: Fragmentation, parameters: list[tuple[str, int]]
) -> None:
    fragments = fragmentation.split(parameters)
    assert sorted(name for fragment in fragments for name in fragment) == sorted(name for name, _ in parameters)
    assert all(fragments)
    assert fragments == fragmentation.split(list(parameters))


@settings(deadline=None, derandomize=True, max_examples=200)
@given(fragmentations, names)
def test_parameters_keep_their_order_inside_a_fragment(
    fragmentation: Fragmentation, parameters: list[tuple[str, int]]
) -> None:
    place = {name: i for i, (name, _) in enumerate(parameters)}
    for fragment in fragmentation.split(parameters):
        assert fragment == sorted(fragment, key=place.__getitem__)


def transformer(layers: int) -> list[tuple[str, int]]:
    inside = [f"layers.{i}.{part}" for i in range(layers) for part in ("attention.weight", "mlp.0.weight")]
    return [(name, 4) for name in ("embed.weight", *inside, "norm.weight", "head.weight")]


def layers_of(fragment: list[str]) -> list[int]:
    return sorted({int(name.split(".")[1]) for name in fragment if name.startswith("layers")})


def test_strided_fragments_take_every_nth_layer() -> None:
    fragments = by_layers(3).split(transformer(12))
    assert [layers_of(fragment) for fragment in fragments] == [[0, 4, 8], [1, 5, 9], [2, 6, 10], [3, 7, 11]]


def test_sequential_fragments_take_runs_of_layers() -> None:
    fragments = by_layers(5, strided=False).split(transformer(12))
    assert [layers_of(fragment) for fragment in fragments] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11]]


def test_what_has_no_layer_goes_with_its_neighbours() -> None:
    first, *_, last = by_layers(1).split(transformer(3))
    assert first[0] == "embed.weight"
    assert last[-2:] == ["norm.weight", "head.weight"]


def test_a_layer_is_the_first_number_in_a_name() -> None:
    [one, two] = by_layers(1).split([("blocks.0.mlp.1.weight", 4), ("blocks.1.mlp.0.weight", 4)])
    assert one == ["blocks.0.mlp.1.weight"]
    assert two == ["blocks.1.mlp.0.weight"]


def test_numbers_inside_words_are_no_layers() -> None:
    assert by_layers(1).split([("norm1.weight", 4), ("conv2d.weight", 4)]) == [["norm1.weight", "conv2d.weight"]]


def test_layers_are_numbers_not_words() -> None:
    fragments = by_layers(1).split([(f"layers.{i}.w", 4) for i in (10, 2, 1)])
    assert fragments == [["layers.1.w"], ["layers.2.w"], ["layers.10.w"]]


def test_encoder_and_decoder_of_one_number_are_two_layers() -> None:
    names = ["encoder.0.w", "encoder.1.w", "decoder.0.w", "decoder.1.w"]
    assert by_layers(1).split([(name, 4) for name in names]) == [[name] for name in names]


def test_bytes_fill_fragments_in_order() -> None:
    parameters = [("a", 4), ("b", 5), ("c", 1), ("d", 20), ("e", 1)]
    assert by_bytes(10).split(parameters) == [["a", "b", "c"], ["d"], ["e"]]


def test_a_limit_that_holds_everything_makes_one_fragment() -> None:
    assert by_bytes(1000).split(transformer(4)) == whole().split(transformer(4))


def test_no_parameters_make_no_fragments() -> None:
    for fragmentation in (whole(), by_layers(2), by_bytes(10)):
        assert fragmentation.split([]) == []


@pytest.mark.parametrize("make", [by_layers, by_bytes])
@pytest.mark.parametrize(
    ("value", "error"), [(0, ValueError), (-3, ValueError), (2.5, TypeError), ("3", TypeError), (True, TypeError)]
)
def test_sizes_that_make_no_sense_are_refused(make: Any, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        make(value)


def test_ranks_can_tell_different_fragmentations_apart() -> None:
    told = [tuple(identity(f)) for f in (whole(), by_layers(2), by_layers(3), by_layers(2, strided=False), by_bytes(2))]
    assert len(set(told)) == len(told)

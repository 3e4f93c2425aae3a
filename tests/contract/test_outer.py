"""What every outer update promises. A new one is added to OUTERS below, and is held to all of it."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch

from cadenza.common.identity import identity
from cadenza.outer import Outer, State, eager, mean, nesterov, optimizer, sgd, slowmo

NUMEL = 1003  # no multiple of any vector's length
ROUNDS = 6


def falling(rounds: int) -> float:
    return 1 / (1 + rounds)


# Without weight decay, which moves an anchor that no worker has moved.
OUTERS: dict[str, Outer] = {
    "mean": mean(),
    "slowmo": slowmo(),
    "slowmo, slower": slowmo(alpha=0.5, beta=0.4),
    "nesterov": nesterov(),
    "nesterov, milestones": nesterov(lr=0.4, momentum=0.8, clip=1.0, schedule={0: 0.5, 3: 2.0}),
    "nesterov, no momentum": nesterov(momentum=0.0),
    "eager": eager(lr=0.5),
    "sgd": sgd(),
    "sgd, momentum": sgd(lr=0.5, momentum=0.9, schedule=falling),
    "Adam": optimizer(torch.optim.Adam, lr=0.1),
    "AdamW": optimizer(torch.optim.AdamW, lr=0.1, weight_decay=0.0, amsgrad=True, schedule=falling),
    "SGD": optimizer(torch.optim.SGD, lr=0.7, momentum=0.9, dampening=0.1),
    "Adagrad": optimizer(torch.optim.Adagrad, lr=0.1, initial_accumulator_value=0.3),
    "RMSprop": optimizer(torch.optim.RMSprop, lr=0.1, momentum=0.5, centered=True),
    "NAdam": optimizer(torch.optim.NAdam, lr=0.1),
    "RAdam": optimizer(torch.optim.RAdam, lr=0.1),
    "Rprop": optimizer(torch.optim.Rprop, lr=0.1),
}
EVERY_OUTER = pytest.mark.parametrize("outer", [pytest.param(outer, id=name) for name, outer in OUTERS.items()])
EVERY_DTYPE = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])


def values(seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def run(outer: Outer, anchor: torch.Tensor, state: State, rounds: range, dtype: torch.dtype = torch.float32) -> None:
    for n in rounds:
        outer.update(anchor, values(100 + n, dtype), state, rounds=n, inner_lr=0.1 / (1 + n))


def same(one: State, other: State) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def cut(state: State, span: slice) -> State:
    return {name: tensor[span] if tensor.ndim else tensor for name, tensor in state.items()}


@EVERY_OUTER
@EVERY_DTYPE
def test_state_is_of_the_anchors_size_or_a_number_and_changes_in_place(outer: Outer, dtype: torch.dtype) -> None:
    anchor = values(0, dtype)
    state = outer.init(anchor)
    places = {name: (tensor.data_ptr(), tensor.shape, tensor.dtype) for name, tensor in state.items()}
    assert all(tensor.ndim == 0 or (tensor.shape, tensor.dtype) == (anchor.shape, dtype) for tensor in state.values())
    home = anchor.data_ptr()
    run(outer, anchor, state, range(ROUNDS), dtype)
    assert anchor.data_ptr() == home
    assert {name: (tensor.data_ptr(), tensor.shape, tensor.dtype) for name, tensor in state.items()} == places
    assert anchor.isfinite().all()


@EVERY_OUTER
@EVERY_DTYPE
def test_a_run_restored_from_its_saved_state_goes_on_to_the_bit(outer: Outer, dtype: torch.dtype) -> None:
    anchor = values(0, dtype)
    state = outer.init(anchor)
    for stop in range(1, ROUNDS):
        run(outer, anchor, state, range(stop - 1, stop), dtype)
        saved_anchor, saved_state = anchor.clone(), {name: tensor.clone() for name, tensor in state.items()}
        resumed = deepcopy(outer)
        restored = resumed.init(saved_anchor)
        for name, tensor in saved_state.items():
            restored[name].copy_(tensor)
        straight, straight_state = anchor.clone(), deepcopy(state)
        run(outer, straight, straight_state, range(stop, ROUNDS), dtype)
        run(resumed, saved_anchor, restored, range(stop, ROUNDS), dtype)
        assert torch.equal(saved_anchor, straight)
        assert same(restored, straight_state)


@EVERY_OUTER
@EVERY_DTYPE
@pytest.mark.parametrize("cuts", [[500], [1], [3, 20, 21, 900]], ids=str)
def test_updates_of_slices_make_the_update_of_the_whole(outer: Outer, dtype: torch.dtype, cuts: list[int]) -> None:
    whole, sliced = values(0, dtype), values(0, dtype)
    whole_state, sliced_state = outer.init(whole), outer.init(sliced)
    for n in range(ROUNDS):
        run(outer, whole, whole_state, range(n, n + 1), dtype)
        delta = values(100 + n, dtype)
        for start, end in zip([0, *cuts], [*cuts, NUMEL], strict=True):
            span = slice(start, end)
            state = cut(sliced_state, span)
            outer.update(sliced[span], delta[span], state, rounds=n, inner_lr=0.1 / (1 + n))
        assert torch.equal(sliced, whole)
        assert same(sliced_state, whole_state)


@pytest.mark.parametrize("name", [name for name, outer in OUTERS.items() if getattr(outer, "schedule", None) is None])
def test_an_anchor_that_joins_in_a_later_round_starts_like_any_other(name: str) -> None:
    outer = OUTERS[name]
    early, late = values(0), values(0)
    early_state, late_state = outer.init(early), outer.init(late)
    for n in range(3):
        outer.update(early, values(n), early_state, rounds=n, inner_lr=0.1)
        outer.update(late, values(n), late_state, rounds=n + 40, inner_lr=0.1)
    assert torch.equal(early, late)


@EVERY_OUTER
def test_where_nothing_moved_a_fresh_anchor_stays(outer: Outer) -> None:
    anchor = values(0)
    state = outer.init(anchor)
    for n in range(3):
        outer.update(anchor, torch.zeros(NUMEL), state, rounds=n, inner_lr=0.1)
    assert torch.equal(anchor, values(0))


@EVERY_OUTER
def test_a_fresh_anchor_moves_towards_the_mean(outer: Outer) -> None:
    anchor, delta = values(0), values(1)
    outer.update(anchor, delta.clone(), outer.init(anchor), rounds=0, inner_lr=0.1)
    moved = values(0) - anchor
    assert (moved * delta >= 0).all()
    assert moved.norm() > 0


@EVERY_OUTER
def test_it_is_the_same_bits_with_any_number_of_threads(outer: Outer) -> None:
    # More than a grain of torch's parallel loops, so that the threads really share the work.
    numel = 200_003
    deltas = [torch.randn(numel, generator=torch.Generator().manual_seed(n)) for n in range(3)]
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            anchor = torch.ones(numel)
            state = outer.init(anchor)
            for n, delta in enumerate(deltas):
                outer.update(anchor, delta.clone(), state, rounds=n, inner_lr=0.1)
            results.append(anchor)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@EVERY_OUTER
def test_plain_means_exactly_anchor_minus_delta_and_no_state(outer: Outer) -> None:
    assert outer.plain == (outer == mean())
    if outer.plain:
        anchor = values(0)
        state = outer.init(anchor)
        outer.update(anchor, values(1), state, rounds=0)
        assert torch.equal(anchor, values(0) - values(1))
        assert not state
        assert outer.clip is None


@EVERY_OUTER
def test_the_inner_learning_rate_is_asked_for_where_it_is_needed(outer: Outer) -> None:
    anchor = values(0)
    if outer.needs_inner_lr:
        with pytest.raises(ValueError, match="learning rate"):
            outer.update(anchor, values(1), outer.init(anchor), rounds=0)
        assert torch.equal(anchor, values(0))
    else:
        outer.update(anchor, values(1), outer.init(anchor), rounds=0)


@EVERY_OUTER
def test_nothing_takes_part_in_a_graph(outer: Outer) -> None:
    anchor = values(0)
    state = outer.init(anchor)
    outer.update(anchor, values(1), state, rounds=0, inner_lr=0.1)
    assert not anchor.requires_grad
    assert anchor.grad is None
    assert not any(tensor.requires_grad for tensor in state.values())


def test_identities_tell_outer_updates_apart_and_are_the_same_in_every_process() -> None:
    descriptions = ["; ".join(identity(outer)) for outer in OUTERS.values()]
    assert len(set(descriptions)) == len(descriptions)
    assert descriptions == ["; ".join(identity(deepcopy(outer))) for outer in OUTERS.values()]
    assert not any("0x" in description for description in descriptions)

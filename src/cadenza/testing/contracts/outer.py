"""The contract of outer updates."""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from typing import Any

import torch

from cadenza.outer import Outer, State
from cadenza.testing.contracts.promises import Contract

__all__ = ["check_outer"]

_NUMEL = 1003  # no multiple of any vector's length
_MANY = 200_003  # more than a grain of torch's parallel loops, so that the threads really share the work
_ROUNDS = 6
_CUTS = ([500], [1], [3, 20, 21, 900])


def check_outer(outer: Outer) -> None:
    """Raise AssertionError if an outer update breaks a promise of `cadenza.outer.Outer`.

    >>> from cadenza.outer import nesterov
    >>> check_outer(nesterov())
    """
    contract = Contract(outer, Outer)
    contract.is_whole()
    clip = outer.clip
    contract.holds(clip is None or clip > 0, f"clip is None or a norm above 0; it is {clip!r}")
    for dtype in (torch.float32, torch.float64):
        _check_places(contract, outer, dtype)
        _check_resuming(contract, outer, dtype)
        for cuts in _CUTS:
            _check_slices(contract, outer, dtype, cuts)
    _check_direction(contract, outer)
    _check_plain(contract, outer)
    _check_needs(contract, outer)
    _check_own(contract, outer)
    _check_threads(contract, outer)


def _check_places(contract: Contract, outer: Outer, dtype: torch.dtype) -> None:
    anchor = _values(0, dtype)
    state = outer.init(anchor)
    contract.holds(torch.equal(anchor, _values(0, dtype)), "init leaves the anchor alone")
    for name, tensor in state.items():
        fits = tensor.ndim == 0 or (tensor.shape, tensor.dtype) == (anchor.shape, dtype)
        contract.holds(fits, f"state is 0-dim or of the anchor's size and dtype; {name} is not")
    places = {name: (tensor.data_ptr(), tensor.shape, tensor.dtype) for name, tensor in state.items()}
    _run(outer, anchor, state, range(_ROUNDS))
    after = {name: (tensor.data_ptr(), tensor.shape, tensor.dtype) for name, tensor in state.items()}
    contract.holds(after == places, "update changes the state in place, and keeps its names, shapes and dtypes")
    contract.holds(bool(anchor.isfinite().all()), "finite differences give a finite anchor")
    free = not any(tensor.requires_grad or tensor.grad is not None for tensor in (anchor, *state.values()))
    contract.holds(free, "nothing takes part in a graph")


def _check_resuming(contract: Contract, outer: Outer, dtype: torch.dtype) -> None:
    anchor = _values(0, dtype)
    state = outer.init(anchor)
    for stop in range(1, _ROUNDS):
        _run(outer, anchor, state, range(stop - 1, stop))
        resumed = deepcopy(outer)
        restored_anchor = anchor.clone()
        restored = resumed.init(restored_anchor)
        names = restored.keys() == state.keys()
        contract.holds(names, "init gives all entries of the state, so that a saved one can be put into them")
        for name, tensor in state.items():
            restored[name].copy_(tensor)
        straight, straight_state = anchor.clone(), deepcopy(state)
        _run(outer, straight, straight_state, range(stop, _ROUNDS))
        _run(resumed, restored_anchor, restored, range(stop, _ROUNDS))
        same = torch.equal(restored_anchor, straight) and _same(restored, straight_state)
        contract.holds(same, f"a run restored from its state goes on to the bit; not after round {stop}")


def _check_slices(contract: Contract, outer: Outer, dtype: torch.dtype, cuts: list[int]) -> None:
    whole, sliced = _values(0, dtype), _values(0, dtype)
    whole_state, sliced_state = outer.init(whole), outer.init(sliced)
    for n in range(_ROUNDS):
        _run(outer, whole, whole_state, range(n, n + 1))
        for start, end in zip([0, *cuts], [*cuts, _NUMEL], strict=True):
            span = slice(start, end)
            state = {name: tensor[span] if tensor.ndim else tensor for name, tensor in sliced_state.items()}
            _update(outer, sliced[span], _values(100 + n, dtype)[span], state, n, span)
        same = torch.equal(sliced, whole) and _same(sliced_state, whole_state)
        contract.holds(same, f"updates of slices make the update of the whole, to the bit; not with cuts at {cuts}")


def _check_direction(contract: Contract, outer: Outer) -> None:
    anchor, delta = _values(0), _values(1)
    outer.update(anchor, delta.clone(), outer.init(anchor), rounds=0, **_told(delta, delta, _values(0)))
    moved = _values(0) - anchor
    contract.holds(float(torch.dot(moved, delta)) > 0, "a fresh anchor moves towards the mean, against delta")


def _check_plain(contract: Contract, outer: Outer) -> None:
    if not outer.plain:
        return
    anchor = _values(0)
    state = outer.init(anchor)
    outer.update(anchor, _values(1), state, rounds=0)
    contract.holds(torch.equal(anchor, _values(0) - _values(1)), "plain means exactly anchor − delta")
    contract.holds(not state and outer.clip is None, "plain means no state and no clipping")


def _check_needs(contract: Contract, outer: Outer) -> None:
    """Check that what an update needs is asked for, and that nothing else is."""
    needs = {"inner_lr": outer.needs_inner_lr, "own": outer.needs_own, "anchor_mean": outer.needs_anchor_mean}
    given: dict[str, dict[str, Any]] = {
        "inner_lr": {"inner_lr": 0.1},
        "own": {"own": _values(2), "now": _values(4), "members": 2},
        "anchor_mean": {"anchor_mean": _values(3)},
    }
    for name in needs:
        rest = {key: value for other in given if other != name and needs[other] for key, value in given[other].items()}
        anchor = _values(0)
        try:
            outer.update(anchor, _values(1), outer.init(anchor), rounds=0, **rest)
            refused = False
        except ValueError:
            refused = True
        if needs[name]:
            contract.holds(refused, f"with needs_{name}, an update without {name} is refused with a ValueError")
            contract.holds(torch.equal(anchor, _values(0)), "an update that is refused leaves the anchor as it was")
        else:
            contract.holds(not refused, f"without needs_{name}, an update without {name} is accepted")


def _check_own(contract: Contract, outer: Outer) -> None:
    """Check that workers end with one anchor, unless the update says that they do not."""
    results = []
    for seed in (2, 5):
        anchor, own, now, anchor_mean = _values(0), _values(seed), _values(seed + 1), _values(8)
        outer.update(anchor, _values(1), outer.init(anchor), rounds=0, **_told(own, now, anchor_mean))
        pairs = ((own, seed), (now, seed + 1), (anchor_mean, 8))
        kept = all(torch.equal(tensor, _values(origin)) for tensor, origin in pairs)
        contract.holds(kept, "update leaves own, now and anchor_mean alone")
        results.append(anchor)
    same = torch.equal(*results)
    contract.holds(same or outer.needs_own, "without needs_own, a worker's own difference changes nothing")
    contract.holds(same or outer.diverges, "without diverges, all workers come to the same anchor, whatever their own")


def _check_threads(contract: Contract, outer: Outer) -> None:
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            anchor = torch.ones(_MANY)
            state = outer.init(anchor)
            for n in range(3):
                delta = _values(n, numel=_MANY)
                outer.update(anchor, delta, state, rounds=n, **_told(delta.clone(), delta.clone(), anchor.clone()))
            results.append(anchor)
    finally:
        torch.set_num_threads(threads)
    same = all(torch.equal(results[0], other) for other in results[1:])
    contract.holds(same, "the result is the same bits with any number of threads")


def _run(outer: Outer, anchor: torch.Tensor, state: State, rounds: Iterable[int]) -> None:
    for n in rounds:
        _update(outer, anchor, _values(100 + n, anchor.dtype), state, n, slice(None))


def _update(outer: Outer, anchor: torch.Tensor, delta: torch.Tensor, state: State, n: int, span: slice) -> None:
    own, now, mean = (_values(seed + n, anchor.dtype)[span] for seed in (200, 300, 400))
    outer.update(anchor, delta, state, rounds=n, **_told(own, now, mean, inner_lr=0.1 / (1 + n)))


def _told(own: torch.Tensor, now: torch.Tensor, anchor_mean: torch.Tensor, *, inner_lr: float = 0.1) -> dict[str, Any]:
    """Return all that an update may be told beside the mean, in a round of two workers."""
    return {"inner_lr": inner_lr, "own": own, "now": now, "members": 2, "anchor_mean": anchor_mean}


def _same(one: State, other: State) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def _values(seed: int, dtype: torch.dtype = torch.float32, numel: int = _NUMEL) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed), dtype=dtype)

"""Outer updates against plain loops, numbers worked out by hand, and torch's own optimizers."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import cadenza.outer.torch_optimizer
from cadenza.common.identity import identity
from cadenza.outer import Outer, mean, nesterov, optimizer, sgd, slowmo


def walk(outer: Outer, start: float, deltas: list[float], inner_lrs: list[float] | None = None) -> list[float]:
    """Return the anchor after each round."""
    anchor = torch.tensor([start], dtype=torch.float64)
    state = outer.init(anchor)
    way = []
    for n, delta in enumerate(deltas):
        lr = inner_lrs[n] if inner_lrs else None
        outer.update(anchor, torch.tensor([delta], dtype=torch.float64), state, rounds=n, inner_lr=lr)
        way.append(anchor.item())
    return way


def diloco(start: float, deltas: list[float], lr: float, momentum: float) -> list[float]:
    """Algorithm 1 of arXiv 2311.08105 with Nesterov momentum, on one number."""
    anchor, m, way = start, 0.0, []
    for delta in deltas:
        m = momentum * m + delta
        anchor = anchor - lr * (delta + momentum * m)
        way.append(anchor)
    return way


def slow_momentum(start: float, deltas: list[float], lrs: list[float], alpha: float, beta: float) -> list[float]:
    """Algorithm 1 of arXiv 1910.00643, on one number."""
    anchor, u, way = start, 0.0, []
    for delta, lr in zip(deltas, lrs, strict=True):
        u = beta * u + delta / lr
        anchor = anchor - alpha * lr * u
        way.append(anchor)
    return way


def test_nesterov_walks_as_diloco_does_by_hand() -> None:
    # Round 1: m = 0.5;              step 0.5 + 0.9 · 0.5 = 0.95;  anchor 1 − 0.7 · 0.95 = 0.335.
    # Round 2: m = 0.45 + 0.25 = 0.7; step 0.25 + 0.63 = 0.88;     anchor 0.335 − 0.616 = −0.281.
    # Round 3: m = 0.63 − 1 = −0.37;  step −1 − 0.333 = −1.333;    anchor −0.281 + 0.9331 = 0.6521.
    assert walk(nesterov(), 1.0, [0.5, 0.25, -1.0]) == pytest.approx([0.335, -0.281, 0.6521], abs=1e-12)
    assert diloco(1.0, [0.5, 0.25, -1.0], 0.7, 0.9) == pytest.approx([0.335, -0.281, 0.6521], abs=1e-12)


def test_slowmo_walks_as_its_authors_say_by_hand() -> None:
    # lr 0.1,  delta 0.1: m = 1;              anchor 1 − 0.1 · 1 = 0.9.
    # lr 0.1,  delta 0.2: m = 0.5 + 2 = 2.5;   anchor 0.9 − 0.25 = 0.65.
    # lr 0.05, delta 0.1: m = 1.25 + 2 = 3.25; anchor 0.65 − 0.05 · 3.25 = 0.4875.
    assert walk(slowmo(beta=0.5), 1.0, [0.1, 0.2, 0.1], [0.1, 0.1, 0.05]) == pytest.approx([0.9, 0.65, 0.4875])
    # With α = 0.5 the anchor goes half as far each time: 0.95, 0.825, 0.74375.
    assert walk(slowmo(alpha=0.5, beta=0.5), 1.0, [0.1, 0.2, 0.1], [0.1, 0.1, 0.05]) == pytest.approx(
        [0.95, 0.825, 0.74375]
    )


def test_long_walks_are_those_of_the_plain_loops() -> None:
    deltas = [math.sin(n) for n in range(50)]
    lrs = [0.1 / (1 + n) for n in range(50)]
    assert walk(nesterov(lr=0.4, momentum=0.8), 2.0, deltas) == pytest.approx(diloco(2.0, deltas, 0.4, 0.8))
    expected = slow_momentum(2.0, deltas, lrs, 0.9, 0.6)
    assert walk(slowmo(alpha=0.9, beta=0.6), 2.0, deltas, lrs) == pytest.approx(expected)


def test_sgd_is_a_step_towards_the_mean_or_with_momentum_beyond_it() -> None:
    assert walk(sgd(), 1.0, [0.5, 0.25]) == [0.5, 0.25]
    # m: 1, then 0.5 + 1 = 1.5; the anchor: 4 − 0.5, then 3.5 − 0.75.
    assert walk(sgd(lr=0.5, momentum=0.5), 4.0, [1.0, 1.0]) == [3.5, 2.75]


def test_nesterov_without_momentum_is_sgd() -> None:
    assert walk(nesterov(lr=0.5, momentum=0.0), 4.0, [1.0, 1.0]) == walk(sgd(lr=0.5), 4.0, [1.0, 1.0])
    assert nesterov(momentum=0.0).init(torch.zeros(3)) == {}


def test_slowmo_takes_the_mean_and_leaves_its_momentum_where_nothing_is_learned() -> None:
    anchor = torch.tensor([1.0, 2.0])
    outer = slowmo()
    state = {"momentum": torch.tensor([3.0, 4.0])}
    outer.update(anchor, torch.tensor([0.25, 0.5]), state, rounds=5, inner_lr=0.0)
    assert anchor.tolist() == [0.75, 1.5]
    assert state["momentum"].tolist() == [3.0, 4.0]


def test_slowmo_takes_slices_with_a_learning_rate_each() -> None:
    anchor, delta = torch.ones(4), torch.full((4,), 0.5)
    outer = slowmo(beta=0.5)
    state = outer.init(anchor)
    for n in range(2):
        for span, lr in ((slice(0, 2), 0.5), (slice(2, 4), 0.25)):
            outer.update(
                anchor[span], delta[span].clone(), {"momentum": state["momentum"][span]}, rounds=n, inner_lr=lr
            )
    # lr 0.5: m 1, then 1.5; lr 0.25: m 2, then 3; the anchor goes by lr · m, 0.5 and then 0.75, in both.
    assert state["momentum"].tolist() == [1.5, 1.5, 3.0, 3.0]
    assert anchor.tolist() == [-0.25] * 4


@pytest.mark.parametrize("inner_lr", [None, -0.1, math.nan, math.inf])
def test_slowmo_refuses_a_learning_rate_that_it_cannot_divide_by(inner_lr: float | None) -> None:
    anchor = torch.ones(2)
    with pytest.raises(ValueError, match=r"a number of at least 0; got .* Pass the optimizer to attach"):
        slowmo().update(anchor, torch.ones(2), slowmo().init(anchor), rounds=0, inner_lr=inner_lr)
    assert anchor.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (nesterov(), {"lr": 0.7, "momentum": 0.9, "nesterov": True}),
        (sgd(lr=0.3, momentum=0.8), {"lr": 0.3, "momentum": 0.8}),
        (sgd(lr=0.3), {"lr": 0.3}),
    ],
    ids=["nesterov", "momentum", "plain"],
)
def test_sgd_agrees_with_torchs_within_one_rounding(ours: Outer, theirs: dict[str, Any]) -> None:
    # Torch's own multiplies and adds at once where the processor can, so it gives other bits on other machines.
    by_hand = torch.nn.Parameter(torch.randn(1003, generator=torch.Generator().manual_seed(0)))
    anchor = by_hand.detach().clone()
    state = ours.init(anchor)
    torchs = torch.optim.SGD([by_hand], **theirs)
    for n in range(10):
        delta = torch.randn(1003, generator=torch.Generator().manual_seed(n + 1))
        by_hand.grad = delta.clone()
        torchs.step()
        ours.update(anchor, delta, state, rounds=n)
        torch.testing.assert_close(anchor, by_hand.detach(), rtol=2**-22, atol=2**-22)
        with torch.no_grad():  # one step's roundings, not those of all
            by_hand.copy_(anchor)
        if "momentum" in state:
            torchs.state[by_hand]["momentum_buffer"].copy_(state["momentum"])


BITS = """
import sys, torch, cadenza.outer as outer
numbers = torch.Generator().manual_seed(0)
draw = lambda: torch.randint(-(1 << 24), 1 << 24, (70_003,), generator=numbers) / 1e7
for update in (outer.mean(), outer.nesterov(), outer.sgd(lr=0.3, momentum=0.8), outer.slowmo(), outer.sign(),
               outer.noloco(), outer.eager()):
    anchor = draw()
    state = update.init(anchor)
    for rounds in range(3):
        update.update(anchor, draw(), state, rounds=rounds, inner_lr=0.3, own=draw(), now=draw(), members=3,
                      anchor_mean=draw())
    print(update, *(int(flat.view(torch.int32).sum()) for flat in (anchor, *state.values())))
"""


def test_updates_give_the_same_bits_on_machines_that_fuse_products_and_sums_and_on_others() -> None:
    machines = {"OMP_NUM_THREADS": "1"}, {"OMP_NUM_THREADS": "1", "ATEN_CPU_CAPABILITY": "default"}
    told = [
        subprocess.run([sys.executable, "-c", BITS], env={**os.environ, **own}, capture_output=True, check=True).stdout
        for own in (*machines, {"OMP_NUM_THREADS": "2"})
    ]
    assert told[0].count(b"\n") == 7
    assert told[0] == told[1] == told[2]


OPTIMIZERS: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.AdamW, {"betas": (0.9, 0.95), "weight_decay": 0.1}),
    (torch.optim.Adam, {"amsgrad": True}),
    (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01}),
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "maximize": True}),
    (torch.optim.Adagrad, {"initial_accumulator_value": 0.3, "lr_decay": 0.1}),
    (torch.optim.RMSprop, {"momentum": 0.5, "centered": True}),
    (torch.optim.NAdam, {}),
    (torch.optim.RAdam, {"foreach": True}),
    (torch.optim.Adamax, {}),
    (torch.optim.Adadelta, {}),
    (torch.optim.Rprop, {}),
    (torch.optim.ASGD, {"t0": 2}),
]


@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS, ids=lambda value: getattr(value, "__name__", ""))
@pytest.mark.parametrize("piece_numel", [1 << 22, 100], ids=["in one", "in pieces"])
def test_any_torch_optimizer_does_to_the_anchor_what_it_does_by_hand(
    kind: type[torch.optim.Optimizer], options: dict[str, Any], piece_numel: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cadenza.outer.torch_optimizer, "_PIECE_NUMEL", piece_numel)
    by_hand = torch.nn.Parameter(torch.randn(1003, generator=torch.Generator().manual_seed(0)))
    anchor = by_hand.detach().clone()
    ours = optimizer(kind, lr=0.1, **options)
    theirs = kind([by_hand], lr=0.1, **options)  # type: ignore[call-arg]
    state = ours.init(anchor)
    for n in range(10):
        delta = torch.randn(1003, generator=torch.Generator().manual_seed(n + 1))
        by_hand.grad = delta.clone()
        theirs.step()
        ours.update(anchor, delta, state, rounds=n)
        assert torch.equal(anchor, by_hand)
    kept = {name: value for name, value in theirs.state[by_hand].items() if value is not None}
    assert all(torch.equal(state[name], value) for name, value in kept.items())


def test_an_optimizer_that_keeps_plain_numbers_goes_on_counting() -> None:
    class Counting(torch.optim.Optimizer):
        def __init__(self, params: Any, lr: float) -> None:
            super().__init__(params, {"lr": lr})

        @torch.no_grad()
        def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
            [parameter] = self.param_groups[0]["params"]
            state = self.state[parameter]
            state["count"] = state.get("count", 0) + 1
            assert isinstance(state["count"], int)
            parameter.sub_(self.param_groups[0]["lr"] * state["count"])

    assert walk(optimizer(Counting, lr=1.0), 10.0, [0.0, 0.0, 0.0]) == [9.0, 7.0, 4.0]


def test_the_lr_follows_its_schedule_by_rounds() -> None:
    # A quarter of the lr until round 2, half from then on; the factor before the first milestone is 1.
    assert walk(sgd(schedule={0: 0.25, 2: 0.5}), 4.0, [1.0] * 4) == [3.75, 3.5, 3.0, 2.5]
    assert walk(sgd(schedule={2: 0.5}), 4.0, [1.0] * 4) == [3.0, 2.0, 1.5, 1.0]
    assert walk(sgd(schedule=lambda rounds: 1 / (1 + rounds)), 4.0, [1.0] * 2) == [3.0, 2.5]
    assert walk(nesterov(lr=1.0, momentum=0.0, schedule={0: 0.0}), 4.0, [1.0]) == [4.0]
    adam = optimizer(torch.optim.Adam, lr=1.0, eps=1e-30, schedule={0: 0.0, 1: 0.5})
    assert walk(adam, 4.0, [1.0, 1.0]) == pytest.approx([4.0, 3.5])


class LargestNew(TorchDispatchMode):
    """Notes the largest tensor that an operation makes beside those that were there."""

    def __init__(self, *known: torch.Tensor) -> None:
        super().__init__()
        self.known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, list | tuple) else [made]:
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in self.known:
                self.numel = max(self.numel, tensor.numel())
        return made


@pytest.mark.parametrize(
    ("outer", "most"),
    [
        (mean(), 1),
        (slowmo(), 1),
        (nesterov(), 1 << 16),
        (sgd(momentum=0.9), 1),
        (optimizer(torch.optim.AdamW, lr=0.1), 10_000),
    ],
    ids=lambda value: type(value).__name__,
)
def test_updates_make_no_temporaries_of_the_anchors_size(
    outer: Outer, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cadenza.outer.torch_optimizer, "_PIECE_NUMEL", 10_000)
    anchor, delta = torch.ones(200_000), torch.ones(200_000)
    state = outer.init(anchor)
    for n in range(3):
        with LargestNew(anchor, delta, *state.values()) as watched:
            outer.update(anchor, delta, state, rounds=n, inner_lr=0.1)
        assert watched.numel <= most


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nesterov(lr=0.0), "lr must be a number above 0; got 0.0"),
        (lambda: nesterov(lr=math.inf), "lr must be a number above 0; got inf"),
        (lambda: nesterov(momentum=1.0), "momentum must be at least 0 and below 1.* got 1.0"),
        (lambda: nesterov(clip=-1.0), "clip must be a number above 0; got -1.0"),
        (lambda: nesterov(schedule={0: -1.0}), "The factor from round 0 must be a number of at least 0; got -1.0"),
        (lambda: nesterov(schedule={-2: 1.0}), "counted from 0; got -2"),
        (lambda: sgd(schedule=lambda rounds: math.nan), "gives nan after 0 rounds; it must give a factor of at least"),
        (lambda: slowmo(beta=1.0), "beta must be at least 0 and below 1.* got 1.0"),
        (lambda: slowmo(alpha=-1), "alpha must be a number above 0; got -1"),
        (lambda: optimizer(torch.optim.LBFGS, lr=0.1), "LBFGS cannot be an outer update: .* closure"),
        (lambda: optimizer(torch.optim.Adafactor, lr=0.1), "Adafactor .* element by element.* Use another"),
        (lambda: optimizer(torch.optim.AdamW, lr=0.1, bata=1), "unexpected keyword argument 'bata'.*Check its options"),
        (lambda: optimizer(torch.optim.AdamW, lr=0.1, fused=True), "fused=True: .* Leave it out"),
    ],
)
def test_settings_that_cannot_work_are_refused(make: Callable[[], Outer], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nesterov(lr="0.7"), "lr must be a number; got '0.7', a str"),
        (lambda: nesterov(momentum=True), "momentum must be a number; got True"),
        (lambda: nesterov(schedule=0.5), "takes a function of the number of rounds or milestones.* belongs into lr"),
        (lambda: nesterov(schedule={0.5: 1.0}), r"whole number of rounds \(int\); got 0.5"),
        (lambda: sgd(schedule=lambda rounds: None), "schedule= gives after 0 rounds must be a number; got None"),
        (lambda: optimizer("AdamW", lr=0.1), "takes a class of torch optimizers, such as .*; got 'AdamW'"),
        (lambda: optimizer(torch.nn.Linear, lr=0.1), "takes a class of torch optimizers"),
    ],
)
def test_settings_of_the_wrong_type_are_refused(make: Callable[[], Outer], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        make()


def test_an_optimizer_whose_state_cannot_be_cut_is_refused() -> None:
    class Matrix(torch.optim.Optimizer):
        def __init__(self, params: Any, lr: float) -> None:
            super().__init__(params, {"lr": lr})

        def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
            [parameter] = self.param_groups[0]["params"]
            self.state[parameter]["rows"] = torch.zeros(2, 2)

    with pytest.raises(ValueError, match="Matrix cannot be an outer update: its state 'rows' is neither a number nor"):
        optimizer(Matrix, lr=0.1)


def test_a_schedule_is_described_by_its_factors() -> None:
    def slower(rounds: int) -> float:
        return [1.0, 0.5][rounds]

    assert "o.schedule: None" in identity(nesterov(), "o")
    assert "o.schedule.points: ((5, 0.5),)" in identity(nesterov(schedule={5: 0.5}), "o")
    factors = {"o.schedule(0): 1.0", "o.schedule(1): 0.5", "o.schedule(10): undefined"}
    assert factors <= set(identity(sgd(schedule=slower), "o"))
    assert identity(optimizer(torch.optim.Adam, lr=0.1, eps=1e-6, clip=2), "o") == [
        "o: cadenza.outer.torch_optimizer.TorchOptimizer",
        "o.kind: torch.optim.adam.Adam",
        "o.lr: 0.1",
        "o.options: (('eps', 1e-06),)",
        "o.clip: 2.0",
        "o.schedule: None",
    ]


def test_a_rate_that_rises_with_the_members_does_so_beyond_a_number_of_them() -> None:
    moved = {}
    for members in (1, 4, 8, 16, 10_000):
        anchor = torch.tensor([1.0])
        nesterov(0.5, momentum=0.0, rises_beyond=4).update(anchor, torch.tensor([0.5]), {}, rounds=0, members=members)
        moved[members] = 1 - anchor.item()
    assert moved == pytest.approx({1: 0.25, 4: 0.25, 8: 0.25 * 2**0.5, 16: 0.5, 10_000: 0.5})


def test_a_rate_beyond_one_stays_as_it_was_given() -> None:
    anchor = torch.tensor([1.0])
    nesterov(1.5, momentum=0.0, rises_beyond=4).update(anchor, torch.tensor([0.5]), {}, rounds=0, members=16)
    assert anchor.item() == pytest.approx(0.25)


@pytest.mark.parametrize("given", [0, -1, 2.5, True, "4"])
def test_what_is_no_number_of_members_to_rise_beyond_is_refused(given: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="rises_beyond"):
        nesterov(rises_beyond=given)

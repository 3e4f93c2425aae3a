"""THEN: what becomes of the mean difference once all have met.

Every worker starts a period from the same anchor. A round gives the mean of what the workers moved, delta = anchor −
mean, and an outer update makes of the two the anchor from which all go on. It runs in place, element by element, on
flat tensors, so it is the same to the bit on all ranks and for shards as for the whole.

>>> anchor, moved = torch.tensor([1.0]), torch.tensor([0.5])
>>> outer = nesterov(lr=0.7, momentum=0.9)
>>> state = outer.init(anchor)
>>> outer.update(anchor, moved, state, rounds=0)
>>> anchor  # 1 − 0.7 · (0.5 + 0.9 · 0.5)
tensor([0.3350])

**State and slices.** `init` gives tensors with as many elements as the anchor, and 0-dim ones. An update may be made in
slices, each with an `inner_lr` of its own: pass the slice of the anchor, of delta and of each state tensor that has the
anchor's size, the 0-dim tensors as they are, and the same `rounds` for all slices of one round. Together they give what
one update of the whole would.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from numbers import Real
from typing import Any, ClassVar, Protocol, TypeAlias

import torch

from cadenza.common.norms import in_cache

__all__ = [
    "Factor",
    "Mean",
    "Outer",
    "Sgd",
    "SlowMo",
    "State",
    "TorchOptimizer",
    "mean",
    "nesterov",
    "optimizer",
    "sgd",
    "slowmo",
]

State: TypeAlias = dict[str, torch.Tensor]
Factor: TypeAlias = Callable[[int], float]

# Two functions are taken for the same if they have one name and give one factor at each of these rounds.
_PROBED_ROUNDS = [0, *(10**power for power in range(6))]

# A torch optimizer makes temporaries of its parameter's size; in pieces they stay at some MiB.
_PIECE_NUMEL = 1 << 22


class Outer(Protocol):
    """What an outer update gives: a state to keep, and a new anchor in place of the old one.

    >>> def one_round(outer: Outer, anchor: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    ...     outer.update(anchor, anchor - mean, outer.init(anchor), rounds=0)
    ...     return anchor
    >>> one_round(sgd(lr=0.5), torch.tensor([1.0, 2.0]), torch.tensor([0.0, 4.0]))
    tensor([0.5000, 3.0000])
    """

    @property
    def plain(self) -> bool:
        """Say whether the mean is taken as it is, so that no anchor is needed."""

    @property
    def needs_inner_lr(self) -> bool:
        """Say whether `update` must be told the inner optimizer's learning rate."""

    @property
    def clip(self) -> float | None:
        """Return the norm to which the whole delta is clipped before `update`; None leaves it as it is."""

    def init(self, anchor: torch.Tensor) -> State:
        """Return the state before the first round: tensors of the anchor's size, or 0-dim."""

    def update(
        self, anchor: torch.Tensor, delta: torch.Tensor, state: State, *, rounds: int, inner_lr: float | None = None
    ) -> None:
        """Turn `anchor` into the new anchor and change `state`, both in place; `delta` may be overwritten.

        `rounds` is how many rounds came before: 0 for the first.
        """

    def describe(self) -> str:
        """Return a line that is equal on two ranks if their outer updates are."""


@dataclass(frozen=True)
class Mean:
    """Take the mean as it is; made by `mean`.

    >>> mean().plain
    True
    """

    plain: ClassVar[bool] = True
    needs_inner_lr: ClassVar[bool] = False
    clip: ClassVar[float | None] = None

    def init(self, anchor: torch.Tensor) -> State:
        return {}

    def update(
        self, anchor: torch.Tensor, delta: torch.Tensor, state: State, *, rounds: int, inner_lr: float | None = None
    ) -> None:
        anchor.sub_(delta)

    def describe(self) -> str:
        return "mean()"


def mean() -> Mean:
    """Return the plain outer update: all go on from the mean (local SGD).

    >>> anchor = torch.tensor([1.0])
    >>> mean().update(anchor, torch.tensor([0.25]), {}, rounds=0)
    >>> anchor
    tensor([0.7500])
    """
    return Mean()


@dataclass(frozen=True)
class SlowMo:
    """Momentum over rounds in units of the inner learning rate; made by `slowmo`.

    >>> slowmo().needs_inner_lr
    True
    """

    alpha: float
    beta: float
    plain: ClassVar[bool] = False
    needs_inner_lr: ClassVar[bool] = True
    clip: ClassVar[float | None] = None

    def init(self, anchor: torch.Tensor) -> State:
        return {"momentum": torch.zeros_like(anchor)}

    def update(
        self, anchor: torch.Tensor, delta: torch.Tensor, state: State, *, rounds: int, inner_lr: float | None = None
    ) -> None:
        if inner_lr is None or not 0 <= inner_lr < math.inf:
            raise ValueError(
                f"SlowMo divides by the inner optimizer's learning rate, a number of at least 0; got {inner_lr!r}. "
                "Pass the optimizer to attach(), so that its lr can be read at every round."
            )
        if inner_lr == 0:  # nothing moved by this learning rate, so there is nothing to scale by it
            anchor.sub_(delta)
            return
        momentum = state["momentum"].mul_(self.beta).add_(delta.div_(inner_lr))
        anchor.add_(momentum, alpha=-self.alpha * inner_lr)

    def describe(self) -> str:
        return f"slowmo(alpha={self.alpha}, beta={self.beta})"


def slowmo(*, alpha: float = 1.0, beta: float = 0.7) -> SlowMo:
    """Return SlowMo (arXiv 1910.00643): m ← β·m + delta / lr; anchor ← anchor − α·lr·m, with the inner lr.

    Its authors use α = 1 and β from 0.4 to 0.8. Where the inner lr is 0, the mean is taken and m stays.

    >>> anchor = torch.tensor([1.0])
    >>> outer = slowmo(beta=0.5)
    >>> state = outer.init(anchor)
    >>> for rounds in range(2):
    ...     outer.update(anchor, torch.tensor([0.25]), state, rounds=rounds, inner_lr=0.5)
    >>> anchor, state["momentum"]  # m: 0.5, then 0.5 · 0.5 + 0.5; the anchor: 0.75, then 0.75 − 0.5 · 0.75
    (tensor([0.3750]), tensor([0.7500]))
    """
    return SlowMo(_positive("alpha", alpha), _fraction("beta", beta))


@dataclass(frozen=True)
class Sgd:
    """SGD on the anchor with delta as its gradient; made by `nesterov` and `sgd`.

    >>> nesterov() == Sgd(lr=0.7, momentum=0.9, nesterov=True)
    True
    """

    lr: float
    momentum: float = 0.0
    nesterov: bool = False
    clip: float | None = None
    schedule: Factor | None = None
    plain: ClassVar[bool] = False
    needs_inner_lr: ClassVar[bool] = False

    def init(self, anchor: torch.Tensor) -> State:
        return {"momentum": torch.zeros_like(anchor)} if self.momentum else {}

    # The operations of torch.optim.SGD in their order, so that the two agree to the bit; none makes a temporary.
    def update(
        self, anchor: torch.Tensor, delta: torch.Tensor, state: State, *, rounds: int, inner_lr: float | None = None
    ) -> None:
        factor = -self.lr * _factor(self.schedule, rounds)
        momenta = in_cache(state["momentum"]) if self.momentum else []
        for part, step, momentum in zip_longest(in_cache(anchor), in_cache(delta), momenta):
            if momentum is not None:
                momentum.mul_(self.momentum).add_(step)
                step = step.add_(momentum, alpha=self.momentum) if self.nesterov else momentum
            part.add_(step, alpha=factor)

    def describe(self) -> str:
        name = "nesterov" if self.nesterov else "sgd"
        return f"{name}(lr={self.lr}, momentum={self.momentum}{_describe_options(self.clip, self.schedule)})"


def nesterov(
    lr: float = 0.7,
    *,
    momentum: float = 0.9,
    clip: float | None = None,
    schedule: Factor | Mapping[int, float] | None = None,
) -> Sgd:
    """Return DiLoCo's outer update (arXiv 2311.08105): m ← μ·m + delta; anchor ← anchor − lr·(delta + μ·m).

    `clip` bounds the norm of the whole delta. `schedule` gives a factor on `lr`: a function of the number of rounds
    that came before, or milestones {first round: factor}, with 1 before the first.

    >>> nesterov(schedule={0: 0.1, 10: 1.0}).describe()
    'nesterov(lr=0.7, momentum=0.9, schedule={0: 0.1, 10: 1.0})'
    """
    return Sgd(
        _positive("lr", lr), _fraction("momentum", momentum), True, _checked_clip(clip), _checked_factor(schedule)
    )


def sgd(
    lr: float = 1.0,
    *,
    momentum: float = 0.0,
    clip: float | None = None,
    schedule: Factor | Mapping[int, float] | None = None,
) -> Sgd:
    """Return SGD as the outer update: m ← μ·m + delta; anchor ← anchor − lr·m. SparseLoCo's has no momentum.

    `clip` and `schedule` are those of `nesterov`.

    >>> anchor = torch.tensor([1.0])
    >>> sgd(lr=0.5).update(anchor, torch.tensor([0.5]), {}, rounds=0)
    >>> anchor
    tensor([0.7500])
    """
    return Sgd(
        _positive("lr", lr), _fraction("momentum", momentum), False, _checked_clip(clip), _checked_factor(schedule)
    )


@dataclass(frozen=True)
class TorchOptimizer:
    """Any elementwise torch optimizer over the anchor, with delta as its gradient; made by `optimizer`.

    The state holds the optimizer's own tensors under their own names. A number in it (Adam's step) is a 0-dim tensor,
    and is kept from before the last round too (`before/step`), so that every slice of a round starts from the same one;
    `begun` and `applied` are the first and the last round that were applied, −1 before the first.

    >>> sorted(optimizer(torch.optim.Adam, lr=0.1).init(torch.zeros(3)))
    ['applied', 'before/step', 'begun', 'exp_avg', 'exp_avg_sq', 'step']
    """

    kind: type[torch.optim.Optimizer]
    lr: float
    options: tuple[tuple[str, Any], ...]
    # What the optimizer keeps for a parameter, by name: a sample of each.
    kept: dict[str, Any] = field(compare=False, repr=False)
    clip: float | None = None
    schedule: Factor | None = None
    plain: ClassVar[bool] = False
    needs_inner_lr: ClassVar[bool] = False

    def init(self, anchor: torch.Tensor) -> State:
        state = {name: torch.tensor(-1) for name in ("begun", "applied")}
        for name, sample in self.kept.items():
            if _has_elements(sample):
                state[name] = torch.zeros_like(anchor)
            else:
                dtype = sample.dtype if isinstance(sample, torch.Tensor) else torch.float64
                state |= {key: torch.zeros((), dtype=dtype) for key in (name, f"before/{name}")}
        return state

    def update(
        self, anchor: torch.Tensor, delta: torch.Tensor, state: State, *, rounds: int, inner_lr: float | None = None
    ) -> None:
        fresh = self._open_round(state, rounds)
        lr = self.lr * _factor(self.schedule, rounds)
        for start in range(0, anchor.numel(), _PIECE_NUMEL):
            span = slice(start, start + _PIECE_NUMEL)
            before = self._before(state, span)
            after = _take_step(self.kind, lr, self.options, anchor[span], delta[span], None if fresh else before)
            for name, sample in self.kept.items():
                place = before[name] if _has_elements(sample) else state[name]
                if after[name] is not place:  # most optimizers change what they keep in place
                    place.copy_(torch.as_tensor(after[name]))

    def describe(self) -> str:
        options = "".join(f", {name}={value!r}" for name, value in self.options)
        more = _describe_options(self.clip, self.schedule)
        return f"optimizer({self.kind.__module__}.{self.kind.__qualname__}, lr={self.lr}{options}{more})"

    def _open_round(self, state: State, rounds: int) -> bool:
        """Set the numbers of the last round aside, if this is the first slice of a new one; say if it is the first."""
        if int(state["applied"]) != rounds:
            for name, sample in self.kept.items():
                if not _has_elements(sample):
                    state[f"before/{name}"].copy_(state[name])
            state["applied"].fill_(rounds)
        if int(state["begun"]) < 0:
            state["begun"].fill_(rounds)
        return int(state["begun"]) == rounds

    def _before(self, state: State, span: slice) -> dict[str, Any]:
        """Return what the optimizer had kept for a span of elements before the round."""
        before: dict[str, Any] = {}
        for name, sample in self.kept.items():
            if _has_elements(sample):
                before[name] = state[name][span]
            elif isinstance(sample, torch.Tensor):
                before[name] = state[f"before/{name}"].to("cpu", copy=True)  # where torch has it on any device
            else:
                before[name] = type(sample)(state[f"before/{name}"].item())
        return before


def optimizer(
    kind: type[torch.optim.Optimizer],
    *,
    lr: float,
    clip: float | None = None,
    schedule: Factor | Mapping[int, float] | None = None,
    **options: Any,
) -> TorchOptimizer:
    """Return any torch optimizer as the outer update; `options` are its own, `clip` and `schedule` those of `nesterov`.

    It must work element by element: one that needs the shape or the norm of a parameter (Muon, Adafactor, LBFGS) would
    give something else on shards than on the whole, and is refused.

    >>> anchor = torch.tensor([1.0, 1.0])
    >>> outer = optimizer(torch.optim.AdamW, lr=0.1, weight_decay=0.0)
    >>> state = outer.init(anchor)
    >>> outer.update(anchor, torch.tensor([0.5, -0.01]), state, rounds=0)
    >>> anchor
    tensor([0.9000, 1.1000])
    """
    _check_kind(kind, options)
    lr = _positive("lr", lr)
    settled = tuple(sorted(options.items()))
    kept = _try_out(kind, lr, settled)
    return TorchOptimizer(kind, lr, settled, kept, _checked_clip(clip), _checked_factor(schedule))


def _check_kind(kind: object, options: Mapping[str, Any]) -> None:
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise TypeError(
            f"optimizer() takes a class of torch optimizers, such as torch.optim.AdamW; got {kind!r}. "
            "Pass its options by name: optimizer(torch.optim.AdamW, lr=0.1, betas=(0.9, 0.95))."
        )
    if options.get("fused"):
        raise ValueError(
            f"{kind.__name__} cannot be an outer update with fused=True: fused steps round differently at the ends of "
            "a slice, so ranks would part by a bit. Leave it out; outer updates are seldom."
        )


def _take_step(
    kind: type[torch.optim.Optimizer],
    lr: float,
    options: tuple[tuple[str, Any], ...],
    values: torch.Tensor,
    gradient: torch.Tensor,
    kept: dict[str, Any] | None,
) -> dict[str, Any]:
    """Take one step of a new optimizer that goes on from what an earlier one kept; return what it keeps."""
    parameter = values.detach()
    parameter.grad = gradient.detach()
    made = kind([parameter], lr=lr, **dict(options))  # type: ignore[call-arg]
    if kept is not None:
        made.state[parameter] = dict(kept)
    made.step()
    return {name: value for name, value in made.state[parameter].items() if value is not None}


def _try_out(kind: type[torch.optim.Optimizer], lr: float, options: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
    """Run an optimizer on four numbers, whole and in halves; return what it keeps, or say why it will not do."""

    def three_steps(values: torch.Tensor, gradient: torch.Tensor) -> dict[str, Any]:
        kept = _take_step(kind, lr, options, values, gradient.clone(), None)
        for _ in range(2):
            kept = _take_step(kind, lr, options, values, gradient.clone(), kept)
        return kept

    whole = torch.tensor([1.0, -2.0, 3.0, -4.0], dtype=torch.float64)
    gradient = torch.tensor([0.5, 0.25, -4.0, 2.0], dtype=torch.float64)
    halves = whole.clone()
    try:
        kept = three_steps(whole, gradient)
        for half in (slice(0, 2), slice(2, 4)):
            three_steps(halves[half], gradient[half])
    except Exception as error:
        raise ValueError(
            f"{kind.__name__} cannot be an outer update: on a flat tensor and without a closure it raised "
            f'{type(error).__name__}("{error}"). Check its options, or use another, such as torch.optim.AdamW.'
        ) from error
    if not torch.allclose(whole, halves, rtol=1e-9, atol=0.0):
        raise ValueError(
            f"{kind.__name__} cannot be an outer update: it does not work element by element, so it would give "
            "something else on a part of the model than on the whole. Use another optimizer, such as torch.optim.AdamW."
        )
    for name, sample in kept.items():
        if not (isinstance(sample, int | float) or (isinstance(sample, torch.Tensor) and sample.shape in ((), (4,)))):
            raise ValueError(
                f"{kind.__name__} cannot be an outer update: its state {name!r} is neither a number nor a tensor of "
                "the parameter's size, so it cannot be saved by elements. Use another, such as torch.optim.AdamW."
            )
    return kept


def _has_elements(sample: object) -> bool:
    """Say whether something that an optimizer keeps belongs to the elements, not to the parameter as a whole."""
    return isinstance(sample, torch.Tensor) and sample.ndim > 0


@dataclass(frozen=True)
class _Milestones:
    """A factor for each stretch of rounds: a function that can be compared by value."""

    factors: tuple[tuple[int, float], ...]

    def __call__(self, rounds: int) -> float:
        position = bisect_right(self.factors, rounds, key=lambda pair: pair[0])
        return self.factors[position - 1][1] if position else 1.0


def _factor(schedule: Factor | None, rounds: int) -> float:
    """Return the factor on the outer learning rate, checked: a function may give anything."""
    if schedule is None:
        return 1.0
    factor = _number(f"The factor that schedule= gives after {rounds} rounds", schedule(rounds))
    if not 0 <= factor < math.inf:
        raise ValueError(
            f"The schedule of the outer lr gives {factor} after {rounds} rounds; it must give a factor of at least 0."
        )
    return factor


def _checked_factor(schedule: Factor | Mapping[int, float] | None) -> Factor | None:
    if isinstance(schedule, Mapping):
        return _milestones(schedule)
    if schedule is not None and not callable(schedule):
        raise TypeError(
            "schedule= takes a function of the number of rounds or milestones {first round: factor}; "
            f"got {schedule!r}. A factor that stays the same belongs into lr."
        )
    _factor(schedule, 0)
    return schedule


def _milestones(factors: Mapping[int, float]) -> _Milestones:
    for rounds, factor in factors.items():
        _check_milestone(rounds)
        if not 0 <= _number(f"the factor from round {rounds}", factor) < math.inf:
            raise ValueError(f"The factor from round {rounds} must be a number of at least 0; got {factor!r}.")
    return _Milestones(tuple(sorted((rounds, float(factor)) for rounds, factor in factors.items())))


def _check_milestone(rounds: object) -> None:
    if isinstance(rounds, bool) or not isinstance(rounds, int):
        raise TypeError(f"A milestone of schedule= is a whole number of rounds (int); got {rounds!r}.")
    if rounds < 0:
        raise ValueError(f"A milestone of schedule= is a number of rounds, counted from 0; got {rounds}.")


def _describe_options(clip: float | None, schedule: Factor | None) -> str:
    text = "" if clip is None else f", clip={clip}"
    if isinstance(schedule, _Milestones):
        text += f", schedule={dict(schedule.factors)}"
    elif schedule is not None:
        name = getattr(schedule, "__qualname__", type(schedule).__qualname__)
        text += f", schedule={name} with {{{', '.join(f'{n}: {_probed(schedule, n)}' for n in _PROBED_ROUNDS)}}}"
    return text


def _probed(schedule: Factor, rounds: int) -> str:
    # A function need not be defined for rounds that the run never comes to.
    try:
        return str(_factor(schedule, rounds))
    except Exception:
        return "undefined"


def _checked_clip(clip: float | None) -> float | None:
    return None if clip is None else _positive("clip", clip)


def _positive(name: str, value: float) -> float:
    if not 0 < _number(name, value) < math.inf:
        raise ValueError(f"{name} must be a number above 0; got {value!r}.")
    return float(value)


def _fraction(name: str, value: float) -> float:
    if not 0 <= _number(name, value) < 1:
        raise ValueError(f"{name} must be at least 0 and below 1, or the momentum would never fade; got {value!r}.")
    return float(value)


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number; got {value!r}, a {type(value).__name__}.")
    return float(value)

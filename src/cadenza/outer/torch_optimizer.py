"""Any elementwise torch optimizer as the outer update."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from cadenza.common.checks import as_positive
from cadenza.common.later import torch
from cadenza.outer.base import State
from cadenza.outer.factors import PROBED_ROUNDS, Factor, checked_clip, checked_factor, factor_after

__all__ = ["TorchOptimizer", "optimizer"]

# A torch optimizer makes temporaries of its parameter's size; in pieces they stay at some MiB.
_PIECE_NUMEL = 1 << 22


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
    kept: dict[str, Any] = field(compare=False, repr=False, metadata={"local": "derived from kind and options"})
    clip: float | None = None
    schedule: Factor | None = field(default=None, metadata=PROBED_ROUNDS)
    plain: ClassVar[bool] = False
    needs_inner_lr: ClassVar[bool] = False
    needs_own: ClassVar[bool] = False
    needs_anchor_mean: ClassVar[bool] = False
    diverges: ClassVar[bool] = False

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
        self,
        anchor: torch.Tensor,
        delta: torch.Tensor,
        state: State,
        *,
        rounds: int,
        inner_lr: float | None = None,
        own: torch.Tensor | None = None,
        now: torch.Tensor | None = None,
        members: int = 1,
        anchor_mean: torch.Tensor | None = None,
    ) -> None:
        fresh = self._open_round(state, rounds)
        lr = self.lr * factor_after(self.schedule, rounds)
        for start in range(0, anchor.numel(), _PIECE_NUMEL):
            span = slice(start, start + _PIECE_NUMEL)
            before = self._before(state, span)
            after = _take_step(self.kind, lr, self.options, anchor[span], delta[span], None if fresh else before)
            for name, sample in self.kept.items():
                place = before[name] if _has_elements(sample) else state[name]
                if after[name] is not place:  # most optimizers change what they keep in place
                    place.copy_(torch.as_tensor(after[name]))

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
    lr = as_positive("lr", lr)
    settled = tuple(sorted(options.items()))
    kept = _try_out(kind, lr, settled)
    return TorchOptimizer(kind, lr, settled, kept, checked_clip(clip), checked_factor(schedule))


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

"""What every outer update promises."""

from __future__ import annotations

from typing import Protocol, TypeAlias

from cadenza.common.later import torch

__all__ = ["Outer", "State"]

State: TypeAlias = "dict[str, torch.Tensor]"


class Outer(Protocol):
    """What an outer update gives: a state to keep, and a new anchor in place of the old one.

    >>> from cadenza.outer import sgd
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
    def needs_own(self) -> bool:
        """Say whether `update` must be told this worker's own differences, at launch and landing, beside the mean."""

    @property
    def needs_anchor_mean(self) -> bool:
        """Say whether `update` must be told the mean of the members' anchors, which may differ between workers."""

    @property
    def diverges(self) -> bool:
        """Say whether the new anchor differs between workers, so that it is each worker's own."""

    @property
    def clip(self) -> float | None:
        """Return the norm to which the whole delta is clipped before `update`; None leaves it as it is."""

    def init(self, anchor: torch.Tensor) -> State:
        """Return the state before the first round: tensors of the anchor's size, or 0-dim."""

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
        """Turn `anchor` into the new anchor and change `state`, both in place; `delta` may be overwritten.

        Args:
            anchor: What all started from, or this worker where anchors differ.
            delta: The mean of the members' differences, anchor − value.
            state: What `init` gave, or the last update left.
            rounds: How many rounds came before: 0 for the first.
            inner_lr: The inner optimizer's learning rate, where `needs_inner_lr`.
            own: The difference that this worker has sent, where `needs_own`; not to be changed.
            now: This worker's difference at the landing, where `needs_own`: another one if the round lands late.
            members: How many workers have held the round: the same number on all of them.
            anchor_mean: The mean of the members' anchors, where `needs_anchor_mean`; not to be changed.
        """

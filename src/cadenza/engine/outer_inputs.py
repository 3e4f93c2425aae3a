"""What an outer update is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

__all__ = ["OuterInputs"]


class OuterInputs:
    """What an outer update may want to see beside the mean difference.

    Attributes:
        inner_lrs: The learning rate of each parameter at the launch.
        own: The difference that this worker has sent.
        now: This worker's difference at the landing.
        anchor_means: The mean of the members' anchors.
        members: How many have taken part.
        mean2: The squared norm of the mean difference, the same number on all members; only where it is clipped.
    """

    def __init__(
        self,
        inner_lrs: Mapping[str, float],
        *,
        members: int,
        mean2: float = 0.0,
        own: Sequence[torch.Tensor] = (),
        now: Sequence[torch.Tensor] = (),
        anchor_means: Sequence[torch.Tensor] = (),
    ) -> None:
        self.inner_lrs = inner_lrs
        self.members, self.mean2 = members, mean2
        self.own, self.now, self.anchor_means = own, now or own, anchor_means

    def of(self, strip: int, where: slice = slice(None)) -> dict[str, Any]:
        """Return the keywords of an update of a part of a strip."""
        given = {"own": self.own, "now": self.now, "anchor_mean": self.anchor_means}
        told: dict[str, Any] = {name: flats[strip][where] for name, flats in given.items() if flats}
        return {**told, "members": self.members}

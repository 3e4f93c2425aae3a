"""A round on its way, from its launch to its landing."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from cadenza.rounds import Passage
from cadenza.tracks import Layout

__all__ = ["Flight"]


@dataclass
class Flight:
    """What a launch leaves for the landing.

    Attributes:
        values: Flat copies of what was sent; the mean, once the passage is over.
        origins: The parameters as they were at the launch, where a plain mean lands late and keeps local progress.
        alpha: How much of the local value stays when the result lands.
        inner_lrs: The learning rates at the launch.
        samples: The samples that this worker had used at the launch.
    """

    level: int
    fragment: int
    step: int
    land_at: int
    layout: Layout
    norm2: float
    values: list[torch.Tensor] = field(default_factory=list)
    origins: list[torch.Tensor] | None = None
    alpha: float = 0.0
    inner_lrs: dict[str, float] = field(default_factory=dict)
    passage: Future[Passage] = field(default_factory=Future)
    samples: float = 0.0
    stall_s: float = 0.0

    @property
    def late(self) -> bool:
        """Whether training goes on between launch and landing."""
        return self.land_at > self.step

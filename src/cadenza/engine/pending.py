"""A round on its way: launched with packed values, carried to its result, and written into the parameters.

`carry` does all that needs no parameters, in the thread of a courier where the strategy has a delay, so that the
training loop only packs at the launch and unpacks at the landing. It may change the anchor there: a fragment has one
round on its way at most, and nobody else reads the anchor before that has landed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import torch

from cadenza.common.norms import difference, distance_squared, norm_squared
from cadenza.engine.header import Header
from cadenza.engine.in_place_mean import Passage, fly
from cadenza.engine.level_group import LevelGroup
from cadenza.engine.level_state import Layout, Track

__all__ = ["Flight", "Tolerant", "carry"]


class Tolerant(Protocol):
    """Those with whom a round may fail, and training goes on."""

    def carry(self, call: Any, fly: Callable[[], Passage]) -> Any:
        """Run the exchange and vote on it; return its passage, or something else if nothing may be changed."""
        ...

    def judge(self, headers: list[Header]) -> list[Header]:
        """Take the weight from contributions that would do harm."""
        ...


@dataclass
class Flight:
    """What a launch leaves for the landing.

    Attributes:
        values: Flat copies of what is sent; the mean, once the passage is over. None are left where there is an anchor,
            which is the result then.
        origins: The parameters as they were at the launch, where a plain mean lands late and keeps local progress.
        alpha: How much of the local value stays when the result lands.
        inner_lrs: The learning rates at the launch.
        samples: The samples that this worker had used at the launch.
        drift: How far the workers had moved apart, once the passage is over and if it is measured.
        call: The name of the round's meeting, where workers come and go.
        poisoned: Whether this worker's contribution was left out, so that it starts anew from the anchor.
        passage: What the round was, once it is over; something else where it failed and training goes on.
    """

    level: int
    fragment: int
    step: int
    land_at: int
    layout: Layout
    values: Sequence[torch.Tensor] = ()
    origins: Sequence[torch.Tensor] | None = None
    alpha: float = 0.0
    inner_lrs: dict[str, float] = field(default_factory=dict)
    passage: Future[Any] = field(default_factory=Future)
    samples: float = 0.0
    stall_s: float = 0.0
    drift: float | None = None
    call: Any = None
    poisoned: bool = False

    @property
    def late(self) -> bool:
        """Whether training goes on between launch and landing."""
        return self.land_at > self.step

    @torch.no_grad()
    def write(self, landed: Sequence[torch.Tensor]) -> None:
        """Give the parameters the landed value, and what is theirs to keep of the local progress since the launch."""
        if self.origins is not None:
            for now, origin, value in self.layout.pieces(self.origins, landed):
                if now.dtype == value.dtype and now.device == value.device:
                    now.sub_(origin).add_(value)
                else:
                    now.copy_(now.to(value).sub(origin).add_(value))
        elif self.alpha:
            for now, value in self.layout.pieces(landed):
                now.copy_(now.to(value).lerp(value, 1 - self.alpha))
        else:
            self.layout.unpack(landed)


@torch.no_grad()
def carry(
    flight: Flight,
    level: LevelGroup,
    track: Track,
    header: Header,
    *,
    problem: str | None,
    measure: bool,
    normalise: bool,
    company: Tolerant | None = None,
) -> Any:
    """Take packed values to their result: exchange them and, once that has succeeded, make the new anchor of them.

    Args:
        flight: The round; its values are used up.
        level: Who meets, and how.
        track: What the level remembers of the fragment.
        header: What the others are told, but for the norm, which is found here.
        problem: What keeps this worker from taking part, if something does.
        measure: Whether to measure the drift.
        normalise: Whether differences come from unequal numbers of steps.
        company: Who votes on the round before anything is changed, where rounds may fail. What it says instead of a
            passage is returned as it is.
    """
    plan, values = level.plan, flight.values
    late_mean = flight.late and plan.outer.plain
    spread = measure and not plan.anchored
    if plan.anchored:
        origins = values if late_mean else None
        values = track.spare.borrow(flight.layout) if late_mean else values
        both = zip(track.anchors, flight.values, values, strict=True)
        norm2 = sum(difference(anchor, flat, out=out) for anchor, flat, out in both)
        flight.values = values
    else:
        origins = [flat.clone() for flat in values] if late_mean or spread else None
        norm2 = norm_squared(*values)
    problem = problem or _not_finite(flight, norm2)
    header = replace(header, norm2=norm2, atomic=company is not None)
    if company is not None and problem is not None:
        header, problem = _harmless(flight, header), None
    go = partial(
        fly,
        values,
        level.transport,
        header,
        plan.codec,
        problem=problem,
        describe=flight.layout.fragment.describe,
        residuals=track.residuals,
        stage=level.stage,
        normalise=normalise,
        origins=origins if spread else None,
        judge=None if company is None else company.judge,
    )
    passage = go() if company is None else company.carry(flight.call, go)
    if not isinstance(passage, Passage):
        return passage
    if measure:
        flight.drift = _drift_of_differences(passage, track, values) if plan.anchored else _drift(passage, values)
    if plan.anchored:
        flight.values = ()
        if passage.weightless:
            track.take(values)
        else:
            track.update(values, flight.inner_lrs)
        track.spare.give_back(values)
    flight.origins = origins if late_mean else None
    if passage.headers[passage.position].poisoned:
        flight.origins, flight.alpha, flight.poisoned = None, 0.0, True
    return passage


def _harmless(flight: Flight, header: Header) -> Header:
    """Turn a contribution that is not finite into zeros that count for nothing."""
    for flat in flight.values:
        flat.zero_()
    return replace(header, weight=0.0, norm2=0.0, poisoned=True)


def _drift(passage: Passage, means: Sequence[torch.Tensor]) -> float:
    """Return how far the workers had moved apart, relative to the size of the mean; the same on all ranks."""
    return math.sqrt(passage.spread2 / max(norm_squared(*means), 1e-300))


def _drift_of_differences(passage: Passage, track: Track, deltas: Sequence[torch.Tensor]) -> float:
    mean2 = sum(w * header.norm2 for w, header in zip(passage.weights, passage.headers, strict=True))
    size2 = sum(distance_squared(anchor, delta) for anchor, delta in zip(track.anchors, deltas, strict=True))
    return math.sqrt(max(0.0, mean2 - norm_squared(*deltas)) / max(size2, 1e-300))


def _not_finite(flight: Flight, norm2: float) -> str | None:
    if flight.layout.fragment.problem is not None or math.isfinite(norm2):
        return flight.layout.fragment.problem
    found = (f"parameter {name}" for name, part in flight.layout.slices(flight.values) if not part.isfinite().all())
    return f"{next(found, 'the norm of the values')} is not finite (NaN or infinity) at step {flight.step}."

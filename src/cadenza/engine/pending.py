"""A round in flight: launched with packed values, landed when its result is written into the parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch

from cadenza.common.streams import Moment, keep_for_stream
from cadenza.engine.layout import Layout
from cadenza.engine.round_result import RoundResult
from cadenza.engine.side_values import SideValues
from cadenza.participants.base import FailedRound
from cadenza.participants.round_id import RoundId

__all__ = ["PendingRound"]


@dataclass
class PendingRound:
    """What a launch leaves for the landing.

    Attributes:
        id: The round's name: step, phase and fragment.
        level: The level that meets.
        land_at: The clock's step at which it lands.
        layout: How the fragment's parameters lie in flat tensors.
        values: Flat copies of what is sent; the mean, once the exchange is over. None are left where there is an anchor
            that is the result then.
        side: What is averaged beside them, where the round may fail; it is not saved.
        origins: The parameters as they were at the launch, where what was learned since then is kept.
        own: The difference that this worker has sent, where it is needed again.
        alpha: How much of the local value stays when the result lands.
        keeps_progress: Whether what was learned since the launch is added to a result that lands late.
        restarts: Whether the parameters went back to the anchor at the launch, so that all progress since then counts
            in the next round, and the outer step is taken at the landing.
        inner_lrs: The learning rates at the launch.
        samples: The samples that this worker had used at the launch.
        stall_s: For how long the training loop has stood still for it.
        drift: How far the workers had moved apart, once that is known and if it is measured.
        own_left_out: Whether this worker's contribution was left out, so that it starts anew from the anchor.
        codec: What the values were written in, if it is not what the level always writes in.
        decision: What it has changed of period and codec, and why.
        outcome: The result, once it is there; `result` also orders what is enqueued.
        done: What the work on it has enqueued, where it was done in other streams than training is.
    """

    id: RoundId
    level: int
    land_at: int
    layout: Layout
    values: Sequence[torch.Tensor] = ()
    side: SideValues | None = None
    origins: Sequence[torch.Tensor] | None = None
    own: Sequence[torch.Tensor] = ()
    anchor_means: Sequence[torch.Tensor] = ()
    alpha: float = 0.0
    keeps_progress: bool = False
    restarts: bool = False
    inner_lrs: dict[str, float] = field(default_factory=dict)
    samples: float = 0.0
    stall_s: float = 0.0
    drift: float | None = None
    own_left_out: bool = False
    codec: str = ""
    decision: str = ""
    outcome: Future[RoundResult | FailedRound] = field(default_factory=Future)
    done: Moment | None = None

    @property
    def fragment(self) -> int:
        return self.id.fragment

    @property
    def step(self) -> int:
        """The clock's step at the launch."""
        return self.id.step

    @property
    def late(self) -> bool:
        """Whether training goes on between launch and landing."""
        return self.land_at > self.step

    def wait(self) -> None:
        """Wait until it is no longer under way, and let what this thread enqueues from now on come after it."""
        self.outcome.exception()
        if self.done is not None:
            self.done.wait()
            keep_for_stream(self.tensors().values())

    def result(self) -> RoundResult | FailedRound:
        """Wait for it, and return what came of it or raise."""
        self.wait()
        return self.outcome.result()

    @torch.no_grad()
    def write(self, landed: Sequence[torch.Tensor]) -> None:
        """Give the parameters the landed value, and what is theirs to keep of the local progress since the launch."""
        if self.origins is not None:
            self._move(self.origins, landed)
        elif self.alpha:
            for now, value in self.layout.pieces(landed):
                now.copy_((now.to(value) * self.alpha).add_(value * (1 - self.alpha)))
        else:
            self.layout.unpack(landed)

    @torch.no_grad()
    def give_back(self) -> None:
        """Undo a launch that took the progress out of the parameters: its round has failed."""
        if self.restarts:
            for now, own in self.layout.pieces(self.own):
                now.copy_(now.to(own).sub_(own))

    def _move(self, origins: Sequence[torch.Tensor], landed: Sequence[torch.Tensor]) -> None:
        for now, origin, value in self.layout.pieces(origins, landed):
            if now.dtype == value.dtype and now.device == value.device:
                now.sub_(origin).add_(value)
            else:
                now.copy_(now.to(value).sub(origin).add_(value))

    # ---- saving ----------------------------------------------------------------------------------------------------

    def facts(self, result: RoundResult) -> dict[str, Any]:
        """Return what it is besides its tensors, as JSON can hold it."""
        return {
            "id": str(self.id),
            "level": self.level,
            "fragment": self.fragment,
            "land_at": self.land_at,
            "names": self.layout.names,
            "alpha": self.alpha,
            "restarts": self.restarts,
            "inner_lrs": self.inner_lrs,
            "samples": self.samples,
            "stall_s": self.stall_s,
            "drift": self.drift,
            "own_left_out": self.own_left_out,
            "codec": self.codec,
            "kept": [kind for kind, flats in self._flats().items() if flats],
            "result": result.facts(),
        }

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return its flat tensors, by kind and number."""
        return {f"{kind}/{i}": flat for kind, flats in self._flats().items() for i, flat in enumerate(flats)}

    @classmethod
    def from_facts(
        cls, facts: Mapping[str, Any], layout: Layout, read: Callable[[str], list[torch.Tensor]]
    ) -> PendingRound:
        """Return what `facts` and `tensors` gave; `read` returns the flat tensors of a kind."""
        kept = {kind: read(kind) for kind in facts["kept"]}
        pending = cls(
            RoundId.parse(facts["id"]),
            facts["level"],
            facts["land_at"],
            layout,
            values=kept.get("value", ()),
            origins=kept.get("origin"),
            own=kept.get("own", ()),
            anchor_means=kept.get("anchor_mean", ()),
            alpha=facts["alpha"],
            restarts=facts["restarts"],
            inner_lrs=facts["inner_lrs"],
            samples=facts["samples"],
            stall_s=facts["stall_s"],
            drift=facts["drift"],
            own_left_out=facts["own_left_out"],
            codec=facts.get("codec", ""),
        )
        pending.outcome.set_result(RoundResult.from_facts(facts["result"]))
        return pending

    def _flats(self) -> dict[str, Sequence[torch.Tensor]]:
        kinds = {"value": self.values, "origin": self.origins or (), "own": self.own}
        return {**kinds, "anchor_mean": self.anchor_means}

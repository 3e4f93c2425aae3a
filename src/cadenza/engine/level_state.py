"""What a level remembers of a fragment between rounds: its schedule's state, its anchor, outer state and residuals.

Values are kept flat, one tensor for each precision and device, and named by parameter where they are saved or where the
parameters of the fragment change.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from cadenza.common.norms import norm_squared
from cadenza.engine.exchange import Residual, Stage, stage_part
from cadenza.engine.packing import Bucket, Fragment
from cadenza.schedules import Schedule
from cadenza.strategy import LevelPlan
from cadenza.transports import Transport

__all__ = ["Layout", "Spare", "Track"]


_BEFORE = "before/"
_MOST_SPARE = 64 << 20  # bytes


class Layout:
    """A fragment's parameters as they lie in flat tensors, now."""

    def __init__(self, named: Mapping[str, torch.Tensor], *, home: torch.device | None) -> None:
        self.names = list(named)
        self.fragment = Fragment(list(named.values()), label=lambda i: f"parameter {self.names[i]}")
        self.strips, places = self.fragment.strips(home)
        self.places = {self.names[position]: place for position, place in places.items()}

    def pack(self, flats: Sequence[torch.Tensor] | None = None) -> Sequence[torch.Tensor]:
        """Return flat copies of the values, in the memory that is given or in new one."""
        flats = self.empty() if flats is None else flats
        for strip, flat in zip(self.strips, flats, strict=True):
            strip.pack(flat)
        return flats

    def unpack(self, flats: Sequence[torch.Tensor]) -> None:
        """Write flat values into the parameters, in place."""
        for strip, flat in zip(self.strips, flats, strict=True):
            strip.unpack(flat)

    def pieces(self, *flats: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, ...]]:
        """Yield each parameter's own memory together with its part of each of the flat values."""
        for i, strip in enumerate(self.strips):
            yield from zip(strip.pieces, *(strip.places_in(values[i]) for values in flats), strict=True)

    def slices(self, flats: Sequence[torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each parameter's name and its part of the flat values."""
        for name, (strip, where) in self.places.items():
            yield name, flats[strip][where]

    def empty(self) -> list[torch.Tensor]:
        """Return memory for flat values."""
        return [self._empty(strip) for strip in self.strips]

    def _empty(self, strip: Bucket) -> torch.Tensor:
        pinned = strip.device.type == "cpu" and any(piece.is_cuda for piece in strip.pieces)
        return torch.empty(strip.numel, dtype=strip.dtype, device=strip.device, pin_memory=pinned)


class Spare:
    """Memory that rounds no longer need, kept for later ones while it is little: new memory is slow at its first use.

    >>> spare, layout = Spare(), Layout({"weight": torch.zeros(3)}, home=None)
    >>> [flat] = first = spare.borrow(layout)
    >>> spare.give_back(first); spare.borrow(layout)[0] is flat
    True
    """

    def __init__(self) -> None:
        self._kept: list[Sequence[torch.Tensor]] = []
        self._lock = threading.Lock()  # a courier uses it too

    def borrow(self, layout: Layout) -> Sequence[torch.Tensor]:
        """Return flat memory for a round: what an earlier one has given back, or new one."""
        with self._lock:
            for i, flats in enumerate(self._kept):
                if len(flats) == len(layout.strips) and all(map(_fits, flats, layout.strips)):
                    return self._kept.pop(i)
        return layout.empty()

    def give_back(self, flats: Sequence[torch.Tensor]) -> None:
        """Keep memory, unless that would be much."""
        with self._lock:
            if flats and sum(flat.nbytes for kept in (*self._kept, flats) for flat in kept) <= _MOST_SPARE:
                self._kept.append(flats)


class Track:
    """A level's memory of one fragment."""

    def __init__(self, plan: LevelPlan, schedule: Schedule, spare: Spare) -> None:
        self.plan = plan
        self.spare = spare
        self.schedule = schedule
        self.schedule_state = schedule.start()
        self.rounds = 0
        self.anchors: list[torch.Tensor] = []
        self.outer_states: list[dict[str, torch.Tensor]] = []
        self.residuals: list[Residual] | None = None
        self._layout: Layout | None = None

    def fit(self, layout: Layout, transport: Transport, stage: Stage | None = None) -> None:
        """Make the memory fit the parameters: new ones start from their values, old ones keep what they had."""
        known = self._layout
        self._layout = layout
        if not self.plan.anchored or (known is not None and known.places == layout.places):
            return
        anchors = list(layout.pack())
        outer_states = [self.plan.outer.init(anchor) for anchor in anchors]
        if known is not None:
            self._carry_over(known, layout, anchors, outer_states)
        self.anchors, self.outer_states = anchors, outer_states
        if self.plan.codec.feedback is not None:
            sent = [stage_part(anchor, stage) if stage else anchor for anchor in anchors]
            via = stage.across if stage else transport
            self.residuals = [Residual.zeros(part, via, self.plan.codec) for part in sent]

    def reseat(self, transport: Transport) -> None:
        """Cut the residuals of shares anew, for other members; what this worker itself has lost stays known."""
        for i, residual in enumerate(self.residuals or ()):
            fresh = Residual.zeros(self.anchors[i], transport, self.plan.codec)
            residual.share, residual.next_share = fresh.share, fresh.next_share

    def count_round(self, n: int, drift: float | None) -> None:
        """Move the schedule on past a round at step `n`; what it was before stays known until the drift is."""
        before = {f"{_BEFORE}{key}": value for key, value in self.schedule_state.items() if not key.startswith(_BEFORE)}
        self.schedule_state = self.schedule.after_round(n, self.schedule_state, drift)
        if drift is None and self.schedule.uses_drift:
            self.schedule_state |= {**before, f"{_BEFORE}n": n}

    def learn_drift(self, drift: float | None) -> None:
        """Tell the schedule the drift of the round that it was moved past without knowing it."""
        before = {key.removeprefix(_BEFORE): v for key, v in self.schedule_state.items() if key.startswith(_BEFORE)}
        if before and drift is not None:
            n = int(before.pop("n"))
            self.schedule_state = self.schedule.after_round(n, before, drift)

    def set_anchor(self, landed: Layout | Sequence[torch.Tensor]) -> None:
        """Start anew from values on which a larger level has agreed; momentum is kept, residuals are forgotten."""
        if isinstance(landed, Layout):
            landed.pack(self.anchors)
        else:
            for anchor, flat in zip(self.anchors, landed, strict=True):
                anchor.copy_(flat)
        for residual in self.residuals or ():
            residual.clear()

    def take(self, deltas: Sequence[torch.Tensor]) -> None:
        """Move the anchor to the mean itself, without an outer step: nobody had anything to add."""
        for anchor, delta in zip(self.anchors, deltas, strict=True):
            anchor.sub_(delta)
        self._commit()

    def update(self, deltas: Sequence[torch.Tensor], inner_lrs: Mapping[str, float]) -> None:
        """Make the new anchor of the mean difference."""
        assert self._layout is not None
        _clip(deltas, self.plan.outer.clip)
        for i, (anchor, delta) in enumerate(zip(self.anchors, deltas, strict=True)):
            if not self.plan.outer.needs_inner_lr:
                self.plan.outer.update(anchor, delta, self.outer_states[i], rounds=self.rounds)
                continue
            for name, (strip, where) in self._layout.places.items():
                if strip == i:
                    state = {key: value[where] if value.ndim else value for key, value in self.outer_states[i].items()}
                    lr = inner_lrs.get(name, 0.0)
                    self.plan.outer.update(anchor[where], delta[where], state, rounds=self.rounds, inner_lr=lr)
        self._commit()

    def shared_state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what is the same on all members, by key: anchors and outer state."""
        yield from self._named("anchor", self.anchors)
        keys = {key: None for state in self.outer_states for key in state}
        for key in keys:
            tensors = [state[key] for state in self.outer_states]
            if tensors[0].ndim:
                yield from self._named(f"outer/{key}", tensors)
            else:
                yield from ((f"outer/{key}/{i}", tensor) for i, tensor in enumerate(tensors))

    def worker_state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what is this member's own, by key: residuals."""
        for i, residual in enumerate(self.residuals or ()):
            yield f"residual/{i}", residual.own
            yield f"share/{i}", residual.share

    def load(self, shared: Mapping[str, torch.Tensor], worker: Callable[[str], torch.Tensor | None]) -> None:
        """Take saved tensors over, in place; what was not saved stays as it is."""
        for key, tensor in self.shared_state():
            if key in shared:
                tensor.copy_(shared[key].reshape(tensor.shape))
        for key, tensor in self.worker_state():
            saved = worker(key)
            if saved is not None and saved.shape == tensor.shape:
                tensor.copy_(saved)
            else:
                tensor.zero_()

    def _commit(self) -> None:
        for residual in self.residuals or ():
            residual.commit()

    def _named(self, kind: str, flats: Sequence[torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        if self._layout is not None and flats:
            for name, part in self._layout.slices(flats):
                yield f"{kind}/{name}", part

    def _carry_over(
        self,
        known: Layout,
        layout: Layout,
        anchors: Sequence[torch.Tensor],
        outer_states: Sequence[Mapping[str, torch.Tensor]],
    ) -> None:
        for name, (strip, where) in layout.places.items():
            if name not in known.places:
                continue
            old_strip, old_where = known.places[name]
            anchors[strip][where] = self.anchors[old_strip][old_where]
            for key, value in self.outer_states[old_strip].items():
                target = outer_states[strip][key]
                if target.ndim:
                    target[where] = value[old_where]
                else:
                    target.copy_(value)


def _fits(flat: torch.Tensor, strip: Bucket) -> bool:
    return flat.numel() == strip.numel and flat.dtype == strip.dtype and flat.device == strip.device


def _clip(deltas: Sequence[torch.Tensor], limit: float | None) -> None:
    if limit is None:
        return
    norm = math.sqrt(norm_squared(*deltas))
    if norm > limit:
        for delta in deltas:
            delta.mul_(limit / norm)

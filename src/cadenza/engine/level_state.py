"""What a level remembers of a fragment between rounds: its schedule's state, its anchor, outer state and residuals.

Values are kept flat, one tensor for each precision and device, and named by parameter where they are saved or where the
parameters of the fragment change.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch

from cadenza.codecs import ChoosingCodec, Codec, ShapedCodec
from cadenza.common.checksums import checksum
from cadenza.engine.exchange import Residual
from cadenza.engine.header import Header
from cadenza.engine.layout import Layout
from cadenza.engine.outer_inputs import OuterInputs
from cadenza.engine.staged_exchange import spread_part, stage_part
from cadenza.participants.level_group import LevelGroup
from cadenza.schedules import Schedule, TimedSchedule
from cadenza.strategy import LevelPlan
from cadenza.transports import Transport
from cadenza.weighting import Weighting

__all__ = ["LevelState"]

_BEFORE = "before/"


class LevelState:
    """A level's memory of one fragment.

    Attributes:
        plan: The level's choices.
        schedule: When this fragment's rounds run.
        schedule_state: What the schedule remembers.
        weighting_state: What the weighting remembers.
        rounds: How many rounds have landed.
        choice: Which of its codecs the level writes in, where it has several.
        decision: What the last round has changed of period and codec, and why.
        anchors: What all members started from, flat.
        outer_states: What the outer update remembers, flat.
        residuals: What encoding has lost so far, where it is fed back.
        carried: What was lost and no residual can hold any more, because members or parameters have changed; it is
            added to the next difference.
        codecs: How each flat tensor is written.
        history: A hash over the rounds that have landed; empty before the first.
    """

    def __init__(self, plan: LevelPlan, schedule: Schedule, weighting: Weighting) -> None:
        self.plan = plan
        self.schedule = schedule
        self.schedule_state = schedule.start()
        self.weighting_state = weighting.start()
        self.rounds = 0
        self.choice = 0
        self.decision = ""
        self.anchors: list[torch.Tensor] = []
        self.outer_states: list[dict[str, torch.Tensor]] = []
        self.residuals: list[Residual] | None = None
        self.carried: list[torch.Tensor] | None = None
        self.codecs: list[Codec] = []
        self.warned = False  # that anchors were not the same
        self.history = ""
        self._layout: Layout | None = None
        self._group: LevelGroup | None = None

    # ---- fitting the parameters and the members --------------------------------------------------------------------

    def fit(self, layout: Layout, group: LevelGroup) -> None:
        """Make the memory fit the parameters: new ones start from their values, old ones keep what they had."""
        known = self._layout
        self._layout = layout
        if known is None or known.places != layout.places:
            self.codecs = [self._codec(layout, strip) for strip in range(len(layout.strips))]
        elif self.anchors or not self.plan.anchored:
            return
        if not self.plan.anchored:
            return
        lost = None if known is None else self._lost_so_far()
        anchors = list(layout.pack())
        outer_states = [self.plan.outer.init(anchor) for anchor in anchors]
        if known is not None:
            self._carry_over(known, layout, anchors, outer_states)
        self.anchors, self.outer_states = anchors, outer_states
        self._make_residuals(group)
        if self.plan.codec.feedback is not None and known is not None and lost is not None:
            self.carried = _moved(lost, known, layout)

    def _make_residuals(self, group: LevelGroup) -> None:
        """Start with nothing lost among the members of a group; there is no residual before they have come together."""
        self.residuals, self._group = None, None
        if not group.connected:
            return
        self._group = LevelGroup(group.plan, group.name, group.transport, group.stage)
        if self.plan.codec.feedback is not None:
            self.residuals = [self._no_losses(anchor, group) for anchor in self.anchors]

    def refit(self, group: LevelGroup) -> None:
        """Cut the residuals anew, for other members; nothing of what was lost is forgotten."""
        if self.plan.codec.feedback is None:
            return
        if not self.residuals or group.stage is not None or (self._group is not None and self._group.stage is not None):
            self.carried = self._lost_so_far()
            self._make_residuals(group)
            return
        self.fold_shares()
        for anchor, residual in zip(self.anchors, self.residuals, strict=True):
            fresh = self._no_losses(anchor, group)
            residual.share, residual.next_share = fresh.share, fresh.next_share
        self._group = LevelGroup(group.plan, group.name, group.transport, group.stage)

    def _no_losses(self, anchor: torch.Tensor, group: LevelGroup) -> Residual:
        """Return the residual of values of which nothing was lost yet."""
        sent = anchor if group.stage is None else stage_part(anchor, group.stage, self.plan.codec)
        return Residual.zeros(sent, group.way_across, self.plan.codec)

    def fold_shares(self) -> None:
        """Owe what was lost of the mean of this member's share as a difference: the next round has other members."""
        if self.residuals and self._group is not None:
            members = len(self._group.transport.members)
            lost = [members * self._where_it_lies(i, self._share_lost(i)) for i in range(len(self.residuals))]
            self.carried = _added(self.carried, lost)
            for residual in self.residuals:
                residual.share.zero_()

    def _lost_so_far(self) -> list[torch.Tensor] | None:
        """Return what encoding has lost and nobody has got yet, for this member to send again, where it lies."""
        if not self.residuals or self._group is None:
            return self.carried
        members = len(self._group.transport.members)
        found = []
        for i, residual in enumerate(self.residuals):
            # What crosses between groups is a part of their sum, in which this member counts 1 / members.
            own = residual.own * (members if self._group.reduces_inside else 1)
            found.append(self._where_it_lies(i, own + members * self._share_lost(i)))
        return _added(self.carried, found)

    def _where_it_lies(self, strip: int, sent: torch.Tensor) -> torch.Tensor:
        """Return what lies as it is sent as it lies in the anchor."""
        stage = self._group.stage if self._group is not None else None
        return sent if stage is None else spread_part(sent, self.anchors[strip], stage, self.plan.codec)

    def _share_lost(self, strip: int) -> torch.Tensor:
        """Return what encoding the mean of this member's share has lost, where it lies in what is sent."""
        assert self.residuals is not None
        assert self._group is not None
        return self.residuals[strip].spread_share(self._group.way_across, self.plan.codec)

    def restart(self, layout: Layout) -> None:
        """Start anew from the parameters' values, as if no round had been held."""
        self.go_back_to(layout)

    def go_back_to(self, anchors: Layout | Sequence[torch.Tensor]) -> None:
        """Start anew from anchors."""
        self.set_anchor(anchors)
        self.outer_states = [self.plan.outer.init(anchor) for anchor in self.anchors]
        for residual in self.residuals or ():
            residual.clear()
        self.carried = None

    def _codec(self, layout: Layout, strip: int) -> Codec:
        codec = self.codec
        return cast(ShapedCodec, codec).for_shapes(layout.shapes(strip)) if codec.shaped else codec

    @property
    def codec(self) -> Codec:
        """How the level writes now."""
        codec = self.plan.codec
        return codec.choices[self.choice] if isinstance(codec, ChoosingCodec) else codec

    # ---- rounds ----------------------------------------------------------------------------------------------------

    def learn_times(self, headers: Sequence[Header]) -> None:
        """Let codec and schedule follow what the members have measured; all of them have the same headers.

        The slowest step counts, and the shortest stall: that of whoever waited for nobody.
        """
        step_s, stall_s = max(h.step_s for h in headers), min(h.stall_s for h in headers)
        told: list[str] = []
        if step_s > 0 and stall_s > 0:
            timed, codec = self.schedule, self.plan.codec
            if isinstance(codec, ChoosingCodec) and self.rounds > 2:  # the first rounds make connections
                period = timed.comfortable if isinstance(timed, TimedSchedule) else timed.shortest_gap
                before, after = self.choice, codec.choose(self.choice, step_s, stall_s, period)
                told.append(codec.explain(before, after, step_s, stall_s, period))
                self._take_choice(after)
                stall_s = codec.stall_with(after, before, stall_s)
            if isinstance(timed, TimedSchedule):
                then, self.schedule_state = self.schedule_state, timed.learn(self.schedule_state, step_s, stall_s)
                told.append(timed.explain(then, self.schedule_state))
        self.decision = "; ".join(text for text in told if text)

    def _take_choice(self, choice: int) -> None:
        """Write in one of several codecs from now on."""
        if choice != self.choice:
            self.choice = choice
            layout = self._layout
            self.codecs = [] if layout is None else [self._codec(layout, i) for i in range(len(layout.strips))]

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
        """Start anew from values on which a larger level has agreed; momentum is kept, and what encoding has lost."""
        if isinstance(landed, Layout):
            landed.pack(self.anchors)
        else:
            for anchor, flat in zip(self.anchors, landed, strict=True):
                anchor.copy_(flat)

    def move_anchor(self, now: Sequence[torch.Tensor], before: Sequence[torch.Tensor]) -> None:
        """Move the anchor by as much as a larger level's has moved."""
        for anchor, new, old in zip(self.anchors, now, before, strict=True):
            anchor.add_(new - old)

    @torch.no_grad()
    def take_from(self, transport: Transport, *, source: int) -> list[torch.Tensor]:
        """Take anchors and outer state from one of the members; return by how much the anchors have moved."""
        tensors = [*self.anchors, *(tensor for state in self.outer_states for tensor in state.values())]
        fresh = [tensor.clone() for tensor in tensors]
        for tensor in fresh:
            transport.broadcast(tensor, source)
        moved = [new - old for new, old in zip(fresh, self.anchors, strict=False)]
        for tensor, new in zip(tensors, fresh, strict=True):  # all at once: a broadcast may fail
            tensor.copy_(new)
        return moved

    def note_round(self, headers: Sequence[Header]) -> None:
        """Count a round that has landed."""
        self.rounds += 1
        # Times are the machine's; what was averaged is the same without them.
        told = b"".join(replace(header, step_s=0.0, stall_s=0.0).pack() for header in headers)
        self.history = hashlib.blake2b(self.history.encode() + told, digest_size=8).hexdigest()

    def progress(self, layout: Layout) -> list[torch.Tensor]:
        """Return how far the parameters are from their anchor now, as differences are sent: anchor − value."""
        return [start.sub(flat) for start, flat in zip(layout.as_written(self.anchors), layout.pack(), strict=True)]

    def take(self, deltas: Sequence[torch.Tensor]) -> None:
        """Move the anchor to the mean itself, without an outer step: nobody had anything to add."""
        for anchor, delta in zip(self.anchors, deltas, strict=True):
            anchor.sub_(delta)
        self._commit()

    def update(self, deltas: Sequence[torch.Tensor], inputs: OuterInputs) -> None:
        """Make the new anchor of the mean difference."""
        assert self._layout is not None
        outer = self.plan.outer
        _clip(deltas, outer.clip, inputs.mean2)
        for i, (anchor, delta) in enumerate(zip(self.anchors, deltas, strict=True)):
            if not outer.needs_inner_lr:
                outer.update(anchor, delta, self.outer_states[i], rounds=self.rounds, **inputs.of(i))
                continue
            for name, (strip, where) in self._layout.places.items():
                if strip == i:
                    state = {key: value[where] if value.ndim else value for key, value in self.outer_states[i].items()}
                    lr = inputs.inner_lrs.get(name, 0.0)
                    more = inputs.of(i, where)
                    outer.update(anchor[where], delta[where], state, rounds=self.rounds, inner_lr=lr, **more)
        self._commit()

    def forget_own_losses(self) -> None:
        """Start with nothing lost by this worker's own encoding."""
        for residual in self.residuals or ():
            residual.own.zero_()
        self.carried = None

    def _commit(self) -> None:
        self.carried = None
        for residual in self.residuals or ():
            residual.commit()

    # ---- saving ----------------------------------------------------------------------------------------------------

    def facts(self) -> dict[str, Any]:
        """Return what is remembered besides tensors, as JSON can hold it."""
        facts: dict[str, Any] = {"schedule": self.schedule_state, "weighting": self.weighting_state}
        facts["rounds"] = self.rounds
        if isinstance(self.plan.codec, ChoosingCodec):
            facts["choice"] = self.choice
        return {**facts, "history": self.history or f"{checksum(*self.anchors):x}"}

    def set_facts(self, facts: Mapping[str, Any]) -> None:
        """Take what `facts` gave."""
        self.schedule_state, self.weighting_state = dict(facts["schedule"]), dict(facts["weighting"])
        self.rounds = facts["rounds"]
        self.history = facts["history"] if self.rounds else ""  # else it begins here as with whoever told it
        self._take_choice(facts.get("choice", 0))

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
        for i, flat in enumerate(self.carried or ()):
            yield f"carried/{i}", flat

    def load(self, shared: Mapping[str, torch.Tensor], worker: Callable[[str], torch.Tensor | None]) -> None:
        """Take saved tensors over, in place; what was not saved stays as it is."""
        carried = [worker(f"carried/{i}") for i in range(len(self.anchors))]
        fits = all(flat is not None and flat.shape == a.shape for flat, a in zip(carried, self.anchors, strict=True))
        self.carried = [torch.empty_like(anchor) for anchor in self.anchors] if carried and fits else None
        for key, tensor in self.shared_state():
            if key in shared:
                tensor.copy_(shared[key].reshape(tensor.shape))
        for key, tensor in self.worker_state():
            saved = worker(key)
            if saved is not None and saved.shape == tensor.shape:
                tensor.copy_(saved)
            else:
                tensor.zero_()

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


def _clip(deltas: Sequence[torch.Tensor], limit: float | None, norm2: float) -> None:
    if limit is not None and math.sqrt(norm2) > limit:
        for delta in deltas:
            delta.mul_(limit / math.sqrt(norm2))


def _added(one: list[torch.Tensor] | None, other: list[torch.Tensor]) -> list[torch.Tensor]:
    return other if one is None else [a + b for a, b in zip(one, other, strict=True)]


def _moved(flats: Sequence[torch.Tensor], then: Layout, now: Layout) -> list[torch.Tensor]:
    """Return flat values of one layout as they lie in another; zeros for parameters that are new."""
    found = [torch.zeros(strip.numel, dtype=strip.dtype, device=strip.device) for strip in now.strips]
    for name, (strip, where) in now.places.items():
        if name in then.places:
            old_strip, old_where = then.places[name]
            found[strip][where] = flats[old_strip][old_where]
    return found

"""This worker's copy of the model, with all that is remembered of it between rounds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from cadenza.common.messages import unit_of
from cadenza.common.streams import SideStreams
from cadenza.engine.assignment import assign
from cadenza.engine.balance import Balance
from cadenza.engine.collectives import average_tensors, take_from_first
from cadenza.engine.host_copies import HostCopies
from cadenza.engine.layout import Layout, SpareMemory
from cadenza.engine.level_state import LevelState
from cadenza.engine.model_view import ModelView, named
from cadenza.engine.pacing import Pace
from cadenza.engine.place import Place
from cadenza.engine.rewrites import ModelRewrites
from cadenza.engine.run_state import RunState
from cadenza.engine.side_values import SideValues
from cadenza.errors import UnsupportedTensorError
from cadenza.participants.base import Participants
from cadenza.strategy import Strategy
from cadenza.transports import Transport

__all__ = ["Replica"]


class Replica:
    """The model as rounds see it: cut into fragments, laid out flat, with a memory for each level.

    Attributes:
        view: The model and its optimizers.
        strategy: What is done with it.
        participants: Who trains it together.
        state: What the run remembers.
        spare: Memory that rounds use again.
        streams: Where devices do what is done beside training.
        copies: Between parameters on devices and host memory.
    """

    def __init__(self, view: ModelView, strategy: Strategy, participants: Participants) -> None:
        self.view, self.strategy, self.participants = view, strategy, participants
        self.state = RunState(Balance(strategy), Pace(strategy))
        self.spare = SpareMemory()
        self.streams = SideStreams()
        self.copies = HostCopies(self.streams)
        self.weighting = strategy.weighting
        self.rewrites = ModelRewrites(view.inner)
        self._home = torch.device("cpu") if strategy.offload else None
        blocks = [unit_of(plan.codec) for plan in strategy.levels if plan.codec.aligned]
        self._align = math.lcm(*blocks)

    def fragments(self) -> list[list[str]]:
        """Return the names of each fragment's parameters, now; a parameter keeps its fragment for good."""
        state = self.state
        sizes = [(name, p.numel() * p.element_size()) for name, p in self.view.parameters().items()]
        if any(name not in state.fragments for name, _ in sizes):
            state.fragments, state.fragment_count = assign(
                self.strategy.fragments, sizes, state.fragments, state.fragment_count
            )
        found: list[list[str]] = [[] for _ in range(state.fragment_count)]
        for name, _ in sizes:
            found[state.fragments[name]].append(name)
        return found

    def layout(self, fragment: int) -> Layout:
        """Return how a fragment's parameters that have one history on all ranks lie in flat tensors, now."""
        self.view.settle()
        names = [name for name in self.fragments()[fragment] if name in self.state.known]
        layout = self.layout_of(named(self.view.parameters(), names))
        ranked = self.participants.always_together  # elsewhere members are workers, not ranks
        for level in (level for level in self.participants.levels if level.connected and ranked):
            layout.fragment.refuse_mesh_overlap(level.transport.members, level.this_rank)
        return layout

    def layout_of(self, tensors: Mapping[str, torch.Tensor]) -> Layout:
        """Return how some tensors lie in flat ones, whether or not they are trained now."""
        return Layout(tensors, home=self._home, align=self._align, copies=self.copies)

    def side_values(self, names: Sequence[str], *, buffers: bool) -> SideValues:
        """Copy what a round averages beside parameters: the optimizer's state of the named ones, and buffers."""
        view, strategy = self.view, self.strategy
        which = strategy.buffers if buffers else False
        parts: dict[str, Callable[[], Layout]] = {}
        if view.float_buffers(which):
            parts["buffers"] = lambda: self.layout_of(view.float_buffers(which))
        if strategy.optimizer_state == "average":
            if problem := view.state_without_mean(names):
                raise UnsupportedTensorError(problem[0].upper() + problem[1:])
            parts["optimizer state"] = lambda: self.layout_of(view.optimizer_tensors(names))
        return SideValues(parts, lambda: view.counters(which))

    def level_state(self, level: int, fragment: int) -> LevelState:
        """Return what a level remembers of a fragment."""
        known = self.state.levels
        if (level, fragment) not in known:
            schedule = self.strategy.schedules_of(fragment, self.state.fragment_count)[level]
            known[level, fragment] = LevelState(self.strategy.levels[level], schedule, self.weighting)
        return known[level, fragment]

    def check_turns(self) -> None:
        """Refuse more fragments than can take turns, before anything is changed."""
        count = len(self.fragments())
        for fragment in range(count):
            self.strategy.schedules_of(fragment, count)

    def fit_levels(self) -> None:
        """Let every level take its anchors from the parameters, where it has none yet."""
        for fragment in range(len(self.fragments())):
            layout = self.layout(fragment)
            for number, group in enumerate(self.participants.levels):
                self.level_state(number, fragment).fit(layout, group)

    def anchor_here(self) -> None:
        """Let every level's anchors be the parameters as they are now."""
        self.know_all()
        self.fit_levels()
        for (_, fragment), state in self.state.levels.items():
            state.set_anchor(self.layout(fragment))

    @torch.no_grad()
    def take_anchors(self) -> None:
        """Give the parameters the values on which all have agreed: the outermost anchors that there are."""
        for (_, fragment), state in sorted(self.state.levels.items(), key=lambda item: item[0]):
            self.layout(fragment).unpack(state.anchors)

    def start_from_anchors(self) -> None:
        """Forget this worker's own progress: rounds in flight, and what the parameters have moved since."""
        self.state.pending.clear()
        self.take_anchors()

    def restart(self) -> None:
        """Take the model's values, the first rank's on all, for the start of everything: no round was held yet."""
        self.state.wait_for_pending()
        self.state.pending.clear()
        self.take_from_first(self.participants.levels[-1].transport)
        for (_, fragment), state in self.state.levels.items():
            state.restart(self.layout(fragment))
        self.rewrites.forgive()

    @property
    def has_history(self) -> bool:
        """Whether rounds rely on values that parameters had before."""
        return bool(self.state.pending) or any(state.anchors for state in self.state.levels.values())

    def place(self) -> Place:
        """Return where this rank stands among the workers."""
        return Place.of(self.view, self.participants.levels[-1])

    def know_all(self) -> None:
        """Note that all ranks hold the same values of everything that takes part."""
        self.state.known.update(name for names in self.fragments() for name in names)

    def welcome(self, fragment: int) -> None:
        """Let a fragment's parameters that are new start from one value on all ranks, their mean, as every anchor does.

        All ranks do this before a round in which all meet, so that ranks that do not agree on what is new are found out
        by its header. Where workers come and go, a round's fingerprint finds a change.
        """
        new = [name for name in self.fragments()[fragment] if name not in self.state.known]
        if not new:
            return
        if not self.participants.always_together:
            self.know_all()
            return
        self.state.wait_for_pending()
        outermost = self.participants.levels[-1]
        tensors = named(self.view.parameters(), new)
        average_tensors(outermost.transport, tensors, step=self.state.moment, what="new parameter")
        self.state.known.update(new)

    # ---- what workers share (SharedState) --------------------------------------------------------------------------

    def take_from_first(self, transport: Transport) -> None:
        """Give the whole model the values that the first member of a transport has."""
        take_from_first(transport, self.view.everything())

    def refit(self, level: int) -> None:
        """Make what is kept between rounds of a level fit the members that have come together now."""
        if not self.state.known:
            self.know_all()
        self.fit_levels()
        for fragment in range(len(self.fragments())):
            self.level_state(level, fragment).refit(self.participants.levels[level])

    def shared_tensors(self) -> dict[str, torch.Tensor]:
        """Return anchors, outer state and what is not trained, by name, in one order."""
        found: dict[str, torch.Tensor] = {}
        for (number, fragment), state in sorted(self.state.levels.items()):
            for i, anchor in enumerate(state.anchors):
                found[f"{number}/{fragment}/{i}/anchor"] = anchor
            for i, outer in enumerate(state.outer_states):
                for key in sorted(outer):
                    found[f"{number}/{fragment}/{i}/outer/{key}"] = outer[key]
        trained = self.view.parameters().keys()
        for name, tensor in self.view.everything().items():
            if name not in trained and tensor.numel():
                found[f"model/{name}"] = tensor
        return found

    def shared_facts(self) -> dict[str, Any]:
        """Return the clock and the schedules' state."""
        levels = {
            f"{number}/{fragment}": state.facts() | {"history": state.history}
            for (number, fragment), state in self.state.levels.items()
        }
        return {"clock": self.state.clock, "levels": levels}

    @torch.no_grad()
    def adopt(self, facts: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], *, new: bool, level: int) -> None:
        """Take the others' state; own progress since the last common anchor is kept: x ← anchor_new + (x − anchor_old).

        So the work of a worker that comes back counts in the next round, unless it is not finite. At levels inside the
        one whose round it is, a worker that is not new shares a state with its site: those anchors move by as much.
        """
        self.state.pending.clear()
        self.copies.wait()
        own = self._own_tensors()
        taken = 0 if new else level  # from this level on
        fragments = range(self.state.fragment_count)
        progress = {} if new else {fragment: self._progress(level, fragment) for fragment in fragments}
        before = {f: [a.clone() for a in self.level_state(level, f).anchors] for f in fragments if taken}
        for name, tensor in self.shared_tensors().items():
            kind = name.partition("/")[0]
            if new or (name not in own if kind == "model" else int(kind) >= taken):
                tensor.copy_(tensors[name].view(tensor.shape))
        for key, told in facts["levels"].items():
            number, fragment = map(int, key.split("/"))
            state = self.state.levels[number, fragment]
            if number >= taken:
                state.set_facts(told)
            else:
                state.move_anchor(self.level_state(level, fragment).anchors, before[fragment])
                state.schedule_state = dict(told["schedule"])
        for fragment in fragments:
            layout, anchors = self.layout(fragment), self.level_state(taken, fragment).anchors
            moved = progress.get(fragment)
            bad = moved is None or not all(bool(flat.isfinite().all()) for flat in moved)
            if self.participants.levels[level].island.loop.any(bad) or moved is None:
                layout.unpack(self.level_state(0, fragment).anchors)
            else:
                layout.unpack([flat.add_(anchor) for flat, anchor in zip(moved, anchors, strict=True)])
        self.state.clock = facts["clock"]

    def _own_tensors(self) -> set[str]:
        """Return which of the shared tensors a worker that comes back keeps: buffers that rounds do not average."""
        which = self.strategy.buffers
        averaged = {*self.view.float_buffers(which), *self.view.counters(which)}
        return {f"model/{name}" for name in self.view.everything() if name not in averaged}

    def _progress(self, number: int, fragment: int) -> list[torch.Tensor]:
        """Return how far the parameters are from a level's anchor."""
        state = self.state.levels[number, fragment]
        layout = self.layout(fragment)
        flats, start = layout.pack(), layout.as_written(state.anchors)
        return [flat.sub_(anchor) for flat, anchor in zip(flats, start, strict=True)]

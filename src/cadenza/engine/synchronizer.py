"""`attach` a strategy to a model; the `Synchronizer` that it returns runs it: one `step()` after every optimizer step.

Every round is launched, then landed. A launch takes copies of the values and sends them on their way, in a thread of
its own if the strategy has a delay; a landing waits for the result and changes the parameters, in place. The clock is
`step()`: the rules for when a round runs are pure functions of it, so all ranks decide alike.
"""

from __future__ import annotations

import math
import struct
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist

from cadenza.engine import run_state as state
from cadenza.engine.balance import Balance
from cadenza.engine.exchange import Exchanged
from cadenza.engine.header import Header
from cadenza.engine.in_place_mean import Passage, open_round, run_round
from cadenza.engine.level_group import LevelGroup, build_levels
from cadenza.engine.level_state import Layout, Spare, Track
from cadenza.engine.model_view import ModelView, named
from cadenza.engine.pending import Flight, carry
from cadenza.engine.preflight import check_door
from cadenza.engine.warm_up import covers, fall_silent, widen
from cadenza.errors import CadenzaError, NotFiniteError
from cadenza.faults import Shrink, SkipRound
from cadenza.observers import Observer, notify
from cadenza.participants.elastic import Company, Lost
from cadenza.participants.membership import Call, Membership, join
from cadenza.reports import RoundReport
from cadenza.schedules import largest_due, staggered_levels
from cadenza.strategy import Strategy
from cadenza.topology import Topology
from cadenza.transports import process_group_of
from cadenza.transports.c10d_group import group_of
from cadenza.transports.group import Group
from cadenza.version import __version__

__all__ = ["Synchronizer", "attach"]

_LAST_ATTEMPTS = 3


def attach(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    strategy: Strategy,
    *,
    observers: Sequence[Observer] = (),
    topology: Topology | None = None,
    process_group: dist.ProcessGroup | Group | None = None,
    membership: Membership | None = None,
    auto: bool = False,
    scaler: torch.amp.GradScaler | None = None,
) -> Synchronizer:
    """Run a strategy on a model: all ranks call this, with the same model and strategy, after `init_process_group`.

    The model's class and its parameters' names stay as they are. All ranks start from the values of the first.

    Args:
        model: The model, also wrapped in DistributedDataParallel, sharded by FSDP2, or compiled.
        optimizer: The inner optimizer, or several.
        strategy: What to do, for instance `cadenza.diloco()`.
        observers: What gets a `RoundReport` for every round.
        topology: With whom, if the strategy's own `groups` do not say it: one level for each of the strategy's.
        process_group: The ranks that train together; None means everyone. In `cadenza.testing.workers`, all workers.
        membership: Under `skip_round` and `shrink`, this worker's place in the job (`cadenza.join`), instead of a
            process group: none needs to be initialised. By default it is made from the environment.
        auto: Call `step()` by itself after every step of the (last) optimizer, for loops that a framework owns.
        scaler: With `auto`, the GradScaler, at whose `update` the clock ticks instead: it may skip optimizer steps.

    >>> import torch, torch.distributed as dist, cadenza
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> sync = cadenza.attach(model, optimizer, cadenza.local_sgd(period=4))
    >>> for _ in range(8):
    ...     model(torch.ones(2)).backward()
    ...     optimizer.step(); optimizer.zero_grad()
    ...     sync.step()
    >>> sync.finish()
    >>> dist.destroy_process_group()
    """
    if not isinstance(strategy, Strategy):
        raise TypeError(
            f"A cadenza.Strategy is required, for instance cadenza.diloco(); got {type(strategy).__name__}."
        )
    optimizers = list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
    view = ModelView(model, optimizers)
    if strategy.faults.tolerant:
        view.refuse_what_cannot_work(strategy)
        company = _company(view, strategy, membership, given={"topology": topology, "process_group": process_group})
        return Synchronizer(
            view, strategy, [company.level], observers=observers, auto=auto, scaler=scaler, company=company
        )
    if membership is not None:
        raise ValueError(
            "membership belongs to faults=skip_round() or shrink(); this strategy raises at the first fault."
        )
    group = group_of(process_group)
    check_door(group, terms=f"{strategy.describe()}; Cadenza {__version__}", model=view.describe())
    view.refuse_what_cannot_work(strategy)
    levels = build_levels(strategy, group, topology)
    return Synchronizer(view, strategy, levels, observers=observers, auto=auto, scaler=scaler)


def _company(
    view: ModelView, strategy: Strategy, membership: Membership | None, *, given: Mapping[str, object]
) -> Company:
    if named_ := [name for name, value in given.items() if value is not None]:
        raise ValueError(
            f"{named_[0]} belongs to faults=raise_error(): under skip_round and shrink workers come and go, and meet "
            "through membership=cadenza.join(…)."
        )
    assert isinstance(strategy.faults, SkipRound | Shrink)
    terms = "; ".join([strategy.describe(), f"Cadenza {__version__}", *view.describe()])
    return Company(membership or join(), strategy.faults, strategy.levels[0], terms)


class Synchronizer:
    """A strategy at work on a model; made by `attach`.

    As a context manager it calls `finish` at the end of the block, but starts no collective when an exception leaves
    it.

    >>> import torch, torch.distributed as dist, cadenza
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with cadenza.attach(model, optimizer, cadenza.diloco(period=4)) as sync:
    ...     for _ in range(8):
    ...         model(torch.ones(2)).backward()
    ...         optimizer.step(); optimizer.zero_grad()
    ...         sync.step()
    >>> sync.clock
    8
    >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        view: ModelView,
        strategy: Strategy,
        levels: Sequence[LevelGroup],
        *,
        observers: Sequence[Observer],
        auto: bool,
        scaler: torch.amp.GradScaler | None,
        company: Company | None = None,
    ) -> None:
        self.strategy = strategy
        self.observers = list(observers)
        self.clock = 0
        self._view = view
        self._levels = list(levels)
        self._tracks: dict[tuple[int, int], Track] = {}
        self._flights: dict[int, Flight] = {}
        self._spare = Spare()
        self._courier = ThreadPoolExecutor(1, thread_name_prefix="cadenza") if strategy.delay else None
        self._home = torch.device("cpu") if strategy.offload else None
        self._known: set[str] = set()  # parameters that have one history on all ranks
        self._count = 0  # fragments, as of the last look at the model
        self._samples = 0.0
        self._counted: dict[int, float] = {}
        self._level_at: dict[int, int] = {}  # when all ranks last held equal values of a fragment
        self._exhausted = False
        self._all_exhausted = False
        self._gradients_averaged = False
        self._balance = Balance(strategy)
        self._open = True
        self._hooks: list[Callable[[], None]] = []
        self._company = company
        self._phase = 0  # counts the attempts of the last round
        self._check_turns()
        if auto and strategy.weight == "samples":
            raise ValueError(
                'weight="samples" needs sync.step(samples=…) in the loop, and auto=True calls step() without it: use '
                "auto=False, another weight, or a function that says how much this worker counts."
            )
        if company is None:
            self._begin()
        else:
            try:
                self._join(company)
            except BaseException:
                company.close()
                raise
        if auto:
            self._hook_optimizer(scaler)
        elif scaler is not None:
            raise ValueError("scaler belongs to auto=True; without it, call sync.step() after scaler.update().")

    # ---- what users call -------------------------------------------------------------------------------------------

    @property
    def next_round(self) -> int | None:
        """The clock's step at which the next round will be launched, as far as it is known; None in the warm-up."""
        if self.clock < self.strategy.warmup_steps or not self._tracks:
            return None
        return self.strategy.warmup_steps + min(int(track.schedule_state["next"]) for track in self._tracks.values())

    @property
    def members(self) -> tuple[int, ...]:
        """The workers that held the last round together, ascending; under `raise_error`, all ranks."""
        return tuple(self._levels[-1].transport.members) if self._company is None else self._company.last

    @property
    def behind(self) -> bool:
        """Whether rounds were, or may have been, held without this worker: it comes to the next one."""
        return self._company is not None and self._company.behind

    def step(self, *, samples: float | None = None) -> None:
        """Count one optimizer step, land what is due, launch what is due.

        Args:
            samples: How many samples the step has used; required where the strategy weighs by samples.
        """
        self._check_open()
        if samples is None and self.strategy.weight == "samples" and not self._exhausted:
            raise ValueError(
                'The strategy has weight="samples", but this step does not say how many it has used: call '
                "sync.step(samples=len(batch)) after every optimizer step, or leave the weight uniform."
            )
        self.clock += 1
        self._samples += samples or 0.0
        if self._company is not None and (call := self._company.summons(self.clock)):
            self._answer(call)
            return
        if self.clock <= self.strategy.warmup_steps:
            self._count_warmup_step()
            return
        for fragment in [f for f, flight in self._flights.items() if flight.land_at <= self.clock]:
            flight = self._flights.pop(fragment)
            self._track(flight.level, fragment).learn_drift(self._land(flight))
        n = self._balance.tick(self.clock - self.strategy.warmup_steps)
        if n is not None:
            self._launch_due(n)

    def average_gradients(self) -> None:
        """Average the gradients during the warm-up, after backward and before unscaling or clipping; later do nothing.

        Under DistributedDataParallel it is not needed: DDP does it.
        """
        self._check_open()
        if self.clock >= self.strategy.warmup_steps or self._view.ddp is not None:
            return
        gradients = {name: p.grad for name, p in self._view.parameters().items() if p.grad is not None}
        self._levels[-1].average(gradients, step=self._moment)
        self._gradients_averaged = True

    def drain(self) -> None:
        """Answer rounds with weight 0, for a worker that has run out of data, until all workers have.

        A round that finds all workers without data takes their plain mean, without an outer step. During the warm-up
        every worker has gradients to average: whoever calls this then makes all ranks raise.
        """
        self._check_open()
        if self.clock < self.strategy.warmup_steps:
            self._refuse_to_drain()
        self._exhausted = True
        while not self._all_exhausted:
            self._balance.quota = 1
            self.step()

    def finish(self) -> None:
        """Land what is in flight, run one last global round, and close: all ranks end with equal parameters.

        The last round is one like the others, outer step and momentum included, also if its period was cut short. There
        is none where all have just met.
        """
        self._check_open()
        if self.strategy.balanced:
            self.drain()  # the others may have more periods to go
        self._land_all()
        last = len(self._levels) - 1
        if self._company is not None:
            self._end_together(self._company)
        elif self.clock > self.strategy.warmup_steps:
            for fragment in range(len(self._fragments())):
                if self._level_at.get(fragment) != self.clock:
                    self._run(last, fragment, delay=0, alpha=0.0)
        self.close()

    @contextmanager
    def averaged(self) -> Iterator[torch.nn.Module]:
        """Give the model the mean of all workers' parameters inside the block, and their own back after it.

        All ranks enter and leave together. Rounds in flight stay in flight. Under `skip_round` and `shrink` it is what
        the last rounds have agreed on, the anchor, and nothing is sent.
        """
        self._check_open()
        self._wait_for_courier()
        self._view.settle()
        tensors: dict[str, torch.Tensor] = {**self._view.parameters()}
        if self.strategy.buffers:
            tensors |= self._view.float_buffers()
        kept = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        try:
            if self._company is None:
                self._levels[-1].average(tensors, step=self._moment)
            else:
                self._take_anchors()
            yield self._view.model
        finally:
            self._view.settle()
            with torch.no_grad():
                for name, tensor in tensors.items():
                    tensor.copy_(kept[name])

    def state_dict(self) -> dict[str, torch.Tensor | str]:
        """Return what this worker needs to go on from here: a flat dict of tensors and JSON.

        It is local, never a collective; it waits for rounds in flight but lands none, so the trajectory stays as it is.
        """
        return state.state_dict(self)

    def load_state_dict(self, saved: Mapping[str, torch.Tensor | str]) -> None:
        """Go on from a saved state, at any step; restore the model and the optimizer beside it (`cadenza.checkpoint`).

        As many workers as saved resume bit for bit, each from its own state. Another number takes the dicts of all
        workers, merged: worker j goes on from entry j mod N. What does not fit is refused before anything is changed.
        """
        state.load_state_dict(self, saved)

    def close(self) -> None:
        """Let go of threads, hooks and groups without any collective; parameters stay as they are."""
        if not self._open:
            return
        self._open = False
        for remove in self._hooks:
            remove()
        if self._courier is not None:
            self._courier.shutdown(wait=False, cancel_futures=True)
        self._flights.clear()
        if self._company is not None:
            self._company.close()
            return
        for level in self._levels:
            level.abandon()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None and self._open:
            self.finish()
        else:
            self.close()

    # ---- launching and landing -------------------------------------------------------------------------------------

    def _launch_due(self, n: int, *, after: int = -1) -> None:
        fragment = after
        while (fragment := fragment + 1) < self._count:  # a round may find that there are more
            tracks = [self._track(level, fragment) for level in range(len(self._levels))]
            due = [track.schedule.is_due(n, track.schedule_state) for track in tracks]
            level = largest_due(due)
            if level is None:
                continue
            if fragment in self._flights:  # a delay that a changing period has overtaken
                self._land(self._flights.pop(fragment))
            drift = self._run(level, fragment, delay=self.strategy.delay, alpha=self.strategy.alpha)
            for track, was_due in zip(tracks, due, strict=True):
                if was_due:
                    track.count_round(n, drift)

    def _run(self, number: int, fragment: int, *, delay: int, alpha: float) -> float | None:
        """Launch a round and, without a delay, land it; return its drift if that is known already."""
        started = time.perf_counter()
        level = self._levels[number]
        if self._company is not None and not self._gather(self._company, fragment):
            return None
        if level.alone and not level.plan.anchored and number < len(self._levels) - 1:
            return 0.0  # nobody to meet, and nothing to remember
        layout = self._layout(fragment)
        if not delay and not level.plan.anchored and level.stage is None:
            return self._average_now(number, fragment, layout)
        flight = self._launch(number, fragment, layout, delay, alpha)
        flight.stall_s = time.perf_counter() - started
        if delay:
            self._flights[fragment] = flight
            return None
        return self._land(flight)

    @torch.no_grad()
    def _launch(self, number: int, fragment: int, layout: Layout, delay: int, alpha: float) -> Flight:
        level, track = self._levels[number], self._track(number, fragment)
        track.fit(layout, level.transport, level.stage)
        flight = Flight(
            number,
            fragment,
            step=self.clock,
            land_at=self.clock + delay,
            layout=layout,
            values=layout.pack(self._spare.borrow(layout)),
            alpha=0.0 if level.plan.outer.plain else alpha,
            inner_lrs=self._view.inner_lrs(),
            samples=self._samples,
            call=Call(self.clock, self._phase, fragment),
        )
        weight, problem = self._weight(number, fragment)
        go = partial(
            carry,
            flight,
            level,
            track,
            self._header(layout, number, fragment, weight),
            problem=problem,
            measure=self.strategy.measures_drift and not self.strategy.balanced,
            normalise=self.strategy.balanced,
            company=self._company,
        )
        if self._courier is not None and delay:
            flight.passage = self._courier.submit(go)
        else:
            self._wait_for_courier()
            flight.passage.set_result(go())
        return flight

    def _land(self, flight: Flight) -> float | None:
        started = time.perf_counter()
        level, track = self._levels[flight.level], self._track(flight.level, flight.fragment)
        passage = flight.passage.result()
        if not isinstance(passage, Passage):
            self._lose(flight, passage)
            return None
        landed = track.anchors if level.plan.anchored else flight.values
        flight.write(landed)
        track.rounds += 1
        self._after_landing(flight, landed, passage)
        for used in (flight.values, flight.origins or ()):
            self._spare.give_back(used)
        if self._company is not None:
            self._company.landed(flight.call, passage)
        flight.stall_s += time.perf_counter() - started
        self._report(flight, passage)
        return flight.drift

    def _average_now(self, number: int, fragment: int, layout: Layout) -> float | None:
        """Average the fragment in place, bucket by bucket: no copies, so only the lanes are extra memory."""
        started = time.perf_counter()
        self._wait_for_courier()
        level, track = self._levels[number], self._track(number, fragment)
        norm2 = layout.fragment.norm2()
        weight, problem = self._weight(number, fragment)
        problem = problem or self._not_finite(layout, norm2)
        if level.alone and problem is not None:
            raise NotFiniteError(problem)
        header = replace(self._header(layout, number, fragment, weight), norm2=norm2)
        spread = self.strategy.measures_drift
        with torch.no_grad():
            passage = run_round(layout.fragment, level.transport, header, problem=problem, spread=spread)
        track.rounds += 1
        flight = Flight(number, fragment, self.clock, self.clock, layout, samples=self._samples)
        self._after_landing(flight, layout, passage)
        flight.drift = math.sqrt(passage.spread2 / max(layout.fragment.norm2(), 1e-300)) if spread else None
        flight.stall_s = time.perf_counter() - started
        self._report(flight, passage)
        return flight.drift

    def _after_landing(self, flight: Flight, landed: Layout | Sequence[torch.Tensor], passage: Passage) -> None:
        """Bring what depends on the parameters up to date: inner anchors, buffers, optimizer state, counts."""
        number, fragment, layout = flight.level, flight.fragment, flight.layout
        for inner in range(number):
            track = self._track(inner, fragment)
            if track.plan.anchored:
                track.fit(layout, self._levels[inner].transport, self._levels[inner].stage)
                track.set_anchor(landed)
        level = self._levels[number]
        if self.strategy.buffers and fragment == 0:
            level.average(self._view.float_buffers(), step=self._moment)
            level.take_largest(self._view.counters())
        if self.strategy.optimizer_state == "average":
            level.average(self._view.optimizer_tensors(layout.names), step=self._moment)
        elif self.strategy.optimizer_state == "reset":
            self._view.reset_optimizer_state(layout.names)
        elif level.plan.outer.needs_inner_lr:
            self._view.reset_momentum(layout.names)
        if flight.poisoned:
            self._view.reset_optimizer_state(layout.names)
            for residual in self._track(number, fragment).residuals or ():
                residual.own.zero_()
        for inner in range(number + 1):
            self._counted[self._ledger(inner, fragment)] = flight.samples
        self._balance.learn(passage.headers, level.transport.position)
        if number == len(self._levels) - 1:
            self._all_exhausted = all(header.exhausted for header in passage.headers)
            if not flight.alpha and not flight.late:
                self._level_at[fragment] = self.clock

    # ---- rounds that may fail --------------------------------------------------------------------------------------

    def _join(self, company: Company) -> None:
        """Start together with the others, or come to their next round if they have begun."""
        if company.start(self):
            return
        tried: Call | None = None
        while company.new:
            tried = company.await_call(after=tried)
            self._answer(tried)

    def _answer(self, call: Call) -> None:
        """Come to a round to which the others are called, at whatever step this worker is, and go on from theirs."""
        self.clock = call.step
        n = self.clock - self.strategy.warmup_steps
        if call.phase:
            self._run_last(range(call.fragment, self._count), call.phase)
            return
        drift = self._run(0, call.fragment, delay=self.strategy.delay, alpha=self.strategy.alpha)
        self._track(0, call.fragment).count_round(n, drift)
        self._launch_due(n, after=call.fragment)

    def _gather(self, company: Company, fragment: int) -> bool:
        """Come together with the others for a round; False if there is nothing more to do for it."""
        started = time.perf_counter()
        self._wait_for_courier()
        layout = self._layout(fragment)
        level = bool(self._phase) and self._level_at.get(fragment) == self.clock
        call = Call(self.clock, self._phase, fragment)
        found = company.gather(self, call, layout.fragment.digest.hex(), level=level)
        if isinstance(found, Lost):
            flight = Flight(0, fragment, self.clock, self.clock, layout, call=call)
            flight.stall_s = time.perf_counter() - started
            self._lose(flight, found)
            return False
        if found.level:  # the others hold the result of this step's round already
            layout.unpack(self._track(0, fragment).anchors)
            self._level_at[fragment] = self.clock
            return False
        return True

    def _lose(self, flight: Flight, lost: Lost) -> None:
        """Report a round that failed; a worker whose own values were the reason starts anew from the anchor."""
        if flight.poisoned or lost.poisoned:
            flight.layout.unpack(self._track(flight.level, flight.fragment).anchors)
            self._view.reset_optimizer_state(flight.layout.names)
        self._notify(
            flight,
            Exchanged(),
            weights=(),
            participants=(),
            reason=lost.reason,
            absent=lost.absent,
            kind="failed",
        )

    def _end_together(self, company: Company) -> None:
        """Run the last round until it succeeds, a few times; whatever happens, end with what was agreed on."""
        for phase in range(1, _LAST_ATTEMPTS + 1):
            company.await_store()
            if self._run_last(range(len(self._fragments())), phase):
                company.finished()
                return
        company.warn("The last round failed; this worker ends with what was agreed on before it.")
        self._take_anchors()

    def _run_last(self, fragments: Iterable[int], phase: int) -> bool:
        self._phase = phase
        try:
            self._land_all()
            for fragment in fragments:
                self._run(0, fragment, delay=0, alpha=0.0)
        finally:
            self._phase = 0
        return all(self._level_at.get(fragment) == self.clock for fragment in fragments)

    @torch.no_grad()
    def _take_anchors(self) -> None:
        """Give the parameters the values on which all have agreed."""
        for (_, fragment), track in self._tracks.items():
            self._layout(fragment).unpack(track.anchors)

    def _land_all(self) -> None:
        """Land what is in flight."""
        for fragment in sorted(self._flights):
            self._land(self._flights.pop(fragment))

    def _reseat(self) -> None:
        """Make what is kept between rounds fit the members that have come together now."""
        for fragment in range(len(self._fragments())):
            track = self._track(0, fragment)
            track.fit(self._layout(fragment), self._levels[0].transport)
            track.reseat(self._levels[0].transport)

    # ---- the pieces of a round -------------------------------------------------------------------------------------

    def _fragments(self) -> list[list[str]]:
        """Return the names of each fragment's parameters, now."""
        sizes = [(name, p.numel() * p.element_size()) for name, p in self._view.parameters().items()]
        fragments = self.strategy.fragments.split(sizes)
        self._count = len(fragments)
        return fragments

    def _layout(self, fragment: int) -> Layout:
        self._view.settle()
        names = self._fragments()[fragment]
        self._welcome(names)
        layout = Layout(named(self._view.parameters(), names), home=self._home)
        for level in self._levels if self._company is None else ():
            layout.fragment.refuse_mesh_overlap(level.transport.members, level.this_rank)
        return layout

    def _welcome(self, names: Sequence[str]) -> None:
        """Let parameters that are new, or trained for the first time, start from one value on all ranks: their mean."""
        new = [name for name in names if name not in self._known]
        self._known.update(new)
        if self._company is not None:
            return  # they start from one value with everything else; the meetings' fingerprint finds a change
        if new and self.clock > self.strategy.warmup_steps:
            self._wait_for_courier()
            self._levels[-1].average(named(self._view.parameters(), new), step=self._moment)

    def _check_turns(self) -> None:
        """Refuse more fragments than can take turns, before anything is changed."""
        count = len(self._fragments())
        for fragment in range(count if count > 1 else 0):
            staggered_levels([plan.schedule for plan in self.strategy.levels], fragment, count)

    @property
    def _moment(self) -> int:
        """What ranks call the present: the clock or, where they take unequal numbers of steps, the period."""
        return self._balance.periods if self.strategy.balanced else self.clock

    def _ledger(self, level: int, fragment: int) -> int:
        return fragment * len(self._levels) + level

    def _track(self, level: int, fragment: int) -> Track:
        if (level, fragment) not in self._tracks:
            schedules = [plan.schedule for plan in self.strategy.levels]
            turns = staggered_levels(schedules, fragment, self._count) if self._count > 1 else schedules
            self._tracks[level, fragment] = Track(self.strategy.levels[level], turns[level], self._spare)
        return self._tracks[level, fragment]

    def _header(self, layout: Layout, level: int, fragment: int, weight: float) -> Header:
        digest = bytes(a ^ b for a, b in zip(layout.fragment.digest, struct.pack("<qq", level, fragment), strict=True))
        return Header(
            self._moment,
            digest,
            able=True,
            exhausted=self._exhausted,
            weight=weight,
            speed=self._balance.speed(),
            steps=self._balance.steps,
        )

    def _weight(self, level: int, fragment: int) -> tuple[float, str | None]:
        """Return this worker's weight, and what is wrong with it if something is."""
        if self._exhausted or (self._company is not None and self._company.idle):
            return 0.0, None
        if self.strategy.weight == "samples":
            weight = self._samples - self._counted.get(self._ledger(level, fragment), 0.0)
        elif callable(self.strategy.weight):
            weight = float(self.strategy.weight())
        else:
            return 1.0, None
        if math.isfinite(weight) and weight >= 0:
            return weight, None
        return 0.0, f"the weight is {weight}, and must be a number that is not negative."

    def _not_finite(self, layout: Layout, norm2: float) -> str | None:
        if layout.fragment.problem is not None:
            return layout.fragment.problem
        if math.isfinite(norm2):
            return None
        which = layout.fragment.first_not_finite() or "the difference from the anchor"
        return f"{which} is not finite (NaN or infinity) at step {self.clock}."

    def _report(self, flight: Flight, passage: Passage) -> None:
        self._notify(
            flight,
            passage.exchanged,
            wire_s=passage.wire_s,
            drift=flight.drift,
            weights=tuple(passage.weights),
            participants=passage.members or tuple(self._levels[flight.level].transport.members),
            reason="" if self._company is None else self._company.left_out(passage),
        )

    def _notify(self, flight: Flight, done: Exchanged, **figures: Any) -> None:
        """Tell the observers of a round."""
        level = self._levels[flight.level]
        report = RoundReport(
            step=flight.step,
            level=flight.level,
            level_name=level.name,
            fragment=flight.fragment,
            fragment_name=f"fragment {flight.fragment}",
            bytes_sent=done.bytes_sent,
            encoded_bytes=done.encoded_bytes,
            raw_bytes=done.raw_bytes,
            stall_s=flight.stall_s,
            delay=self.clock - flight.step,
            codec=level.plan.codec.name,
            codec_error=math.sqrt(done.error2 / done.norm2) if done.norm2 else None,
            **{"wire_s": 0.0, "drift": None, **figures},
        )
        notify(self.observers, report)

    def _refuse_to_drain(self) -> None:
        """Let all ranks raise, also those that wait for this worker's gradients, unless it is DDP that waits."""
        problem = (
            f"this worker ran out of data at step {self.clock} of the warm-up ({self.strategy.warmup_steps} steps), in "
            "which every worker has gradients to average. Give it more data, or the strategy a shorter warm-up."
        )
        transport = self._levels[-1].transport
        if self._view.ddp is None and not self._levels[-1].alone:
            transport.next_round()
            open_round(transport, Header(self._moment, bytes(16), able=False), problem=problem, describe=list)
        raise CadenzaError(problem[0].upper() + problem[1:])

    # ---- the clock -------------------------------------------------------------------------------------------------

    def _count_warmup_step(self) -> None:
        if self._view.ddp is None and not self._gradients_averaged:
            raise CadenzaError(
                f"Step {self.clock} belongs to the warm-up ({self.strategy.warmup_steps} steps), in which gradients "
                "are averaged: call sync.average_gradients() after backward() and before optimizer.step()."
            )
        self._gradients_averaged = False
        if self.clock == self.strategy.warmup_steps:
            self._end_warmup()

    def _begin(self) -> None:
        """Let all ranks start from the first one's values."""
        self._levels[-1].take_from_first(self._view.everything())
        ddp = self._view.ddp
        if not self.strategy.warmup_steps:
            self._end_warmup()
        elif ddp is not None and not covers(ddp, self._levels[-1].transport.members):
            widen(
                ddp,
                process_group_of(self._levels[-1].transport),
                while_true=lambda: self.clock < self.strategy.warmup_steps,
            )

    def _end_warmup(self) -> None:
        """Go over to local steps: DDP over all ranks falls silent, anchors are taken."""
        if self._view.ddp is not None and covers(self._view.ddp, self._levels[-1].transport.members):
            fall_silent(self._view.ddp)
        for fragment in range(len(self._fragments())):
            layout = self._layout(fragment)
            for number, level in enumerate(self._levels):
                self._track(number, fragment).fit(layout, level.transport, level.stage)

    def _wait_for_courier(self) -> None:
        """Wait until the thread has no round under way: collectives are issued in one order on every rank."""
        for flight in self._flights.values():
            flight.passage.exception()

    def _hook_optimizer(self, scaler: torch.amp.GradScaler | None) -> None:
        this = weakref.ref(self)

        def tick(*_: Any) -> None:
            synchronizer = this()
            if synchronizer is not None and synchronizer._open:
                synchronizer.step()

        if scaler is not None:
            if self.strategy.warmup_steps and self._view.ddp is None:
                raise ValueError(
                    "With a GradScaler, gradients must be averaged before they are unscaled: call "
                    "sync.average_gradients() in the loop, and use auto=False."
                )
            update = scaler.update

            def update_and_tick(*args: Any, **options: Any) -> None:
                update(*args, **options)
                tick()

            scaler.update = update_and_tick  # type: ignore[method-assign]
            self._hooks.append(lambda: setattr(scaler, "update", update))
            return
        last = self._view.optimizers[-1]
        self._hooks.append(last.register_step_post_hook(tick).remove)
        if self.strategy.warmup_steps and self._view.ddp is None:
            first = self._view.optimizers[0]
            self._hooks.append(first.register_step_pre_hook(lambda *_: self.average_gradients()).remove)

    def _check_open(self) -> None:
        if not self._open:
            raise CadenzaError("This synchronizer is finished; attach a new one to go on training.")

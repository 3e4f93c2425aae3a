"""Launching and landing: a launch takes copies of the values and sends them on their way, a landing writes the result.

A launch runs in a background thread if the level has a delay. When a round runs is a pure function of the clock, so all
ranks decide alike; who is in it is the participants' business.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch

from cadenza.codecs import fp32
from cadenza.common.checksums import checksum
from cadenza.common.streams import Moment, keep_for_stream
from cadenza.engine.finiteness import problem_of
from cadenza.engine.header import Header, mark
from cadenza.engine.in_place_mean import average_in_place
from cadenza.engine.landing import Landing
from cadenza.engine.layout import Layout
from cadenza.engine.opening import Scales, failing_as_round
from cadenza.engine.pending import PendingRound
from cadenza.engine.replica import Replica
from cadenza.engine.reporting import Reporter
from cadenza.engine.resolving import Resolver
from cadenza.engine.round_result import RoundResult
from cadenza.errors import NotFiniteError
from cadenza.outer import mean
from cadenza.participants.base import Admission, FailedRound
from cadenza.participants.level_group import LevelGroup
from cadenza.participants.round_id import RoundId
from cadenza.schedules import largest_due

__all__ = ["RoundRunner"]


class RoundRunner:
    """Runs the rounds of a replica."""

    def __init__(self, replica: Replica, reporter: Reporter) -> None:
        self._replica, self._reporter = replica, reporter
        self._strategy, self._participants, self._state = replica.strategy, replica.participants, replica.state
        self._landing = Landing(replica, reporter)
        delayed = any(self._strategy.delay_of(level) for level in range(len(self._strategy.levels)))
        self._background = ThreadPoolExecutor(1, thread_name_prefix="cadenza") if delayed else None

    # ---- what is due -----------------------------------------------------------------------------------------------

    def land_due(self) -> None:
        """Land the rounds whose time has come."""
        for fragment in [f for f, pending in self._state.pending.items() if pending.land_at <= self._state.clock]:
            pending = self._state.pending.pop(fragment)
            with failing_as_round(pending.step):
                drift = self._landing.land(pending)
            self._replica.level_state(pending.level, fragment).learn_drift(drift)

    def land_all(self) -> None:
        """Land what is in flight."""
        for fragment in sorted(self._state.pending):
            pending = self._state.pending.pop(fragment)
            with failing_as_round(pending.step):
                self._landing.land(pending)

    def launch_due(self, n: int, *, after: int = -1) -> None:
        """Run the rounds that are due after local step `n`, of the fragments after a given one."""
        fragment = after
        while (fragment := fragment + 1) < self._state.fragment_count:  # a round may find that there are more
            levels = [self._replica.level_state(level, fragment) for level in range(len(self._strategy.levels))]
            due = [state.schedule.is_due(n, state.schedule_state) for state in levels]
            level = largest_due(due)
            if level is None or not self._replica.fragments()[fragment]:
                continue
            if fragment in self._state.pending:  # a delay that a changing period has overtaken
                self._landing.land(self._state.pending.pop(fragment))
            drift = self.run(level, fragment, delay=self._strategy.delay_of(level), alpha=self._strategy.alpha)
            for state, was_due in zip(levels, due, strict=True):
                if was_due:
                    state.count_round(n, drift)

    def come_to(self, round: RoundId) -> None:
        """Come to a round that the others hold, at whatever step this worker is, and go on from theirs.

        If they do not hold it, this worker goes on from its own step, unless all are at the end.
        """
        before, self._state.clock = self._state.clock, round.step
        self._run_called(round)
        if self._participants.missed(round) and not self._participants.over:
            self._state.clock = before

    def _run_called(self, round: RoundId) -> None:
        n = self._state.clock - self._strategy.warmup_steps
        if round.phase:
            self.run_last(range(round.fragment, self._state.fragment_count), round.phase)
            return
        self.land_due()
        delay = self._strategy.delay_of(round.level)
        drift = self.run(round.level, round.fragment, delay=delay, alpha=self._strategy.alpha)
        for level in range(len(self._strategy.levels)):
            state = self._replica.level_state(level, round.fragment)
            if level == round.level or state.schedule.is_due(n, state.schedule_state):
                state.count_round(n, drift)
        self.launch_due(n, after=round.fragment)

    def answer(self) -> bool:
        """Come to the next round that others hold, for a worker that takes no steps any more; False if none will come.

        Its clock is theirs: it moves when they have come to a round, whatever becomes of that.
        """
        own = self._next_due()
        round = None if own is None else self._participants.follow(own, after=self._behind_us())
        if round is None:
            return False
        self.come_to(round)
        self._state.clock = max(self._state.clock, round.step)
        return True

    def _next_due(self) -> RoundId | None:
        """Return the next round that is due by the schedules; None if there is nothing to average."""
        levels, fragments = range(len(self._strategy.levels)), self._replica.fragments()
        numbers = [number for number in range(self._state.fragment_count) if fragments[number]]
        clock = self._state.clock
        while numbers:
            clock += 1
            for fragment in numbers:
                states = [self._replica.level_state(level, fragment) for level in levels]
                n = clock - self._strategy.warmup_steps
                level = largest_due([state.schedule.is_due(n, state.schedule_state) for state in states])
                if level is not None:
                    return RoundId(clock, 0, fragment, level)
        return None

    def _behind_us(self) -> RoundId:
        """Return the last round that this worker was, or could have been, at; those of a warm-up are all behind it."""
        in_warm_up = self._state.clock <= self._strategy.warmup_steps
        return RoundId(self._state.clock, sys.maxsize if in_warm_up else 0, sys.maxsize)

    def run_last(self, fragments: Iterable[int], phase: int) -> bool:
        """Hold the last round of some fragments; return whether all workers hold equal values now.

        In phase 0 all workers know alike which fragments need none; and so does who has met those who have finished.
        """
        self._state.phase, again = phase, bool(phase) and not self._participants.over
        fragments = list(fragments)
        try:
            self.land_all()
            for fragment in fragments:
                if again or self._state.counts.met_at.get(fragment) != self._state.clock:
                    self._run_last_of(fragment)
        finally:
            self._state.phase = 0
        return all(self._state.counts.met_at.get(fragment) == self._state.clock for fragment in fragments)

    def _run_last_of(self, fragment: int) -> None:
        """Hold the last round of a fragment: the plain mean of all where anchors or pairs differ; else one like any."""
        number, outermost = len(self._strategy.levels) - 1, self._participants.levels[-1]
        if outermost.agrees:
            self.run(number, fragment, delay=0, alpha=0.0)
            return
        plan = replace(outermost.plan, groups="all", codec=fp32(), outer=mean(), keep_anchor=False)
        everybody = LevelGroup(plan, outermost.name, outermost.transport)
        self._average_now(number, fragment, everybody, self._replica.layout(fragment), Scales())

    def make_equal(self) -> None:
        """Give all workers the first one's bits, should an outer update have rounded differently in the last round."""
        outermost = self._participants.levels[-1]
        if not (outermost.plan.anchored and outermost.agrees) or outermost.alone:
            return
        for fragment in range(self._state.fragment_count):
            state = self._replica.level_state(len(self._strategy.levels) - 1, fragment)
            self._replica.copies.wait()
            own = checksum(*state.anchors).to_bytes(8, "little")
            with failing_as_round(self._state.clock):
                if len(set(outermost.transport.exchange(own)())) > 1:
                    state.take_from(outermost.transport, source=0)
                    self._replica.layout(fragment).unpack(state.anchors)

    def close(self) -> None:
        """Let go of the thread and of rounds in flight."""
        if self._background is not None:
            self._background.shutdown(wait=False, cancel_futures=True)
        self._state.pending.clear()

    # ---- one round -------------------------------------------------------------------------------------------------

    def run(self, number: int, fragment: int, *, delay: int, alpha: float) -> float | None:
        """Launch a round and, without a delay, land it; return its drift if that is known already."""
        with failing_as_round(self._state.clock):
            return self._run(number, fragment, delay=delay, alpha=alpha)

    def _run(self, number: int, fragment: int, *, delay: int, alpha: float) -> float | None:
        started = time.perf_counter()
        if number == len(self._strategy.levels) - 1 or not self._participants.always_together:
            self._replica.welcome(fragment)
        layout = self._replica.layout(fragment)
        if not self._is_admitted(number, fragment, layout, started):
            return None
        state = self._replica.level_state(number, fragment)
        group = self._participants.group(number, state.rounds)
        plan = group.plan
        if group.alone and not plan.anchored and number < len(self._strategy.levels) - 1:
            return 0.0  # nobody to meet, and nothing to remember
        if not delay and not plan.anchored and group.stage is None:
            return self._average_now(number, fragment, group, layout, self._scales(number, fragment))
        pending = self._launch(number, fragment, group, layout, delay=delay, alpha=alpha)
        pending.stall_s = time.perf_counter() - started
        if delay:
            self._state.pending[fragment] = pending
            return None
        return self._landing.land(pending)

    def _is_admitted(self, number: int, fragment: int, layout: Layout, started: float) -> bool:
        """Come together with the others for a round; False if there is nothing more to do for it."""
        participants, state = self._participants, self._state
        if not participants.always_together:
            state.wait_for_pending()  # who is there may change, and with it the group that carries what is in flight
        id = RoundId(state.clock, state.phase, fragment, number)
        last = bool(state.phase)
        settled = last and state.counts.met_at.get(fragment) == state.clock
        found = participants.admit(id, layout.fragment.digest.hex(), settled=settled, last=last)
        if isinstance(found, Admission):
            if found.catching_up:
                self.land_all()  # so that there is one state to give, and one place from which to count progress
            found = participants.catch_up(self._replica) or found
        if isinstance(found, FailedRound):
            pending = PendingRound(id, number, state.clock, layout)
            pending.stall_s = time.perf_counter() - started
            self._landing.fail(pending, found)
            return False
        if found.settled:  # the others hold the result of this step's round already
            layout.unpack(self._replica.level_state(number, fragment).anchors)
            state.counts.met_at[fragment] = state.clock
        return not found.settled

    @torch.no_grad()
    def _launch(
        self, number: int, fragment: int, group: LevelGroup, layout: Layout, *, delay: int, alpha: float
    ) -> PendingRound:
        state, plan = self._replica.level_state(number, fragment), group.plan
        state.fit(layout, group)
        if plan.regroups:
            state.refit(group)
        restarts = bool(delay) and self._strategy.restarts(number)
        if restarts and plan.outer.needs_own and not state.rounds:
            self._landing.take_first_step(number, fragment, layout, len(group.transport.members))
        pending = PendingRound(
            RoundId(self._state.clock, self._state.phase, fragment, number),
            number,
            self._state.clock + delay,
            layout,
            values=layout.start_packing(self._replica.spare.borrow(layout)),
            side=self._replica.side_values(layout.names, buffers=not fragment) if self._participants.atomic else None,
            alpha=0.0 if plan.outer.plain else alpha,
            keeps_progress=bool(delay) and not restarts and (plan.outer.plain or self._strategy.keep_progress),
            restarts=restarts,
            inner_lrs=self._replica.view.inner_lrs() if plan.outer.needs_inner_lr else {},
            samples=self._state.counts.samples,
            codec=state.codec.name,
        )
        weight, problem = self._weight(number, fragment)
        problem = problem or self._problem(group, layout)
        resolver = Resolver(
            pending,
            group,
            state,
            self._header(layout, number, fragment, weight),
            problem,
            self._scales(number, fragment),
            self._strategy.measures_drift and not self._strategy.balanced,
            self._participants,
            self._replica.spare,
        )
        if pending.restarts:
            layout.unpack(state.anchors)
        if self._background is not None and delay:
            pending.outcome = self._background.submit(self._resolve_beside, resolver, Moment(layout.devices))
        else:
            self._state.wait_for_pending()
            pending.outcome.set_result(resolver.resolve())
        return pending

    def _resolve_beside(self, resolver: Resolver, packed: Moment) -> RoundResult | FailedRound:
        """Take a round to its result in streams of its own, after what training had enqueued at the launch."""
        pending, devices = resolver.pending, resolver.pending.layout.devices
        with self._replica.streams.use(devices):
            packed.wait()
            keep_for_stream((*pending.values, *(resolver.state.carried or ())))
            try:
                return resolver.resolve()
            finally:
                pending.done = Moment(devices)

    def _average_now(
        self, number: int, fragment: int, group: LevelGroup, layout: Layout, scales: Scales
    ) -> float | None:
        """Average the fragment in place, bucket by bucket: no copies, so only the lanes are extra memory."""
        started = time.perf_counter()
        self._state.wait_for_pending()
        tensors = layout.fragment
        norm2 = tensors.norm2()
        weight, problem = self._weight(number, fragment)
        problem = (
            problem
            or self._problem(group, layout)
            or problem_of(tensors, norm2, self._state.clock, tensors.first_not_finite)
        )
        if group.alone and problem is not None:
            raise NotFiniteError(problem)
        header = replace(self._header(layout, number, fragment, weight), norm2=norm2)
        spread = self._strategy.measures_drift
        with torch.no_grad():
            result = average_in_place(tensors, group.transport, header, problem=problem, scales=scales, spread=spread)
        id = RoundId(self._state.clock, self._state.phase, fragment, number)
        pending = PendingRound(id, number, self._state.clock, layout, samples=self._state.counts.samples)
        self._landing.bring_up_to_date(pending, layout, result, group)
        pending.drift = result.measured.drift if spread else None
        pending.stall_s = time.perf_counter() - started
        self._state.pace.note_stall(number, fragment, pending.stall_s)
        self._reporter.landed(pending, result, group, self._state.clock)
        return pending.drift

    # ---- what a round is told --------------------------------------------------------------------------------------

    def _scales(self, level: int, fragment: int) -> Scales:
        state = self._replica.level_state(level, fragment).weighting_state
        return Scales(self._replica.weighting, state, per_step=self._strategy.balanced)

    def _header(self, layout: Layout, level: int, fragment: int, weight: float) -> Header:
        balance = self._state.balance
        step_s, stall_s = self._state.pace.measured(level, fragment)
        return Header(
            self._state.moment,
            mark(layout.fragment.digest, level, fragment),
            able=True,
            exhausted=self._state.counts.exhausted,
            weight=weight,
            speed=balance.speed(),
            steps=balance.steps,
            step_s=step_s,
            stall_s=stall_s,
        )

    def _problem(self, group: LevelGroup, layout: Layout) -> str | None:
        """Say what of this worker's could not be averaged after the parameters: then the round does not even begin."""
        if self._strategy.optimizer_state != "average" or group.alone or self._participants.atomic:
            return None
        return self._replica.view.state_without_mean(layout.names)

    def _weight(self, level: int, fragment: int) -> tuple[float, str | None]:
        """Return what this worker says it counts, and what is wrong with it if something is."""
        counts = self._state.counts
        news = counts.has_news(level, fragment, start=self._strategy.warmup_steps)
        if not news or self._participants.idle:
            return 0.0, None
        try:
            return self._replica.weighting.own(counts.since_last_round(level, fragment)), None
        except ValueError as error:  # all ranks shall raise, not only this one
            return 0.0, str(error)

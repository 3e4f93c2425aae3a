"""The `Synchronizer`: a strategy at work on a model; one `step()` after every optimizer step.

The clock is `step()`. What is due at a step is a pure function of it, so all ranks decide alike; `RoundRunner` launches
and lands, `Replica` remembers.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Self

import torch

from cadenza.common.streams import devices_of, refuse_capture
from cadenza.engine import loading, saving
from cadenza.engine.collectives import average_tensors
from cadenza.engine.hooks import hook_optimizer, hook_scaler
from cadenza.engine.model_view import ModelView
from cadenza.engine.optimizer_state import average_due_state
from cadenza.engine.replica import Replica
from cadenza.engine.reporting import Reporter
from cadenza.engine.round_runner import RoundRunner
from cadenza.engine.warm_up import WarmUp
from cadenza.errors import CadenzaError
from cadenza.observers import Observer
from cadenza.participants.base import Participants
from cadenza.strategy import Strategy

__all__ = ["Synchronizer"]


class Synchronizer:
    """A strategy at work on a model; made by `attach`.

    As a context manager it calls `finish` at the end of the block, but starts no collective when an exception leaves
    it.

    Attributes:
        strategy: What it does.
        replica: The model with all that is remembered of it, for checkpoints.

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
        participants: Participants,
        *,
        observers: Sequence[Observer],
        auto: bool,
        scaler: torch.amp.GradScaler | None,
    ) -> None:
        self.strategy = strategy
        self.replica = Replica(view, strategy, participants)
        self._participants = participants
        self._state = self.replica.state
        self._reporter = Reporter(observers)
        self._rounds = RoundRunner(self.replica, self._reporter)
        self._warm_up = WarmUp(self.replica)
        self._undo_hooks: list[Callable[[], None]] = []
        self._open = True
        self._on_device = bool(devices_of(view.parameters().values()))
        try:
            self.replica.check_turns()
            self._check_auto(auto, scaler)
            self._begin()
        except BaseException:
            participants.close()
            raise
        if auto:
            self._hook(scaler)

    # ---- what users look at ----------------------------------------------------------------------------------------

    @property
    def clock(self) -> int:
        """How many steps were counted, warm-up included."""
        return self._state.clock

    @property
    def closed(self) -> bool:
        """Whether it is finished, or was closed."""
        return not self._open

    @property
    def observers(self) -> list[Observer]:
        """What gets a `RoundReport` for every round; add to it, or take from it, at any time."""
        return self._reporter.observers

    @property
    def next_round(self) -> int | None:
        """The clock's step at which the next round will be launched, as far as it is known; None in the warm-up."""
        if not self._warm_up.over or not self._state.levels:
            return None
        next_steps = (int(state.schedule_state["next"]) for state in self._state.levels.values())
        return self.strategy.warmup_steps + min(next_steps)

    @property
    def members(self) -> tuple[int, ...]:
        """The workers that held the last round together, ascending; under `raise_error`, all ranks."""
        return self._participants.members

    @property
    def behind(self) -> bool:
        """Whether rounds were, or may have been, held without this worker: it comes to the next one."""
        return self._participants.behind

    # ---- what users call -------------------------------------------------------------------------------------------

    def step(self, *, samples: float | None = None) -> None:
        """Count one optimizer step, land what is due, launch what is due.

        Args:
            samples: How many samples the step has used; required where the strategy weighs by samples.
        """
        self._check_open()
        if self._on_device:
            refuse_capture("sync.step()")
        self._state.pace.enter()
        try:
            self._step(samples)
        finally:
            self._state.pace.leave()

    def _step(self, samples: float | None) -> None:
        self._check_values()
        counts = self._state.counts
        if samples is None and self.strategy.weighting.needs_samples and not counts.exhausted:
            raise ValueError(
                'The strategy has weight="samples", but this step does not say how many it has used: call '
                "sync.step(samples=len(batch)) after every optimizer step, or leave the weight uniform."
            )
        self._state.clock += 1
        counts.samples += samples or 0.0
        round = self._participants.summons(self._state.clock)
        if round is not None and round.step > self.strategy.warmup_steps:
            self._warm_up.end_step()
            self._rounds.come_to(round)
            return
        if not self._warm_up.count_step():
            return
        if self._state.clock == self.strategy.warmup_steps + 1 and self._participants.always_together:
            self.replica.view.refuse_ddp_elsewhere(self.members)  # it may have been made since attach()
        self._rounds.land_due()
        n = self._state.balance.tick(self._state.clock - self.strategy.warmup_steps, idle=counts.exhausted)
        if n is not None:
            self._reporter.bytes_beside += average_due_state(self.replica, n)
            self._rounds.launch_due(n)

    def average_gradients(self) -> None:
        """Average the gradients during the warm-up, after backward and before unscaling or clipping; later do nothing.

        Under DistributedDataParallel it is not needed: DDP does it.
        """
        self._check_open()
        self._warm_up.average_gradients()

    def drain(self) -> None:
        """Answer rounds for a worker that has run out of data, until all workers have.

        Its local steps since the last round count in the next one, with their weight; afterwards its weight is 0. A
        round that finds nothing new on any worker takes their plain mean, without an outer step. During the warm-up
        every worker has gradients to average: whoever calls this then makes all ranks raise.

        Under `skip_round` and `shrink` it waits for the others' rounds and never runs ahead of them, however long they
        train; it ends as well when they have finished, or when nobody to hold a round with was there for `first_s`.
        """
        self._check_open()
        if any(level.regroups for level in self.strategy.levels):
            raise CadenzaError(
                "A worker whose groups change from round to round cannot drain(): it never learns whether all others "
                "have run out of data too. Give all workers the same number of steps, and call finish()."
            )
        if not self._warm_up.over or self.strategy.average_gradients:
            self._warm_up.refuse_to_drain()
        self._state.counts.stop(self._state.clock)
        while not self._state.counts.all_exhausted and self._answer():
            pass

    def _answer(self) -> bool:
        """Come to the next round without a step of one's own; False if none will come."""
        if self._participants.always_together:
            self.step()
            return True
        self._check_values()
        return self._rounds.answer()

    def finish(self) -> None:
        """Land what is in flight, run one last global round, and close: all ranks end with equal parameters.

        So do the buffers that the strategy averages, BatchNorm's running statistics by default. The last round is one
        like the others, outer step and momentum included, also if its period was cut short. There is none where all
        have just met. Where workers have anchors of their own, it is a plain mean of the parameters.
        """
        self._check_open()
        if self.strategy.balanced:
            self.drain()  # the others may have more periods to go
        self._rounds.land_all()
        if self._state.clock > self.strategy.warmup_steps:
            self._end_together()
        elif self._state.clock or self._participants.always_together:
            self._participants.end(together=self._warm_up.finish())
        self.close()

    @contextmanager
    def averaged(self) -> Iterator[torch.nn.Module]:
        """Give the model the mean of all workers' parameters inside the block, and their own back after it.

        All ranks enter and leave together. Rounds in flight stay in flight. Under `skip_round` and `shrink` it is what
        the last rounds have agreed on, the anchor, and nothing is sent.
        """
        self._check_open()
        self._state.wait_for_pending()
        view = self.replica.view
        view.settle()
        tensors: dict[str, torch.Tensor] = {**view.parameters()}
        if self._participants.always_together:
            tensors |= view.float_buffers(self.strategy.buffers)
        kept = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        try:
            if self._participants.always_together:
                everybody = self._participants.levels[-1].transport
                average_tensors(everybody, tensors, step=self._state.moment, what="averaged() of")
            else:
                self.replica.take_anchors()
            yield view.model
        finally:
            view.settle()
            with torch.no_grad():
                for name, tensor in tensors.items():
                    tensor.copy_(kept[name])

    def state_dict(self) -> dict[str, torch.Tensor | str]:
        """Return what this worker needs to go on from here: a flat dict of tensors and JSON.

        It is local, never a collective; it waits for rounds in flight but lands none, so the trajectory stays as it is.
        """
        return saving.state_dict(self.replica)

    def load_state_dict(self, saved: Mapping[str, torch.Tensor | str]) -> None:
        """Go on from a saved state, at any step; restore the model and the optimizer beside it (`cadenza.checkpoint`).

        As many workers as saved resume bit for bit, each from its own state. Another number takes the dicts of all
        workers, merged: worker j goes on from entry j mod N. What does not fit is refused before anything is changed.
        """
        self.prepare_to_load(saved).apply()

    def prepare_to_load(
        self, saved: Mapping[str, torch.Tensor | str], *, worker: int | None = None
    ) -> loading.Restoration:
        """Check that a saved state fits, and change nothing; its `apply()` takes it.

        `worker` says whose entry is taken, where workers are known by their numbers; otherwise positions decide.
        """
        self._check_open()
        return loading.prepare(self.replica, saved, worker=worker)

    def restart(self) -> None:
        """Take the model's values for a new start: after values were loaded, all ranks call this.

        All ranks go on from the first one's values. Anchors are taken anew, outer updates and error feedback forget
        what was before; the clock and the schedules go on. To resume a run, use `cadenza.checkpoint` instead.
        """
        self._check_open()
        if not self._participants.always_together:
            raise CadenzaError(
                "Under skip_round and shrink a worker takes the state of the others; load the model's values on all "
                "workers before attach()."
            )
        self.replica.restart()

    def close(self) -> None:
        """Let go of threads, hooks and groups without any collective; parameters stay as they are."""
        if not self._open:
            return
        self._open = False
        for undo in self._undo_hooks:
            undo()
        self.replica.rewrites.close()
        self._rounds.close()
        self._participants.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None and self._open:
            self.finish()
        else:
            self.close()

    # ---- beginning and end -----------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Start together with the others, or come to their next round if they have begun."""
        self._participants.start(self.replica)
        while (round := self._participants.awaited()) is not None:
            if not self._warm_up.come_to(round):
                self._rounds.come_to(round)
        self._warm_up.begin()

    def _end_together(self) -> None:
        """Run the last round until it succeeds; whatever happens, end with what was agreed on."""
        for phase in self._participants.last_phases:
            self._participants.prepare_last_round()
            if self._rounds.run_last(range(len(self.replica.fragments())), phase):
                if self._participants.always_together:
                    self._rounds.make_equal()
                self._participants.end(together=True)
                return
        self._participants.end(together=False)
        self.replica.take_anchors()

    def _check_auto(self, auto: bool, scaler: torch.amp.GradScaler | None) -> None:
        if auto and self.strategy.weighting.needs_samples:
            raise ValueError(
                'weight="samples" needs sync.step(samples=…) in the loop, and auto=True calls step() without it: use '
                "auto=False, another weight, or a function that says how much this worker counts."
            )
        if not auto and scaler is not None:
            raise ValueError("scaler belongs to auto=True; without it, call sync.step() after scaler.update().")
        if scaler is not None and self._averages_gradients_itself:
            raise ValueError(
                "With a GradScaler, gradients must be averaged before they are unscaled: call "
                "sync.average_gradients() in the loop, and use auto=False."
            )

    @property
    def _averages_gradients_itself(self) -> bool:
        strategy = self.strategy
        return bool(strategy.warmup_steps or strategy.average_gradients) and not self._warm_up.by_ddp

    def _hook(self, scaler: torch.amp.GradScaler | None) -> None:
        alive = weakref.WeakMethod(self._tick)

        def tick() -> None:
            if (method := alive()) is not None:
                method()

        if scaler is not None:
            self._undo_hooks.append(hook_scaler(scaler, tick))
        else:
            average = self._warm_up.average_gradients if self._averages_gradients_itself else None
            self._undo_hooks += hook_optimizer(self.replica.view.optimizers, tick, average)

    def _check_values(self) -> None:
        """Refuse to go on from values that were loaded after `attach`: the next round would take them for progress."""
        if self.replica.rewrites.was_rewritten() and self.replica.has_history:
            raise CadenzaError(
                "The model's values were replaced by load_state_dict() after attach(), and the anchors, from which "
                "rounds count progress, were not. Load values before attach(); resume with cadenza.checkpoint.load() "
                "or sync.load_state_dict() beside the model's; or call sync.restart() on all ranks to start anew from "
                "the loaded values."
            )

    def _tick(self) -> None:
        if self._open:
            self.step()

    def _check_open(self) -> None:
        if not self._open:
            raise CadenzaError("This synchronizer is finished; attach a new one to go on training.")

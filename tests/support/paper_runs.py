"""Runs of a paper's strategy on workers that are threads: what they hold after every step, and stopped at every one."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch

import cadenza
from cadenza import Strategy
from cadenza.testing import Worker, workers
from support.compare import same_bits
from support.models import CASES
from support.training import momentum_sgd, values

Spikes = dict[tuple[int, int], float]  # {(rank, step): what its gradient is multiplied by}


class PaperRun:
    """A small model in training on this thread."""

    def __init__(self, worker: Worker, strategy: Strategy, spikes: Spikes) -> None:
        self.rank, self.spikes = worker.rank, spikes
        self.model = CASES["mlp"].model(self.rank)
        self.optimizer = momentum_sgd(self.model)
        self.sync = cadenza.attach(self.model, self.optimizer, strategy)

    def go(self, upto: int, after: Callable[[int], None] = lambda step: None) -> list[torch.Tensor]:
        """Train up to a step and finish; the parameters after every step and at the end."""
        history = []
        while self.sync.clock < upto:
            self.step(self.sync.clock + 1)
            history.append(values(self.model))
            after(self.sync.clock)
        self.sync.finish()
        return [*history, values(self.model)]

    def step(self, n: int) -> None:
        self.optimizer.zero_grad()
        CASES["mlp"].backward(self.model, self.rank, n)
        multiply_gradients(self.model, self.spikes.get((self.rank, n), 1.0))
        self.optimizer.step()
        self.sync.step()

    def save(self) -> tuple[Any, ...]:
        return deepcopy((self.model.state_dict(), self.optimizer.state_dict(), self.sync.state_dict()))

    def load(self, saved: tuple[Any, ...]) -> None:
        model, optimizer, sync = deepcopy(saved)
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)
        self.sync.load_state_dict(sync)


def multiply_gradients(model: torch.nn.Module, factor: float) -> None:
    for parameter in model.parameters():
        if factor != 1.0 and parameter.grad is not None:
            parameter.grad.mul_(factor)


def histories(count: int, strategy: Strategy, steps: int, spikes: Spikes | None = None) -> list[list[torch.Tensor]]:
    """What each worker holds after every step and after `finish()`."""
    with workers(count) as pool:
        return pool.run(lambda worker: PaperRun(worker, strategy, spikes or {}).go(steps))


def assert_same_way(found: list[list[torch.Tensor]], reference: list[list[torch.Tensor]], rtol: float = 1e-5) -> None:
    """Every worker holds, after every step and at the end, what the reference says; and at the end all the same."""
    __tracebackhide__ = True
    assert len(found[0]) == len(reference)
    for n, expected in enumerate(reference, start=1):
        for rank, history in enumerate(found):
            torch.testing.assert_close(
                history[n - 1], expected[rank], rtol=rtol, atol=2e-6, msg=lambda m, r=rank, n=n: f"{r} after {n}: {m}"
            )
    assert all(same_bits(history[-1], found[0][-1]) for history in found)


def assert_resumes_everywhere(
    count: int, strategy: Strategy, steps: int, spikes: Spikes | None = None, *, every: int = 1
) -> None:
    """A run that is stopped after any step and goes on in new workers has the bits of one that never stopped.

    With `every` it is stopped after every so many steps only: no divisor of the period, so that all its phases come.
    """
    __tracebackhide__ = True
    scaled = spikes or {}

    def straight(worker: Worker) -> tuple[list[torch.Tensor], dict[int, tuple[Any, ...]]]:
        run, saved = PaperRun(worker, strategy, scaled), {}
        return run.go(steps, after=lambda step: saved.update({step: run.save()})), saved

    def resumed(worker: Worker, stop: int) -> list[torch.Tensor]:
        run = PaperRun(worker, strategy, scaled)
        run.step(1)  # whatever is there already is replaced
        run.load(ran[worker.rank][1][stop])
        return run.go(steps)

    with workers(count) as pool:
        ran = pool.run(straight)
        for stop in range(1, steps + 1, every):
            for rank, history in enumerate(pool.run(resumed, stop)):
                expected = ran[rank][0][stop:]
                same = [same_bits(a, b) for a, b in zip(history, expected, strict=True)]
                assert all(same), f"rank {rank}, stopped after step {stop}: {same}"
    for rank, history in enumerate(histories(count, strategy, steps, scaled)):
        assert all(same_bits(a, b) for a, b in zip(history, ran[rank][0], strict=True)), "saving changed the run"

"""Stop workers that are threads after every step, build everything anew, restore, go on: the same bits as without."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import cadenza
from cadenza import Strategy
from cadenza.testing import Worker, workers
from support.compare import same_bits
from support.models import CASES
from support.training import momentum_sgd

Inner = Callable[[nn.Module], torch.optim.Optimizer | Sequence[torch.optim.Optimizer]]


@dataclass
class _Kept:
    """What a worker held after every step, and what it needs to go on from each."""

    history: list[torch.Tensor] = field(default_factory=list)
    saved: list[tuple[Any, ...]] = field(default_factory=list)


class _Run:
    def __init__(self, rank: int, strategy: Strategy, case: str, inner: Inner) -> None:
        self.rank, self.case = rank, CASES[case]
        self.model = self.case.model(rank)
        made = inner(self.model)
        self.optimizers = [made] if isinstance(made, torch.optim.Optimizer) else list(made)
        self.sync = cadenza.attach(self.model, self.optimizers, strategy)

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.case.backward(self.model, self.rank, self.sync.clock + 1)
        self.sync.average_gradients()
        for optimizer in self.optimizers:
            optimizer.step()
        self.sync.step()

    def values(self) -> torch.Tensor:
        states = [state for optimizer in self.optimizers for state in optimizer.state.values()]
        kept = [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
        return torch.cat([t.detach().double().reshape(-1) for t in [*self.model.parameters(), *kept]])

    def save(self) -> tuple[Any, ...]:
        kept = deepcopy((self.model.state_dict(), [optimizer.state_dict() for optimizer in self.optimizers]))
        return (*kept, self.sync.state_dict())

    def load(self, model: Any, optimizers: Any, sync: Any) -> None:
        self.model.load_state_dict(model)
        for optimizer, state in zip(self.optimizers, optimizers, strict=True):
            optimizer.load_state_dict(deepcopy(state))
        self.sync.load_state_dict(sync)


def _walk(worker: Worker, steps: int, saved: Sequence[tuple[Any, ...]] | None, *args: Any) -> _Kept:
    run, kept = _Run(worker.rank, *args), _Kept()
    if saved is not None:
        run.step()  # whatever is there already is replaced
        run.load(*saved[worker.rank])
    while run.sync.clock < steps:
        run.step()
        kept.history.append(run.values())
        if saved is None:
            kept.saved.append(run.save())
    run.sync.finish()
    kept.history.append(run.values())
    return kept


def assert_resumes_after_every_step(
    strategy: Strategy, *, count: int = 3, steps: int = 10, case: str = "mlp", inner: Inner = momentum_sgd
) -> None:
    """A run that stops after any step and goes on from what it saved is the run that never stopped, to the bit."""
    __tracebackhide__ = True
    with workers(count) as pool:
        straight = pool.run(_walk, steps, None, strategy, case, inner)
        for stop in range(1, steps):
            resumed = pool.run(_walk, steps, [kept.saved[stop - 1] for kept in straight], strategy, case, inner)
            for rank, (got, wanted) in enumerate(zip(resumed, straight, strict=True)):
                pairs = zip(got.history, wanted.history[stop:], strict=True)
                differing = [stop + 1 + n for n, (a, b) in enumerate(pairs) if not same_bits(a, b)]
                assert not differing, f"rank {rank}, resumed after step {stop}, differs after steps {differing}"

"""What a selftest tries: each part runs on all workers of a setup, says in words what it saw, or raises.

What a part returns besides the words must be the same on all workers.
"""

from __future__ import annotations

import hashlib
import os
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn

import cadenza
from cadenza import Strategy, codecs
from cadenza.model_averaging.averagers import PeriodicModelAverager
from cadenza.testing import references
from cadenza.testing.implementations import compare_implementations
from cadenza.testing.references import History, Workers, flat
from cadenza.testing.trajectories import PRESETS, STEPS, SmallCase, momentum_sgd

__all__ = ["PARTS", "Job", "Part"]

_STEPS_WITH_A_DEATH = 24
_LARGE = 1 << 21  # values whose exchange takes long enough to be measured
_STEP_S = 0.02  # of a training step that leaves the processor to others
_MOST_STALL = 0.5


@dataclass(frozen=True)
class Job:
    """What a worker knows of the part that it takes part in.

    Attributes:
        rank: Its number.
        workers: How many there are.
        device: Where its model is.
        address: Where the store is, for workers that come and go.
    """

    rank: int
    workers: int
    device: torch.device
    address: str


Work: TypeAlias = Callable[[Job], tuple[str, str]]


@dataclass(frozen=True)
class Part:
    """One row of the table.

    Attributes:
        title: What it is called in the table.
        work: What a worker does.
        elastic: Whether workers meet without a process group, and the last of them dies.
    """

    title: str
    work: Work
    elastic: bool = False


def drop_in(job: Job) -> tuple[str, str]:
    """Torch's averager and Cadenza's, side by side."""
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager as TorchAverager

    case, rounds = SmallCase(job.device), 0
    ours, theirs = case.model(job.rank), case.model(job.rank)
    inner = [momentum_sgd(model) for model in (ours, theirs)]
    averagers = PeriodicModelAverager(period=2), TorchAverager(period=2)
    for n in range(1, STEPS + 1):
        for model, optimizer, averager in zip((ours, theirs), inner, averagers, strict=True):
            optimizer.zero_grad()
            case.backward(model, job.rank, n)
            optimizer.step()
            averager.average_parameters(model.parameters())
        rounds += n % 2
        _check_near(_values(ours), _values(theirs), f"after step {n}, beside torch's averager")
    averagers[0].average_parameters(ours.parameters())
    return f"as torch's averager, over {rounds} rounds", ""


def strategies(job: Job) -> tuple[str, str]:
    """Every preset beside its plain reference, step by step."""
    cases: dict[str, tuple[Strategy, Callable[[Workers], History]]] = {
        name: (strategy, reference) for name, (strategy, reference, _) in PRESETS.items()
    }
    if job.workers % 2 == 0:
        pairs = [[rank, rank + 1] for rank in range(0, job.workers, 2)]
        levels: dict[int, Sequence[Sequence[int]]] = {2: pairs, 6: [list(range(job.workers))]}
        cases["hierarchical"] = (
            cadenza.hierarchical({2: 2, 6: "all"}),
            lambda w: references.hierarchical(w, STEPS, levels=levels),
        )
    wrong, ends = [], []
    for name, (strategy, reference) in cases.items():
        history = _train(job, strategy, STEPS)
        ends.append(history[-1])
        expected = reference(Workers(SmallCase(job.device), job.workers, momentum_sgd))
        try:
            for n, (got, wanted) in enumerate(zip(history, expected, strict=True), start=1):
                _check_near(got, wanted[job.rank], f"{name}, after step {n}")
        except AssertionError as error:
            wrong.append(str(error))
    if wrong:
        raise AssertionError("; ".join(wrong))
    return f"{len(cases)} strategies walk the way of their references", _digest(ends)


def codec_equality(job: Job) -> tuple[str, str]:
    """All implementations of the codecs, bit for bit."""
    return compare_implementations(job.device)


def overlap(job: Job) -> tuple[str, str]:
    """How long the training loop stands still for rounds that land later, by the time that they are on their way."""
    model = nn.ParameterList([nn.Parameter(torch.zeros(_LARGE, device=job.device))])
    reports: list[cadenza.RoundReport] = []
    strategy = cadenza.local_sgd(6, delay=5)
    sync = cadenza.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy, observers=[reports.append])
    for _ in range(30):
        time.sleep(_STEP_S)
        sync.step()
    late = [report for report in reports if report.delay]
    sync.finish()
    best = min(late, key=lambda report: report.stall_s / report.wire_s)
    share = best.stall_s / best.wire_s
    text = f"stalls for {100 * share:.0f} % of the {1000 * best.wire_s:.0f} ms that a round is on its way"
    if share > _MOST_STALL:
        raise AssertionError(f"{text}, at best; at most {100 * _MOST_STALL:.0f} % would be overlapped")
    return text, ""


def resume(job: Job) -> tuple[str, str]:
    """A run that is stopped in the middle of a round and goes on in a new model, beside one that was not stopped."""
    strategy = cadenza.diloco(4, delay=2, codec=codecs.error_feedback(codecs.int8(block=16)))
    saved: dict[str, Any] = {}
    whole = _train(job, strategy, STEPS, save_at=5, saved=saved)
    again = _train(job, strategy, STEPS, saved=saved)
    for n, (got, wanted) in enumerate(zip(again, whole[5:], strict=True), start=6):
        if not torch.equal(got, wanted):
            raise AssertionError(f"after step {n}, a resumed run is off by {(got - wanted).abs().max():.3g}")
    return "a run resumed in mid-round ends with the same bits", _digest(whole[-1:])


def killed_worker(job: Job) -> tuple[str, str]:
    """The last worker kills itself, and the others train on."""
    case, reports = SmallCase(job.device), list[cadenza.RoundReport]()
    model = case.model(job.rank)
    inner = momentum_sgd(model)
    membership = cadenza.join(job.address, worker=job.rank, workers=job.workers, job="selftest", lease_s=2.0)
    strategy = cadenza.diloco(4, faults=cadenza.shrink(grace_s=5.0, first_s=30.0))
    sync = cadenza.attach(model, inner, strategy, membership=membership, observers=[reports.append])
    while sync.clock < _STEPS_WITH_A_DEATH:
        if sync.clock == _STEPS_WITH_A_DEATH // 2 + 1 and job.rank == job.workers - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        inner.zero_grad()
        case.backward(model, job.rank, sync.clock + 1)
        inner.step()
        sync.step()
    sync.finish()
    left = [report.participants for report in reports if report.kind == "round"][-1]
    if left != tuple(range(job.workers - 1)):
        raise AssertionError(f"the last round was among workers {left}; worker {job.workers - 1} had died before")
    return f"{len(left)} of {job.workers} workers trained on when one was killed", _digest([_values(model)])


PARTS: dict[str, Part] = {
    "drop-in": Part("drop-in", drop_in),
    "strategies": Part("strategies", strategies),
    "codecs": Part("codecs", codec_equality),
    "overlap": Part("overlap", overlap),
    "resume": Part("resume", resume),
    "killed-worker": Part("killed worker", killed_worker, elastic=True),
}


def _train(
    job: Job, strategy: Strategy, steps: int, *, save_at: int = 0, saved: dict[str, Any] | None = None
) -> list[torch.Tensor]:
    """Return the parameters after every step and after `finish()`; save at a step, or go on from what was saved."""
    case = SmallCase(job.device)
    model = case.model(job.rank)
    inner = momentum_sgd(model)
    sync = cadenza.attach(model, inner, strategy)
    history = []
    if saved:
        model.load_state_dict(saved["model"])
        inner.load_state_dict(saved["inner"])
        sync.load_state_dict(saved["sync"])
    while sync.clock < steps:
        inner.zero_grad()
        case.backward(model, job.rank, sync.clock + 1)
        sync.average_gradients()
        inner.step()
        sync.step()
        history.append(_values(model))
        if sync.clock == save_at and saved is not None:
            kept = {"model": model.state_dict(), "inner": inner.state_dict(), "sync": sync.state_dict()}
            saved.update(deepcopy(kept))
    sync.finish()
    return [*history, _values(model)]


def _values(model: nn.Module) -> torch.Tensor:
    return flat(list(model.parameters()))


def _check_near(got: torch.Tensor, wanted: torch.Tensor, where: str) -> None:
    if not torch.allclose(got, wanted, rtol=1e-5, atol=2e-6):
        raise AssertionError(f"{where}: off by {(got - wanted).abs().max():.3g}")


def _digest(tensors: Iterable[torch.Tensor]) -> str:
    """Return a name for the bits of tensors."""
    found = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        found.update(bytes(tensor.detach().cpu().contiguous().view(torch.uint8).tolist()))
    return found.hexdigest()

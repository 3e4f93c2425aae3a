"""Workers that train under `skip_round` or `shrink`, and what befalls them."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import nn

import cadenza
from cadenza.engine.pending import PendingRound
from cadenza.engine.saving import local
from cadenza.participants.assembly import Assembly
from cadenza.participants.forming import Forming
from cadenza.participants.membership import Membership
from cadenza.participants.vote import Vote
from cadenza.reports import RoundReport
from cadenza.transports.faulty import FaultyTransport
from support.compare import same_bits

QUICK = {"grace_s": 3.0, "first_s": 20.0}
LEASE_S = 0.6
INNER, OUTER = 2, 6  # periods of a hierarchy
FEEDBACK = cadenza.codecs.error_feedback(cadenza.codecs.int8())


def build(worker: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A small model, another one on every worker: they start from one only if they agree to."""
    torch.manual_seed(100 + worker)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def take_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    worker: int,
    step: int,
    average_gradients: Callable[[], None] = lambda: None,
) -> float:
    """One local step on data that is the same whenever this worker takes this step."""
    generator = torch.Generator().manual_seed(1000 * worker + step)
    batch = torch.randn(16, 8, generator=generator)
    loss = (model(batch) - batch[:, :4]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    average_gradients()
    optimizer.step()
    return float(loss.detach())


def hierarchy(inner: Any = "site", faults: Any = None, codec: Any = FEEDBACK) -> cadenza.Strategy:
    """Momentum at both levels, and bytes with error feedback between the sites: all that can come apart."""
    return cadenza.Strategy(
        levels=(
            cadenza.LevelPlan(INNER, groups=inner, outer=cadenza.nesterov(lr=0.8, momentum=0.3), keep_anchor=True),
            cadenza.LevelPlan(OUTER, outer=cadenza.nesterov(lr=0.7, momentum=0.5), codec=codec, keep_anchor=True),
        ),
        buffers=False,
        faults=cadenza.shrink(**QUICK) if faults is None else faults,
    )


class Told(list[RoundReport]):
    """The reports of a run."""

    def __call__(self, report: RoundReport) -> None:
        self.append(report)

    def steps(self, kind: str) -> list[int]:
        return [report.step for report in self if report.kind == kind]


def join(port: int, worker: int, workers: int, **options: Any) -> Membership:
    return cadenza.join(f"127.0.0.1:{port}", worker=worker, workers=workers, lease_s=LEASE_S, **options)


def train(
    port: int,
    workers: int,
    strategy: cadenza.Strategy,
    steps: int,
    *,
    worker: int | None = None,
    at: dict[int, Callable[[Any], None]] | None = None,
    step_s: float = 0.0,
    built: Callable[[int], tuple[nn.Module, torch.optim.Optimizer]] = build,
    drains: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Train to the end, doing something at given steps; return what can be compared."""
    worker = int(os.environ["RANK"]) if worker is None else worker
    model, optimizer = built(worker)
    told = Told()
    membership = join(port, worker, workers, **options)
    sync = cadenza.attach(model, optimizer, strategy, membership=membership, observers=[told])
    joined_at = sync.clock
    pending = dict(at or {})
    taken, seen = 0, dict[int, torch.Tensor]()
    while sync.clock < steps:
        take_step(model, optimizer, worker, sync.clock, sync.average_gradients)
        taken += 1
        for step in sorted(step for step in pending if step <= sync.clock + 1):  # who catches up jumps over steps
            pending.pop(step)(sync)
        time.sleep(step_s)
        kept, chain, count = everything_of(sync), sync.replica.participants.history, len(told)
        sync.step(samples=16)
        # With a delay another fragment's round may be on its way; and who has caught up with the others has changed.
        if not strategy.delay and chain == sync.replica.participants.history:
            check_untouched(kept, sync, told[count:])
        if sync.clock < strategy.warmup_steps:
            seen[sync.clock] = values_of(model)
    if drains:
        sync.drain()
    sync.finish()
    return {
        "worker": worker,
        "joined_at": joined_at,
        "taken": taken,
        "clock": sync.clock,
        "values": values_of(model),
        "in the warm-up": seen,
        "buffers": dict(model.named_buffers()),
        "optimizer": [value for state in optimizer.state.values() for value in state.values()],
        "rounds": told.steps("round"),
        "failed": told.steps("failed"),
        "reasons": [report.reason for report in told],
        "stalls": {report.step: report.stall_s for report in told},
        "participants": [report.participants for report in told if report.kind == "round"],
    }


def values_of(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def everything_of(sync: cadenza.Synchronizer) -> dict[str, torch.Tensor]:
    """Copies of all that a failed round must leave alone: model, anchors, outer state, residuals, optimizer."""
    kept = {key: value for key, value in sync.state_dict().items() if isinstance(value, torch.Tensor)}
    view = sync.replica.view
    held = {**view.optimizer_tensors(list(view.parameters()))}
    held |= {f"model/{name}": value for name, value in view.everything().items()}
    return kept | {name: local(value).detach().clone() for name, value in held.items()}


def check_untouched(kept: dict[str, torch.Tensor], sync: cadenza.Synchronizer, told: list[RoundReport]) -> None:
    """Hold that a step in which rounds failed, and none landed, has changed nothing; poison is thrown away."""
    if told and all(report.kind == "failed" and "contribution" not in report.reason for report in told):
        after = everything_of(sync)
        same = {key for key in kept if key in after and same_bits(kept[key], after[key])}
        assert same == kept.keys() == after.keys(), f"a failed round changed {sorted(kept.keys() ^ same)}"


def rank() -> int:
    return int(os.environ["RANK"])


def kill(_: Any = None) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop_for(seconds: float) -> Callable[[Any], None]:
    def stop(_: Any) -> None:
        subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)

    return stop


def before(*_: Any, **__: Any) -> None:
    kill()


def after(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> None:
        function(*args, **kwargs)
        kill()

    return call


PHASES = ("signed", "exchange", "pack", "launch", "combine", "land", "wire to vote", "voting", "landing")


def arm(phase: str, level: int = 0) -> Callable[[Any], None]:
    """Let this process die when the next round of a level comes to a phase."""

    def armed(sync: Any) -> None:
        group = sync.replica.participants.levels[level]
        if phase in ("pack", "launch", "combine", "land") and group.reduces_inside:
            across = FaultyTransport(group.stage.across, fail_at=phase, fault=kill)  # type: ignore[arg-type]
            group.stage = replace(group.stage, across=across)
        elif phase in ("exchange", "pack", "launch", "combine", "land"):
            group.transport = FaultyTransport(group.transport, fail_at=phase, fault=kill)  # type: ignore[arg-type]
        elif phase == "signed":
            mock.patch.object(Assembly, "sign", after(Assembly.sign)).start()
        elif phase == "connecting":  # not one of every round: only if the members are others than before
            mock.patch.object(Forming, "_make", before).start()
        elif phase == "wire to vote":
            mock.patch.object(Vote, "ready", before).start()
        elif phase == "voting":
            mock.patch.object(Vote, "_verdict", after(lambda vote, _: vote._store.add(vote._ready_key, 1))).start()
        elif phase == "landing":
            mock.patch.object(PendingRound, "write", before).start()
        else:
            raise ValueError(phase)

    return armed

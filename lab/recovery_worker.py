"""A worker of `lab/recovery.py`: the same little training under Cadenza, torchft or torchrun's restart.

It writes a line for every step: the time, and how many steps are in the result so far.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

PERIOD = 10
PATIENCE_S = 3.0
OUTER = {"lr": 0.7, "momentum": 0.9, "nesterov": True}


@dataclass
class System:
    """How far the training is, what is done after each step of the optimizer, and whose method begins what in a round.

    Attributes:
        rounds: How many rounds have landed.
        moments: By name, an object and its method: "transfer", when all have agreed on who is in the round, and "vote",
            when the values are there and it is asked whether they count.
    """

    progress: Callable[[], int]
    rounds: Callable[[], int]
    step: Callable[[], None]
    finish: Callable[[], None]
    moments: dict[str, tuple[Any, str]]

    def doom(self, moment: str) -> None:
        """Let this process die at a moment of the next round."""
        setattr(*self.moments[moment], lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))


def cadenza(model: nn.Module, optimizer: torch.optim.Optimizer, given: argparse.Namespace) -> System:
    import cadenza
    from cadenza import checkpoint
    from cadenza.participants.vote import Vote

    logging.basicConfig(level=logging.WARNING)
    strategy = cadenza.diloco(PERIOD, outer_lr=OUTER["lr"], faults=cadenza.shrink(grace_s=PATIENCE_S))
    landed: list[int] = []

    def count(report: cadenza.RoundReport) -> None:
        if report.kind == "round":
            landed.append(report.step)

    sync = cadenza.attach(model, optimizer, strategy, membership=cadenza.join(), observers=[count])
    parts = {"model": model, "optimizer": optimizer, "sync": sync}
    if given.save and (folder := checkpoint.latest(given.into)):
        checkpoint.load(folder, **parts)

    def step() -> None:
        sync.step()
        if given.save and sync.clock % PERIOD == 0:
            checkpoint.save(given.into / f"step-{sync.clock}", **parts)

    moments = {"transfer": (sync.replica.participants, "agree"), "vote": (Vote, "ready")}
    return System(lambda: sync.clock, lambda: len(landed), step, sync.finish, moments)


def torchft(model: nn.Module, optimizer: torch.optim.Optimizer, given: argparse.Namespace) -> System:
    from torchft import Manager, ProcessGroupGloo
    from torchft.local_sgd import DiLoCo

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    patience = timedelta(seconds=PATIENCE_S)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=patience),
        min_replica_size=1,
        use_async_quorum=False,
        load_state_dict=model.load_state_dict,
        state_dict=model.state_dict,
        timeout=patience,
        quorum_timeout=timedelta(seconds=60),
        quorum_retries=given.quorum_retries,
        rank=0,
        world_size=1,
        replica_id=f"replica_{given.worker}",
        store_addr="127.0.0.1",
        store_port=store.port,
        hostname="127.0.0.1",
        lighthouse_addr=os.environ["LIGHTHOUSE"],
    )
    method = DiLoCo(manager, [model], optimizer, torch.optim.SGD(model.parameters(), **OUTER), sync_every=PERIOD)
    method.__enter__()

    def finish() -> None:
        method.__exit__(None, None, None)
        time.sleep(1.0)  # the others may read from this one's store
        manager.shutdown(wait=False)
        store.port  # noqa: B018 - it must live until here

    def progress() -> int:
        return manager.current_step() * PERIOD + method._local_step

    moments = {"transfer": (manager, "allreduce"), "vote": (manager, "should_commit")}
    return System(progress, manager.current_step, lambda: None, finish, moments)


def torchrun(model: nn.Module, optimizer: torch.optim.Optimizer, given: argparse.Namespace) -> System:
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

    dist.init_process_group("gloo")
    averager = PeriodicModelAverager(period=PERIOD)
    checkpoint = given.into / "checkpoint.pt"
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        averager.step = saved["step"]

    def step() -> None:
        averages = averager.step % PERIOD == 0
        averager.average_parameters(model.parameters())
        if averages and dist.get_rank() == 0:
            torch.save({"model": model.state_dict(), "step": averager.step}, f"{checkpoint}.part")
            os.replace(f"{checkpoint}.part", checkpoint)

    def finish() -> None:
        averager.average_parameters(model.parameters())

    return System(
        lambda: averager.step, lambda: averager.step // PERIOD, step, finish, {"transfer": (dist, "all_reduce")}
    )


def digest(model: nn.Module) -> str:
    flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("system", choices=["cadenza", "torchft", "torchrun"])
    parser.add_argument("--worker", type=int, default=int(os.environ.get("RANK", "0")))
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--step-s", type=float, required=True)
    parser.add_argument("--quorum-retries", type=int, default=0)
    parser.add_argument("--moment", default="transfer", help="at which moment of a round SIGUSR2 kills it")
    parser.add_argument("--save", action="store_true", help="torchrun's workers always do")
    parser.add_argument("--into", type=Path, required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    poisoned: list[int] = []
    doomed: list[int] = []
    signal.signal(signal.SIGUSR1, lambda *_: poisoned.append(1))
    signal.signal(signal.SIGUSR2, lambda *_: doomed.append(1))
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with (given.into / f"{given.worker}.jsonl").open("a") as file:

        def say(**figures: Any) -> None:
            file.write(json.dumps({"at": time.time(), **figures}) + "\n")
            file.flush()

        say(process=os.getpid())
        system = {"cadenza": cadenza, "torchft": torchft, "torchrun": torchrun}[given.system](model, optimizer, given)
        data = torch.Generator().manual_seed(1000 * given.worker + system.progress())
        rounds = system.rounds()
        while system.progress() < given.steps:
            batch = torch.randn(16, 64, generator=data)
            loss = (model(batch) - batch.flip(1)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            if poisoned:
                poisoned.clear()
                with torch.no_grad():
                    next(model.parameters()).fill_(float("nan"))
            if doomed:
                system.doom(given.moment)
            optimizer.step()
            time.sleep(given.step_s)
            system.step()
            say(step=system.progress(), **({"digest": digest(model)} if system.rounds() > rounds else {}))
            rounds = system.rounds()
        system.finish()
        finite = all(bool(parameter.isfinite().all()) for parameter in model.parameters())
        say(end=True, finite=finite, digest=digest(model))
    os._exit(0)  # torchft's threads would wait


if __name__ == "__main__":
    main()

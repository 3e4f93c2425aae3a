"""A worker of `lab.crew`: a tiny training by DiLoCo under `shrink` that writes a line for every round.

What it does at a step depends on its number and the step alone, so two runs in which all workers are in every round
have the same bits. SIGTERM lets it leave.
"""

from __future__ import annotations

import gc
import hashlib
import json
import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # the first step of an optimizer would import it, in every worker
from torch import nn

import cadenza
from cadenza.reports import RoundReport

__all__ = ["Log", "disagreeing", "work"]

COLLECT_EVERY = 100  # steps


def work(worker: int, rank: int, told: dict[str, Any]) -> None:
    """Train as one worker until the step that the file "last_step" names, and write of every round into a file."""
    torch.set_num_threads(1)
    leaving: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: leaving.append(1))
    logs = Path(told["logs"])
    os.dup2(os.open(logs / f"{worker}.err", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.WARNING, stream=sys.stderr)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    reports: list[RoundReport] = []
    faults = cadenza.shrink(grace_s=told["grace_s"], first_s=60.0)
    strategy = cadenza.diloco(told["period"], outer_lr=0.7, codec=cadenza.codecs.int8(), faults=faults)
    place = {"worker": worker, "workers": told["workers"], "secret": told.get("secret")}
    membership = cadenza.join(told["address"], **place)
    sync = cadenza.attach(model, optimizer, strategy, membership=membership, observers=[reports.append])
    with (logs / f"{worker}.jsonl").open("a") as file:
        _say(file, "joined", step=sync.clock)
        _tell(file, model, reports)  # of the round with which it has joined, before another step is taken
        while sync.clock < _last_step(logs) and not leaving:
            _take_step(model, optimizer, worker, sync.clock)
            time.sleep(told.get("step_s", 0.0))
            sync.step()
            _tell(file, model, reports)
            if told.get("collect") and sync.clock % COLLECT_EVERY == 0:
                gc.collect()
        if leaving:
            sync.close()
        else:
            sync.finish()
            _tell(file, model, reports)
        _say(file, "left" if leaving else "end", step=sync.clock, digest=_digest(model))


def _last_step(logs: Path) -> float:
    path = logs / "last_step"
    return int(path.read_text()) if path.exists() else float("inf")


def _take_step(model: nn.Module, optimizer: torch.optim.Optimizer, worker: int, step: int) -> None:
    data = torch.Generator().manual_seed(1_000_000 * worker + step)
    batch = torch.randn(4, 16, generator=data)
    optimizer.zero_grad()
    (model(batch) - batch.flip(1)).square().mean().backward()
    optimizer.step()


def _tell(file: Any, model: nn.Module, reports: list[RoundReport]) -> None:
    for report in reports:
        more = {"digest": _digest(model)} if report.kind == "round" else {"reason": report.reason}
        stall_s = round(report.stall_s, 3)
        _say(file, report.kind, step=report.step, members=report.participants, stall_s=stall_s, **more)
    reports.clear()


def _say(file: Any, kind: str, **figures: Any) -> None:
    file.write(json.dumps({"kind": kind, "at": round(time.time(), 3), **figures}) + "\n")
    file.flush()


def _digest(model: nn.Module) -> str:
    told = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    return hashlib.sha256(told).hexdigest()[:16]


class Log:
    """What a worker has written, read as it grows.

    Attributes:
        lines: All lines so far.
        rounds: Those of rounds that were held with this worker.
        changes: How often other members held a round than had held the one before.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._read = path, 0
        self.lines: list[dict[str, Any]] = []
        self.rounds: list[dict[str, Any]] = []
        self.changes = 0

    def grow(self) -> Log:
        """Read what is new."""
        if self._path.exists():
            with self._path.open("rb") as file:
                file.seek(self._read)
                whole, newline, _ = file.read().rpartition(b"\n")
            self._read += len(whole + newline)
            for line in map(json.loads, filter(None, whole.split(b"\n"))):
                self.lines.append(line)
                if line["kind"] == "round":
                    self.changes += bool(self.rounds) and self.rounds[-1]["members"] != line["members"]
                    self.rounds.append(line)
        return self

    @property
    def members(self) -> list[int]:
        """Who held the last round."""
        return self.rounds[-1]["members"] if self.rounds else []


def disagreeing(logs: list[Log]) -> list[int]:
    """Return steps after whose round two workers held other bits; the last step may have several rounds."""
    found: dict[int, set[str]] = {}
    rounds = [line for log in logs for line in log.grow().rounds]
    last = max((line["step"] for line in rounds), default=0)
    for line in rounds:
        if line["step"] < last:
            found.setdefault(line["step"], set()).add(line["digest"])
    return sorted(step for step, digests in found.items() if len(digests) > 1)

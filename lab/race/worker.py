"""One worker of a race: the same loop around every method. Started as `python -m lab.race.worker JOB` on every host.

Prints one line of JSON: how long its measured steps took, together and each, and a step of compute alone beside them,
what left its interface, its processor time and its peak memory, and held-out losses of the workers' average.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import time
import warnings
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lab import gpt
from lab.race import environments
from lab.race.jobs import Job
from lab.race.rivals import METHODS, Ready, prepare

INTERFACE = "eth0"
FLOOR_STEPS = 16  # of compute alone, before, between and after blocks of measured steps


class Matrices(torch.nn.Module):
    """Many values and next to no compute: what remains of a step is what a synchronisation costs."""

    def __init__(self, millions: float) -> None:
        super().__init__()
        width = 1000 if millions >= 1 else 100
        count = round(millions * 1e6 / width**2)
        self.weights = torch.nn.ParameterList(torch.randn(width, width) * 0.02 for _ in range(count))

    def forward(self, row: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return sum((weight[0] * row).sum() for weight in self.weights)  # type: ignore[return-value]


class Loop:
    """Steps of a method on a model; without one, of compute alone."""

    def __init__(self, job: Job, model: torch.nn.Module, batches: Iterator[Any], *, alone: bool = False) -> None:
        self.job, self.model, self.batches, self.taken = job, model, batches, 0
        if job.millions:
            self.optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        else:
            self.optimizer = torch.optim.AdamW(
                model.parameters(), lr=job.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True
            )
        self.ready = Ready(model, self.optimizer) if alone else prepare(model, self.optimizer, job)

    def step(self) -> None:
        job, ready = self.job, self.ready
        horizon = job.horizon or job.warm + job.steps
        if not job.millions:
            rate = gpt.rate_at(self.taken, horizon, peak=job.lr, warmup=job.lr_warmup)
            for group in self.optimizer.param_groups:
                group["lr"] = rate
        ready.model(*next(self.batches)).backward()
        ready.after_backward()
        if not job.millions:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        ready.optimizer.step()
        ready.after_step()
        ready.optimizer.zero_grad()
        self.taken += 1


class Run:
    """A job on this rank."""

    def __init__(self, job: Job) -> None:
        self.job, self.rank, self.workers = job, dist.get_rank(), dist.get_world_size()
        self.own_group = dist.new_group()  # the harness's own collectives never mix with a method's
        torch.manual_seed(job.seed)
        self.model, batches = self._matrices() if job.millions else self._gpt()
        self.twin = Loop(job, copy.deepcopy(self.model), batches, alone=True) if job.floor_every else None
        self.loop = Loop(job, self.model, batches)
        self.seconds: list[float] = []
        self.curve: list[tuple[int, float]] = []
        self.floor: list[float] = []

    def _gpt(self) -> tuple[torch.nn.Module, Iterator[Any]]:
        size = self.job.size
        self.corpus = gpt.Corpus.standard_library()
        shape = gpt.Shape(size.layers, size.width, size.heads, size.context)
        seed = 1000 * self.job.seed + self.rank
        return gpt.GPT(shape), gpt.batches(self.corpus.training, batch=size.batch, context=size.context, seed=seed)

    def _matrices(self) -> tuple[torch.nn.Module, Iterator[Any]]:
        model = Matrices(self.job.millions)
        row = torch.randn(next(model.parameters()).shape[0], generator=torch.Generator().manual_seed(self.rank))
        return model, iter(lambda: (row, row), None)

    def run(self) -> dict[str, Any]:
        for _ in range(self.job.warm):
            self.loop.step()
        self._measure_floor()
        reset_peak()
        block = self.job.floor_every or self.job.steps
        blocks = []
        for _ in range(0, self.job.steps, block):
            blocks.append(self._measure(block))
            self._measure_floor()
        elapsed, worked, sent = (sum(figures) for figures in zip(*blocks, strict=True))
        figures = {
            "elapsed_s": elapsed,
            "floor_s": sum(self.floor) / max(1, len(self.floor)),
            "cpu_s": worked,
            "bytes_sent": sent,
            "peak_bytes": status("VmHWM"),
            "seconds": self.seconds,
            "curve": self.curve,
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "versions": environments.versions(METHODS[self.job.method].environment),
        }
        dist.barrier(self.own_group)
        self.loop.ready.close()
        return figures

    def _measure(self, steps: int) -> tuple[float, float, int]:
        """Take so many steps from one moment on; return the seconds, those of the processor, and the bytes sent."""
        dist.barrier(self.own_group)
        sent, worked, began = interface_bytes(), time.process_time(), time.monotonic()
        for _ in range(steps):
            before = time.monotonic()
            self.loop.step()
            self.seconds.append(time.monotonic() - before)
            if self.job.evaluate_every and self.loop.taken % self.job.evaluate_every == 0:
                self.curve.append((self.loop.taken, self.held_out()))
        return time.monotonic() - began, time.process_time() - worked, interface_bytes() - sent

    def _measure_floor(self) -> None:
        """Take some steps of compute alone, from one moment on, and note what one takes."""
        if self.twin is None:
            return
        dist.barrier(self.own_group)
        began = time.monotonic()
        for _ in range(FLOOR_STEPS):
            self.twin.step()
        self.floor.append((time.monotonic() - began) / FLOOR_STEPS)

    @torch.no_grad()
    def held_out(self) -> float:
        """Return the held-out loss of the workers' mean; all values are as before afterwards."""
        parameters = list(self.model.parameters())
        kept = [parameter.detach().clone() for parameter in parameters]
        flat = torch.cat([parameter.flatten() for parameter in kept])
        dist.all_reduce(flat, group=self.own_group)
        for parameter, mean in zip(parameters, flat.split([p.numel() for p in kept]), strict=True):
            parameter.copy_(mean.view_as(parameter) / self.workers)
        size, windows = self.job.size, self.job.windows
        loss = gpt.held_out_loss(
            self.model,
            self.corpus.held_out,
            windows=windows,
            context=size.context,
            part=self.rank,
            parts=self.workers,
        )
        for parameter, value in zip(parameters, kept, strict=True):
            parameter.copy_(value)
        total = torch.tensor(loss, dtype=torch.float64)
        dist.all_reduce(total, group=self.own_group)
        return float(total) / windows


def interface_bytes() -> int:
    counter = Path(f"/sys/class/net/{INTERFACE}/statistics/tx_bytes")
    return int(counter.read_text()) if os.environ.get("GLOO_SOCKET_IFNAME") == INTERFACE else 0


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def status(what: str) -> int:
    text = Path("/proc/self/status").read_text()
    return int(text.split(f"{what}:")[1].split()[0]) * 1024


def main() -> None:
    warnings.simplefilter("ignore")  # the rivals' own; they are about their future
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(minutes=10))
    figures = Run(Job.from_json(sys.argv[1])).run()
    print("RESULT " + json.dumps(figures), flush=True)
    dist.barrier()
    os._exit(0)  # some libraries' threads keep the process from ending


if __name__ == "__main__":
    main()

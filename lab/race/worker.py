"""One worker of a race: the same loop around every method. Started as `python -m lab.race.worker JOB` on every host.

Prints one line of JSON: when its measured steps began and ended (the hosts share one clock), how long each step took,
what left its interface, its processor time and its peak memory, and held-out losses of the workers' average.
"""

from __future__ import annotations

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


class Matrices(torch.nn.Module):
    """Many values and next to no compute: what remains of a step is what a synchronisation costs."""

    def __init__(self, millions: float) -> None:
        super().__init__()
        width = 1000 if millions >= 1 else 100
        count = round(millions * 1e6 / width**2)
        self.weights = torch.nn.ParameterList(torch.randn(width, width) * 0.02 for _ in range(count))

    def forward(self, row: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return sum((weight[0] * row).sum() for weight in self.weights)  # type: ignore[return-value]


class Run:
    """A job on this rank."""

    def __init__(self, job: Job) -> None:
        self.job, self.rank, self.workers = job, dist.get_rank(), dist.get_world_size()
        self.own_group = dist.new_group()  # the harness's own collectives never mix with a method's
        torch.manual_seed(job.seed)
        self.model, self.batches = self._matrices() if job.millions else self._gpt()
        if job.millions:
            self.optimizer: torch.optim.Optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        else:
            self.optimizer = torch.optim.AdamW(
                self.model.parameters(), lr=job.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True
            )
        self.ready: Ready = prepare(self.model, self.optimizer, job)
        self.taken = 0

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

    def run(self) -> dict[str, Any]:
        for _ in range(self.job.warm):
            self.step()
        dist.barrier(self.own_group)
        reset_peak()
        seconds, curve, sent = [], [], interface_bytes()
        worked, started = time.process_time(), time.monotonic()
        for _ in range(self.job.steps):
            before = time.monotonic()
            self.step()
            seconds.append(time.monotonic() - before)
            if self.job.evaluate_every and self.taken % self.job.evaluate_every == 0:
                curve.append((self.taken, self.held_out()))
        ended = time.monotonic()
        figures = {
            "started": started,
            "ended": ended,
            "cpu_s": time.process_time() - worked,
            "bytes_sent": interface_bytes() - sent,
            "peak_bytes": status("VmHWM"),
            "seconds": seconds,
            "curve": curve,
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "versions": environments.versions(METHODS[self.job.method].environment),
        }
        dist.barrier(self.own_group)
        self.ready.close()
        return figures

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

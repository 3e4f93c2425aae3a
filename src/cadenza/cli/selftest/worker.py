"""``python -m cadenza.cli.selftest.worker PLAN RANK``: one worker of a selftest, which takes part in every trial."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from cadenza.cli.parent_death import end_with_parent
from cadenza.cli.selftest.parts import PARTS, Job
from cadenza.cli.selftest.plan import Plan, Trial, result_key
from cadenza.cli.selftest.setups import SHARED_MEMORY

__all__ = ["work"]


def work(plan: Plan, rank: int) -> None:
    """Take part in all trials, and tell the store what came of each."""
    host, port = plan.address.rsplit(":", 1)
    store = dist.TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=plan.timeout_s))
    for number, trial in enumerate(plan.trials):
        if rank < trial.setup.workers:
            store.set(result_key(number, rank), json.dumps(_try(plan, number, trial, rank, store)))


def _try(plan: Plan, number: int, trial: Trial, rank: int, store: dist.Store) -> dict[str, object]:
    start = time.monotonic()
    found: dict[str, object]
    try:
        device = trial.setup.device_of(rank)
        job = Job(rank, trial.setup.workers, device, plan.address)
        with _meeting(plan, number, trial, job, store):
            text, same = PARTS[trial.part].work(job)
        found = {"ok": True, "text": text, "same": same}
    except Exception as error:
        reason = str(error) or type(error).__name__
        found = {"ok": False, "text": reason.splitlines()[0], "same": "", "traceback": traceback.format_exc()}
    return {**found, "seconds": time.monotonic() - start}


@contextmanager
def _meeting(plan: Plan, number: int, trial: Trial, job: Job, store: dist.Store) -> Iterator[None]:
    """Have a process group for one trial: whatever fails in it, the next one has its own."""
    if job.device.type != "cpu":
        torch.get_device_module(job.device).set_device(job.device)
    os.environ["CADENZA_SHARED_MEMORY"] = "1" if trial.setup.way == SHARED_MEMORY else "0"
    if PARTS[trial.part].elastic:
        yield
        return
    dist.init_process_group(
        trial.setup.backend,
        store=dist.PrefixStore(f"trial/{number}", store),
        rank=job.rank,
        world_size=job.workers,
        timeout=timedelta(seconds=plan.timeout_s),
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    end_with_parent()
    torch.set_num_threads(1)
    work(Plan.from_json(sys.argv[1]), int(sys.argv[2]))

"""A host of `lab/chaos.py`: a process that has imported everything and forks workers, or a store, when it is told to.

It is told in lines of JSON and answers each with a process's number. Whoever is forked knows nothing of the training
that went on before it, as after any other start, but costs milliseconds; what ends it does not end the host.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import signal
import sys
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # the first step of an optimizer would import it, in every worker
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parent))
from gpt import GPT, Corpus, Shape, batches, held_out_loss, rate_at

import cadenza
from cadenza.engine.saving import local
from cadenza.membership import main as serve_store

SHAPE = Shape(layers=2, width=32, heads=2, context=32)


def serve() -> None:
    """Fork what is asked for, until the input ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody has to wait for the dead
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # until a worker can hear it
    corpus = Corpus.standard_library()
    for line in sys.stdin:
        told = json.loads(line)
        child = os.fork()
        if child == 0:
            _become(told, corpus)
        print(child, flush=True)


def _become(told: dict[str, Any], corpus: Corpus) -> None:
    code = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(told[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND), number)
        os.environ.update(told["environment"])
        logging.basicConfig(format="%(asctime)s %(message)s", level=logging.WARNING)
        if told["what"] == "store":
            serve_store(["--port", str(told["port"])])
        else:
            meet_mates(told["meeting"])
            work(corpus, **told["arguments"])
        code = 0
    except BaseException:
        logging.exception("ended")
    finally:
        sys.stdout.flush()
        os._exit(code)


def say(kind: str, **figures: Any) -> None:
    print(json.dumps({"kind": kind, "at": round(time.time(), 3), **figures}), flush=True)


def meet_mates(place: str) -> None:
    """Have a process group of this replica's ranks, if there are several."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if ranks > 1:
        dist.init_process_group(
            "gloo", init_method=f"file://{place}", rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
        )


def spread(model: nn.Module, kind: str) -> nn.Module:
    """Return the model as this rank of a replica has it."""
    if not dist.is_initialized():
        return model
    if kind == "ddp":
        return DistributedDataParallel(model)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


def work(corpus: Corpus, *, kind: str, steps: int, period: int, step_s: float, grace_s: float) -> None:
    """Train to the end as one worker, and tell of every round."""
    torch.set_num_threads(1)
    poisoned, hurried = [], []
    signal.signal(signal.SIGUSR1, lambda *_: poisoned.append(1))
    signal.signal(signal.SIGUSR2, lambda *_: hurried.append(1))
    number = int(os.environ["CADENZA_WORKER"]) * int(os.environ["WORLD_SIZE"]) + int(os.environ["RANK"])
    torch.manual_seed(1)
    model = spread(GPT(SHAPE), kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    faults = cadenza.shrink(grace_s=grace_s, first_s=max(60.0, 4 * grace_s))
    strategy = cadenza.diloco(period, outer_lr=0.7, codec=cadenza.codecs.int8(), faults=faults)
    if "CADENZA_SITE" in os.environ:  # a site meets by itself, too
        inner = cadenza.LevelPlan(max(1, period // 3), groups="site")
        strategy = replace(strategy, levels=(inner, *strategy.levels))
    reports: list[cadenza.RoundReport] = []
    membership = cadenza.join(replica=dist.group.WORLD if dist.is_initialized() else None)
    sync = cadenza.attach(model, optimizer, strategy, observers=[reports.append], membership=membership)
    say("joined", step=sync.clock)
    tell(sync, reports)  # now, while the anchors are those of the round in which it was let in
    data = batches(corpus.training, batch=8, context=SHAPE.context, seed=100_000 * number + sync.clock)
    taken = 0
    while sync.clock < steps:
        optimizer.param_groups[0]["lr"] = rate_at(sync.clock, steps, peak=3e-3, warmup=50, floor=0.02)
        given, wanted = next(data)
        optimizer.zero_grad()
        model(given, wanted).backward()
        optimizer.step()
        if poisoned:
            poisoned.clear()
            say("poisoned", step=sync.clock + 1)
            with torch.no_grad():
                local(next(model.parameters())).fill_(float("nan"))
        time.sleep(0.0 if hurried else step_s)
        sync.step()
        taken += 1
        tell(sync, reports)
    sync.finish()
    tell(sync, reports)
    values = [local(parameter.detach()) for parameter in model.parameters()]
    loss = held_out_loss(model, corpus.held_out, windows=512, context=SHAPE.context, part=0, parts=1) / 512
    say("end", digest=digest(values), loss=loss, taken=taken)


def tell(sync: cadenza.Synchronizer, reports: list[cadenza.RoundReport]) -> None:
    """Print what became of rounds; after one that landed, a digest of what it has left in the anchors."""
    for report in reports:
        figures: dict[str, Any] = {"step": report.step, "stall_s": round(report.stall_s, 3)}
        if report.kind == "round":
            figures |= {"members": report.participants, "digest": digest(sync.replica.level_state(0, 0).anchors)}
            outermost = report.level == len(sync.strategy.levels) - 1
            figures["circle"] = "" if outermost else os.environ["CADENZA_SITE"]
        say(report.kind, **figures, absent=report.absent, reason=report.reason)
    reports.clear()


def digest(tensors: list[torch.Tensor]) -> str:
    return hashlib.sha256(b"".join(local(tensor.detach()).numpy().tobytes() for tensor in tensors)).hexdigest()[:16]


if __name__ == "__main__":
    serve()

"""Every strategy on the fake accelerator and on the CPU, in a process of its own: the same bits, and no misuse."""

from __future__ import annotations

import copy
import gc
import json
import os
import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from unittest import mock

import torch
import torch.distributed as dist

import cadenza
import cadenza.testing
from cadenza import LevelPlan, Strategy, codecs, outer
from cadenza.codecs import native
from cadenza.common.process_groups import make_gloo_group
from cadenza.engine import host_copies
from cadenza.transports import Transport
from cadenza.transports.c10d import C10dTransport, Seat
from cadenza.transports.through_host import ThroughHost
from support import fake_accelerator
from support.device_mutants import MUTANTS

STEPS = 10


@dataclass(frozen=True)
class Case:
    """A strategy, and whether its rounds land late: then no step of the training loop waits for the device at all."""

    strategy: Strategy
    late: bool = False
    hosts: tuple[str, ...] | None = None
    by_gloo: bool = False
    elastic: bool = False
    dtype: torch.dtype = torch.float32
    by_norms: bool = False  # which a device sums up in another order


class GlooBetweenThreads:
    """A group whose threads meet over real Gloo, which does not know the device: values go through the host."""

    def __init__(self, worker: cadenza.testing.Worker, store: dist.Store) -> None:
        self.rank, self.ranks, self.timeout_s = worker.rank, worker.group.ranks, worker.group.timeout_s
        self.store, self.host_names = worker.group.store, worker.group.host_names
        self._meeting = store
        self._visits: Counter[tuple[int, ...]] = Counter()
        self._made: list[dist.ProcessGroup] = []

    def connect(self, ranks: Sequence[int], *, through_host: bool = False) -> Transport:
        members = tuple(sorted(ranks))
        self._visits[members] += 1
        store = dist.PrefixStore(f"{members} {self._visits[members]}", self._meeting)
        self._made.append(make_gloo_group(store, members.index(self.rank), len(members), self.timeout_s))
        below = C10dTransport(self._made[-1], Seat(members, members.index(self.rank), store, self.timeout_s))
        return ThroughHost(below, below.reaches)


def cases() -> dict[str, Case]:
    """Return all strategies that are run."""
    int8, fed_back = codecs.int8(), codecs.error_feedback(codecs.int8())
    two_hosts = ("north", "north", "south", "south")
    staged = Strategy(levels=(LevelPlan(2, groups="host"), LevelPlan(4, outer=outer.nesterov(), codec=fed_back)))
    staged_late = Strategy(levels=(LevelPlan(2, groups="host"), LevelPlan(4, outer=outer.nesterov(), delay=1)))
    return {
        "local_sgd": Case(cadenza.local_sgd(4)),
        "local_sgd late": Case(cadenza.local_sgd(4, delay=2), late=True),
        "local_sgd offloaded": Case(cadenza.local_sgd(4, delay=2, offload=True), late=True),
        "post_local_sgd": Case(cadenza.post_local_sgd(4, warmup_steps=3)),
        "hierarchical": Case(cadenza.hierarchical({2: "host", 4: "all"}, codec=int8), hosts=two_hosts),
        "staged": Case(staged, hosts=two_hosts),
        "staged late": Case(staged_late, hosts=two_hosts),
        "slowmo": Case(cadenza.slowmo(4)),
        "snoo": Case(cadenza.snoo(4)),
        "diloco": Case(cadenza.diloco(4)),
        "diloco clipped": Case(cadenza.diloco(4, clip=0.1), by_norms=True),
        "diloco late": Case(cadenza.diloco(4, delay=2, codec=fed_back), late=True),
        "diloco a period late": Case(cadenza.diloco(4, delay=4), late=True),
        "diloco offloaded": Case(cadenza.diloco(4, offload=True)),
        "diloco offloaded late": Case(cadenza.diloco(4, delay=2, codec=fed_back, offload=True), late=True),
        "eager_diloco": Case(cadenza.eager_diloco(4), late=True),
        "edit": Case(cadenza.edit(4), by_norms=True),
        "muloco": Case(cadenza.muloco(4)),
        "noloco": Case(cadenza.noloco(4)),
        "streaming_diloco": Case(cadenza.streaming_diloco(6, delay=4, layers=1), late=True),
        "streaming int8 mixed": Case(cadenza.streaming_diloco(6, codec=int8, delay=2, layers=1, alpha=0.5), late=True),
        "streaming offloaded": Case(cadenza.streaming_diloco(6, delay=2, layers=1, alpha=0.5, offload=True), late=True),
        "sparse_loco": Case(cadenza.sparse_loco(4)),
        "sparse_loco late": Case(cadenza.sparse_loco(4, delay=2), late=True),
        "demo": Case(cadenza.demo()),
        "des_loc": Case(cadenza.des_loc(4)),
        "bf16": Case(cadenza.diloco(4, codec=codecs.bf16(), delay=1), late=True),
        "auto": Case(cadenza.diloco(4, codec="auto")),
        "by Gloo": Case(cadenza.diloco(4, delay=2, codec=fed_back), late=True, by_gloo=True),
        "by Gloo sparse": Case(cadenza.sparse_loco(4), by_gloo=True),
        "by Gloo staged": Case(staged, hosts=two_hosts, by_gloo=True),
        "16 bits": Case(cadenza.diloco(4, delay=2), late=True, dtype=torch.bfloat16),
        "16 bits offloaded": Case(cadenza.diloco(4, delay=2, offload=True), late=True, dtype=torch.bfloat16),
        "shrink": Case(cadenza.diloco(4, offload=True, faults=cadenza.shrink()), elastic=True),
        "torch's Adam": Case(Strategy(levels=(LevelPlan(4, outer=outer.optimizer(torch.optim.Adam, lr=0.01)),))),
    }


def train(
    worker: cadenza.testing.Worker, model: torch.nn.Module, case: Case, store: dist.Store, far: bool
) -> list[torch.Tensor]:
    """Train on the device or not; return the state before the last round, and the parameters after it."""
    if far:
        torch.accelerator.set_stream(torch.Stream(fake_accelerator.DEVICE))  # a user with a stream of his own
    model = copy.deepcopy(model).to(case.dtype)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if far:
                setattr(module, name, torch.nn.Parameter(fake_accelerator.on_device(parameter)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    group = GlooBetweenThreads(worker, store) if case.by_gloo else None
    membership = worker.membership() if case.elastic else None
    sync = cadenza.attach(model, optimizer, case.strategy, process_group=group, membership=membership)
    for step in range(STEPS):
        if step == 5:  # where rounds land late, one is in flight
            sync.load_state_dict(sync.state_dict())
            with sync.averaged():
                pass
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=worker.generator).to(case.dtype)
            noise = fake_accelerator.on_device(noise) if far else noise
            parameter.grad = parameter.detach() * 0.3 + noise
        sync.average_gradients()
        optimizer.step()
        due = sync.next_round is None or sync.clock + 1 >= sync.next_round
        when = "in the training loop" if case.late else "between rounds"
        quiet = far and (case.late or not due)
        with fake_accelerator.no_host_waits(when) if quiet else nullcontext():
            sync.step()
        for pending in sync.replica.state.pending.values():
            pending.outcome.exception()  # so that what has been enqueued does not depend on luck
    state = sync.state_dict()
    sync.finish()
    found = [*model.parameters(), *(value for value in state.values() if isinstance(value, torch.Tensor))]
    return [value.detach().cpu() for value in found]


def run(case: Case, *, only_far: bool = False) -> str:
    """Return what was wrong; nothing, if all is well."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(40, 40), torch.nn.Linear(40, 40))
    found = []
    for far in (True,) if only_far else (False, True):
        # The codecs' machine code is for the CPU; their contract says that its bytes are those of torch's operations.
        codes = (
            nullcontext() if far or case.strategy.offload else mock.patch.object(native, "kernels", return_value=None)
        )
        with codes, cadenza.testing.workers(4 if case.hosts else 2, hosts=case.hosts, timeout_s=60.0) as pool:
            try:
                found.append(pool.run(train, model, case, dist.HashStore(), far))
            except BaseException:
                return traceback.format_exc()
    gc.collect()
    fake_accelerator.settle()
    told = fake_accelerator.freed_too_early.copy()
    fake_accelerator.freed_too_early.clear()
    if told:
        return f"{len(told)} times: {told[0]}"
    if only_far:
        return ""
    pairs = [pair for near, far in zip(*found, strict=True) for pair in zip(near, far, strict=True)]
    alike = partial(torch.allclose, rtol=1e-4, atol=1e-6) if case.by_norms else torch.equal
    wrong = sum(not alike(near, far) for near, far in pairs)
    return f"{wrong} of {len(pairs)} tensors differ from the CPU's." if wrong else ""


def run_mutant(name: str) -> str:
    """Return what was found wrong with a mistake in the engine."""
    case, mistake, _ = MUTANTS[name]
    with mistake:
        return run(cases()[case], only_far=True)


def run_all(names: list[str]) -> dict[str, str]:
    """Return what was wrong with each of some cases or mutants, found in a process of its own."""
    paths = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "support.device_runs", *names]
    done = subprocess.run(command, env={**os.environ, **paths}, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    told: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return told


if __name__ == "__main__":
    fake_accelerator.install()
    host_copies._BUFFER_BYTES = 1 << 12  # so that a strip takes many
    torch.set_num_threads(1)
    known = cases()
    print(json.dumps({name: run(known[name]) if name in known else run_mutant(name) for name in sys.argv[1:]}))

"""Replicas of several ranks that train under `shrink`, each with a process group of its own as under torchrun."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import cadenza
from support.faults import LEASE_S, Told, check_untouched, everything_of, rank

RANKS = 2  # of a replica


def board() -> dist.Store:
    """A store for the ranks of this call, beside the one in which workers meet."""
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
    return dist.PrefixStore(f"islands {os.environ['TORCHELASTIC_RESTART_COUNT']}", store)


def make_world(replica: int, life: int = 0) -> None:
    """Have a process group of this replica's ranks alone: one's death is nothing to the others."""
    place = dist.PrefixStore(f"replica {replica} life {life}", board())
    dist.init_process_group("gloo", store=place, rank=rank() % RANKS, world_size=RANKS, timeout=timedelta(seconds=20))


class Net(nn.Module):
    """Parameters whose shards are unequal, and one of which is empty on the second rank."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 15), nn.Tanh(), nn.Linear(15, 4), nn.Tanh())
        self.last = nn.Linear(4, 1)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.last(self.layers(batch))  # type: ignore[no-any-return]


def build(kind: str, seed: int, mesh: DeviceMesh | None = None) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A small model, the same one on all ranks of a replica."""
    torch.manual_seed(100 + seed)
    model: nn.Module = Net()
    if kind == "fsdp":
        mesh = mesh if mesh is not None else init_device_mesh("cpu", (RANKS,))
        for layer in (model.layers, model.last):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        model = DistributedDataParallel(model)
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def take_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, replica: int, number: int, step: int, sync: Any = None
) -> None:
    """One step of a replica; each rank has data of its own."""
    generator = torch.Generator().manual_seed(10000 * replica + 5000 * number + step)
    batch = torch.randn(8, 6, generator=generator)
    optimizer.zero_grad()
    (model(batch) - batch[:, :1]).square().mean().backward()
    if sync is not None:
        sync.average_gradients()
    optimizer.step()


def local_values(model: nn.Module) -> torch.Tensor:
    """What this rank holds of the parameters."""
    parts = (p.to_local() if hasattr(p, "to_local") else p for p in model.parameters())
    return torch.cat([part.detach().flatten() for part in parts])


def train(
    port: int,
    kind: str,
    replicas: int,
    strategy: cadenza.Strategy,
    steps: int,
    *,
    replica: int | None = None,
    life: int = 0,
    at: dict[int, Callable[[Any], None]] | None = None,
    step_s: float = 0.0,
    then: Callable[[Any, nn.Module, torch.optim.Optimizer], Any] | None = None,
    site: str | None = None,
) -> dict[str, Any]:
    """Train one rank of a replica to the end; return what can be compared."""
    replica = rank() // RANKS if replica is None else replica
    make_world(replica, life)
    model, optimizer = build(kind, replica)
    told = Told()
    membership = cadenza.join(
        f"127.0.0.1:{port}", worker=replica, workers=replicas, replica=dist.group.WORLD, lease_s=LEASE_S, site=site
    )
    sync = cadenza.attach(model, optimizer, strategy, membership=membership, observers=[told])
    joined_at, pending = sync.clock, dict(at or {})
    while sync.clock < steps:
        take_step(model, optimizer, replica, rank() % RANKS, sync.clock, sync)
        for step in sorted(step for step in pending if step <= sync.clock + 1):
            pending.pop(step)(sync)
        time.sleep(step_s)
        kept, chain, count = everything_of(sync), sync.replica.participants.history, len(told)  # type: ignore[attr-defined]
        sync.step(samples=8)
        if not strategy.delay and chain == sync.replica.participants.history:  # type: ignore[attr-defined]
            check_untouched(kept, sync, told[count:])
    extra = then(sync, model, optimizer) if then is not None else None
    sync.finish()
    return {
        "replica": replica,
        "joined_at": joined_at,
        "clock": sync.clock,
        "values": local_values(model),
        "rounds": told.steps("round"),
        "failed": told.steps("failed"),
        "reasons": [report.reason for report in told if report.reason],
        "stalls": {report.step: report.stall_s for report in told},
        "participants": [report.participants for report in told if report.kind == "round"],
        "drifts": [report.drift for report in told if report.kind == "round"],
        "raw_bytes": [report.raw_bytes for report in told if report.kind == "round"],
        "then": extra,
    }

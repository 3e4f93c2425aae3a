"""torchft's LocalSGD, DiLoCo and Streaming DiLoCo; a worker is a replica, the first host has the lighthouse.

torchft advertises the host name to the other replicas, and namespaces share one; so the address is given instead.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from datetime import timedelta

import torch
import torch.distributed as dist
from lab.race.jobs import Job
from lab.race.rivals import Ready
from lab.race.rivals.addresses import own_address
from torchft import Manager, ProcessGroupGloo
from torchft.coordination import LighthouseServer
from torchft.local_sgd import DiLoCo, LocalSGD

LIGHTHOUSE_PORT = 29510
LONG = timedelta(minutes=10)


def prepare(model: torch.nn.Module, optimizer: torch.optim.Optimizer, job: Job, variant: str) -> Ready:
    logging.getLogger("torchft").setLevel(logging.ERROR)
    rank, workers = dist.get_rank(), dist.get_world_size()
    address = own_address()
    lighthouse = None
    if rank == 0:
        lighthouse = LighthouseServer(bind=f"0.0.0.0:{LIGHTHOUSE_PORT}", min_replicas=workers, join_timeout_ms=60_000)
    dist.barrier()
    store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=LONG),
        min_replica_size=workers,
        use_async_quorum=False,
        load_state_dict=model.load_state_dict,
        state_dict=model.state_dict,
        init_sync=False,  # all start from the same seed, as its documentation recommends then
        timeout=LONG,
        quorum_timeout=LONG,
        rank=0,
        world_size=1,
        replica_id=f"replica_{rank}",
        store_addr=address,
        store_port=store.port,
        hostname=address,
        lighthouse_addr=f"http://{os.environ['MASTER_ADDR']}:{LIGHTHOUSE_PORT}",
    )
    method = METHODS[variant](manager, model, optimizer, job)
    method.__enter__()

    def close() -> None:
        method.__exit__(None, None, None)
        dist.barrier()  # a lighthouse that goes first leaves the others complaining
        manager.shutdown(wait=False)
        if lighthouse is not None:
            lighthouse.shutdown()

    return Ready(model, optimizer, close=close, keep=store)  # its peers read the store


def local_sgd(manager: Manager, model: torch.nn.Module, optimizer: torch.optim.Optimizer, job: Job) -> LocalSGD:
    return LocalSGD(manager, model, optimizer, sync_every=job.period)


def diloco(manager: Manager, model: torch.nn.Module, optimizer: torch.optim.Optimizer, job: Job) -> DiLoCo:
    return DiLoCo(manager, [model], optimizer, outer(model.parameters(), job), sync_every=job.period)


def streaming(manager: Manager, model: torch.nn.Module, optimizer: torch.optim.Optimizer, job: Job) -> DiLoCo:
    parts = split(model, job.settings.get("fragments", 2))
    return DiLoCo(
        manager,
        list(parts),
        optimizer,
        [outer(part.parameters(), job) for part in parts],
        sync_every=job.period,
        fragment_sync_delay=job.settings.get("delay", 2),
        fragment_update_alpha=job.settings.get("alpha", 0.5),
    )


METHODS = {"local_sgd": local_sgd, "diloco": diloco, "streaming": streaming}


def outer(parameters: Iterable[torch.nn.Parameter], job: Job) -> torch.optim.Optimizer:
    lr, momentum = job.settings.get("outer_lr", 0.7), job.settings.get("outer_momentum", 0.9)
    return torch.optim.SGD(parameters, lr=lr, momentum=momentum, nesterov=True)


def split(model: torch.nn.Module, count: int) -> list[torch.nn.Module]:
    """Return modules that hold the model's parameters in order, in parts of about equal size."""
    parts = [torch.nn.Module() for _ in range(count)]
    total, seen = sum(p.numel() for p in model.parameters()), 0
    for name, parameter in model.named_parameters():
        parts[min(count - 1, seen * count // total)].register_parameter(name.replace(".", "_"), parameter)
        seen += parameter.numel()
    return parts

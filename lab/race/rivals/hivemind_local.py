"""hivemind's Optimizer with local updates: peers find each other over its own network, and average by samples seen.

Its rounds begin by the clock, not by the step: peers announce their progress and gather for `matchmaking_time`.
"""

from __future__ import annotations

import hivemind
import torch
import torch.distributed as dist
from lab.race.jobs import Job
from lab.race.rivals import Ready
from lab.race.rivals.addresses import own_address


def prepare(model: torch.nn.Module, optimizer: torch.optim.Optimizer, job: Job, variant: str) -> Ready:
    here = [f"/ip4/{own_address()}/tcp/0"]
    first = [None]
    if dist.get_rank() == 0:
        dht = hivemind.DHT(host_maddrs=here, start=True)
        first = [[str(address) for address in dht.get_visible_maddrs()]]
    dist.broadcast_object_list(first, src=0)
    if dist.get_rank() != 0:
        dht = hivemind.DHT(host_maddrs=here, initial_peers=first[0], start=True)
    stepped = hivemind.Optimizer(
        dht=dht,
        run_id="race",
        optimizer=optimizer,
        use_local_updates=True,
        target_batch_size=job.period * job.size.batch * dist.get_world_size(),
        batch_size_per_step=job.size.batch,
        matchmaking_time=job.settings.get("matchmaking_s", 3.0),
        averaging_timeout=120.0,
        delay_state_averaging=job.settings.get("overlap", True),
    )
    dist.barrier()

    def close() -> None:
        dist.barrier()
        stepped.shutdown()
        dht.shutdown()

    return Ready(model, stepped, close=close)

"""Ray Core with `shrink`: every worker is a task with `max_retries`, and only the one that dies is started again.

    python examples/ray_core_shrink.py

No process group is initialised: the workers meet in a store, which the driver keeps. A worker kills itself here in the
middle, once; the others go on, and the new one takes their state at the next round.
"""

import argparse
import os
import signal
import tempfile
import time
from pathlib import Path

import ray
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import cadenza
from cadenza.membership import serve


@ray.remote(num_cpus=1, max_retries=3)
def train(worker, workers, store, steps, folder):
    torch.set_num_threads(1)  # the workers share this machine's cores
    digits, labels = map(torch.tensor, load_digits(return_X_y=True))
    digits = digits.float() / 16
    shuffled = torch.randperm(len(digits), generator=torch.Generator().manual_seed(0))
    held_out, mine = shuffled[:360], shuffled[360:][worker::workers]

    torch.manual_seed(worker)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    strategy = cadenza.diloco(period=10, outer_momentum=0.5, faults=cadenza.shrink(quorum=0))
    membership = cadenza.join(store, worker=worker, workers=workers)
    sync = cadenza.attach(model, optimizer, strategy, membership=membership)
    starts = Path(folder) / f"worker-{worker}"
    starts.open("a").write(f"{sync.clock}\n")

    # Not range(steps): who comes back goes on from the others' step. This short run also waits for the missing one.
    while sync.clock < steps or len(sync.members) < workers:
        batch = mine[torch.randint(len(mine), (32,))]
        loss = F.cross_entropy(model(digits[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        sync.step()
        if len(sync.members) < workers:
            time.sleep(0.05)
        if worker == 1 and sync.clock == 25 and len(starts.read_text().split()) == 1:
            os.kill(os.getpid(), signal.SIGKILL)  # a machine is gone
    sync.finish()

    with torch.no_grad():
        logits = model(digits[held_out])
    accuracy = (logits.argmax(1) == labels[held_out]).float().mean()
    return F.cross_entropy(logits, labels[held_out]).item(), accuracy.item(), starts.read_text().split()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    if not ray.is_initialized():
        ray.init(num_cpus=given.workers, include_dashboard=False, object_store_memory=100_000_000)
    host = ray.util.get_node_ip_address()
    store = serve(host=host)  # lives as long as the driver
    with tempfile.TemporaryDirectory() as folder:
        tasks = [
            train.remote(worker, given.workers, f"{host}:{store.port}", given.steps, folder)
            for worker in range(given.workers)
        ]
        results = ray.get(tasks)
    for worker, (_, _, starts) in enumerate(results):
        print(f"worker {worker} was started at step {', then at step '.join(starts)}")
    loss, accuracy, _ = results[0]
    print(f"{given.workers} workers, {given.steps} steps: loss {loss:.3f}, accuracy {accuracy:.1%} on held-out digits")
    return results


if __name__ == "__main__":
    main()

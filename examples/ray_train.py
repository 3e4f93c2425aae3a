"""DiLoCo under Ray Train: checkpoints of all workers, and a restart from them when one dies.

    python examples/ray_train.py

Ray starts the workers and their process group. `integrations.ray.report` saves every worker's own part, `resume` gives
it back. A worker kills itself here in the middle, once, to show it.
"""

import argparse
import os
import signal
import tempfile

import ray
import ray.train
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ray.train.torch import TorchTrainer
from sklearn.datasets import load_digits
from torch import nn

import cadenza
from cadenza.integrations.ray import report, resume


def train(config):
    torch.set_num_threads(1)  # the workers share this machine's cores
    rank, world = dist.get_rank(), dist.get_world_size()
    digits, labels = map(torch.tensor, load_digits(return_X_y=True))
    digits = digits.float() / 16
    shuffled = torch.randperm(len(digits), generator=torch.Generator().manual_seed(0))
    held_out, mine = shuffled[:360], shuffled[360:][rank::world]

    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    sync = cadenza.attach(model, optimizer, cadenza.diloco(period=16, outer_momentum=0.5))
    parts = {"model": model, "optimizer": optimizer, "sync": sync}
    begun = resume(**parts) is None
    first = sync.clock

    while sync.clock < config["steps"]:
        batch = mine[torch.randint(len(mine), (32,))]
        loss = F.cross_entropy(model(digits[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        sync.step()
        if sync.clock % 25 == 0:  # in the middle of a period: every worker has a model of its own
            report({"step": sync.clock, "loss": loss.item()}, **parts)
        if begun and rank == 1 and sync.clock == config["steps"] // 2 + 5:
            ray.train.get_all_reported_checkpoints()  # waits until Ray has noted the last one
            os.kill(os.getpid(), signal.SIGKILL)  # a machine is gone
    sync.finish()

    with torch.no_grad():
        logits = model(digits[held_out])
    accuracy = (logits.argmax(1) == labels[held_out]).float().mean()
    loss = F.cross_entropy(logits, labels[held_out])
    metrics = {"first": first, "loss": loss.item(), "accuracy": accuracy.item()}
    with tempfile.TemporaryDirectory() as folder:  # all have the same model now, so one of them saves it
        torch.save(model.state_dict(), f"{folder}/model.pt")
        ray.train.report(metrics, checkpoint=ray.train.Checkpoint.from_directory(folder) if rank == 0 else None)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    if not ray.is_initialized():
        ray.init(num_cpus=given.workers, include_dashboard=False, object_store_memory=100_000_000)
    with tempfile.TemporaryDirectory() as folder:  # on several machines: a folder or bucket that all of them reach
        trainer = TorchTrainer(
            train,
            train_loop_config={"steps": given.steps},
            scaling_config=ray.train.ScalingConfig(num_workers=given.workers),
            run_config=ray.train.RunConfig(
                storage_path=folder, name="digits", failure_config=ray.train.FailureConfig(max_failures=1)
            ),
        )
        metrics = trainer.fit().metrics
    print(f"a worker died, and all went on from step {metrics['first']}")
    print(
        f"{given.workers} workers, {given.steps} steps: loss {metrics['loss']:.3f}, "
        f"accuracy {metrics['accuracy']:.1%} on held-out digits"
    )
    return metrics


if __name__ == "__main__":
    main()

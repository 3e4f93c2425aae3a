"""Ranks that compute as unlike machines do: other vector instructions, thread counts, no C compiler; a process each.

What torch dispatches to is settled when it is imported, so these ranks cannot come from the pool.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import cadenza
from cadenza import LevelPlan, Strategy, codecs, outer
from cadenza.checkpoint.folders import collect_part

# The environment of each machine: this one's own instructions, plain ones, and two threads without machine code.
MACHINES = (
    {"OMP_NUM_THREADS": "1"},
    {"OMP_NUM_THREADS": "1", "ATEN_CPU_CAPABILITY": "default"},
    {"OMP_NUM_THREADS": "2", "CADENZA_NATIVE": "0"},
)
PERIOD, STEPS = 2, 8


def strategies() -> dict[str, Strategy]:
    """Return the strategies that unlike machines train with."""
    adaptive = cadenza.adaptive(2, target_drift=1e-4, minimum=2, maximum=4)
    pairs = ((0, 1), (2,))
    return {
        "local_sgd": cadenza.local_sgd(PERIOD),
        "diloco": cadenza.diloco(PERIOD),
        "diloco late": cadenza.diloco(PERIOD, delay=1),
        "diloco a period late": cadenza.diloco(PERIOD, delay=PERIOD),
        "diloco clipped": cadenza.diloco(PERIOD, clip=0.01),
        "slowmo": cadenza.slowmo(PERIOD),
        "streaming int8": cadenza.streaming_diloco(4, codec=codecs.int8(), delay=1, layers=1),
        "streaming e3m0": cadenza.streaming_diloco(4, delay=1, layers=1),
        "sparse_loco": cadenza.sparse_loco(PERIOD),
        "bf16 with feedback": cadenza.diloco(PERIOD, codec=codecs.error_feedback(codecs.bf16())),
        "hierarchical int8": cadenza.hierarchical({PERIOD: pairs, 2 * PERIOD: "all"}, codec=codecs.int8()),
        "adaptive": Strategy(levels=(LevelPlan(adaptive, outer=outer.nesterov(), codec=codecs.int8()),)),
        "adaptive mean": Strategy(levels=(LevelPlan(adaptive),)),
        "demo": cadenza.demo(),
        "torch's Adam": _with(outer.optimizer(torch.optim.Adam, lr=1e-3)),
    }


def _with(update: outer.Outer) -> Strategy:
    return Strategy(levels=(LevelPlan(cadenza.every(PERIOD), outer=update),))


def train(strategy: Strategy, folder: Path) -> dict[str, Any]:
    """Train; return what must be the same on all ranks: each round's drift, the state after each step, the end."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(200, 300), torch.nn.Tanh(), torch.nn.Linear(300, 200))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    reports: list[cadenza.RoundReport] = []
    sync = cadenza.attach(model, optimizer, strategy, observers=[reports.append])
    generator = torch.Generator().manual_seed(dist.get_rank())
    prints: list[str] = []
    for _ in range(STEPS):
        model(torch.randn(16, 200, generator=generator)).square().mean().backward()
        sync.average_gradients()
        optimizer.step()
        optimizer.zero_grad()
        sync.step()
        prints.append(collect_part(model, [optimizer], sync, None).fingerprint)
    shared = {key: value for key, value in sync.state_dict().items() if key.startswith("shared/")}
    cadenza.checkpoint.save(folder / "step", model=model, optimizer=optimizer, sync=sync)
    sync.finish()
    return {
        "drift": [(report.step, report.fragment, report.drift) for report in reports if len(report.participants) == 3],
        "fingerprints": prints,
        "shared": shared,
        "parameters": [parameter.detach() for parameter in model.parameters()],
        "reports": len(reports),
    }


def run_this_rank(root: Path) -> None:
    """Train with every strategy, and leave what came of it in a file."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(str(root / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    wanted = json.loads(os.environ["STRATEGIES"])
    found = {name: train(strategy, root / name) for name, strategy in strategies().items() if name in wanted}
    (root / f"{rank}.pickle").write_bytes(pickle.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def train_on_unlike_machines(root: Path, names: Sequence[str]) -> list[dict[str, Any]]:
    """Return what `train` gave on each machine, by strategy."""
    common = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "WORLD_SIZE": str(len(MACHINES)),
        "STRATEGIES": json.dumps(list(names)),
    }
    command = [sys.executable, "-m", "support.unlike_machines", str(root)]
    with tempfile.TemporaryFile("w+") as told:
        processes = [
            subprocess.Popen(command, env={**common, **own, "RANK": str(rank)}, stdout=told, stderr=told)
            for rank, own in enumerate(MACHINES)
        ]
        try:
            codes = [process.wait(180) for process in processes]
        finally:
            for process in processes:
                process.kill()
        told.seek(0)
        assert not any(codes), told.read()
    return [pickle.loads((root / f"{rank}.pickle").read_bytes()) for rank in range(len(MACHINES))]


if __name__ == "__main__":
    run_this_rank(Path(sys.argv[1]))

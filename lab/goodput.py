"""How much of the work of four workers counts, while one is at half speed and one is killed every minute, by policy.

A step is a sleep and a real step on a little network; work counts when a round with it has landed, so what a killed
worker had done since its last round is lost, and so is the time in which anybody waits. Goodput is the work that counts
in a second, over what the same workers do undisturbed, the slow one counted as half of one. The held-out loss is that
of the last round of each worker at full speed: all policies have had the same time by then.

    python -m lab.goodput --seconds 300 --runs 3
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import cadenza
from cadenza.participants.store import serve
from cadenza.reports import RoundReport

RESULTS = Path(__file__).parent / "results" / "goodput.json"
WORKERS, STEP_S, PERIOD = 4, 0.05, 20
POLICIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # what the faults are told, and what the strategy
    "barrier": ({}, {}),
    "commit_at=0.75": ({"commit_at": 0.75}, {}),
    "commit_at=0.5": ({"commit_at": 0.5}, {}),
    "commit_at=1, delay": ({"commit_at": 1, "quorum": 0.0}, {"delay": PERIOD // 2}),  # Decoupled DiLoCo
}


def network(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 32))


def work(worker: int, address: str, policy: str, slow: bool, path: Path) -> None:
    """Train until killed; write down at every round when it landed, how many own steps it has counted, and the loss."""
    torch.set_num_threads(1)
    teacher, model = network(seed=1), network(seed=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(time.time_ns() + worker)
    held_out = torch.randn(512, 32, generator=torch.Generator().manual_seed(3))
    landed: list[RoundReport] = []

    def count(report: RoundReport) -> None:
        if report.kind == "round":
            landed.append(report)

    def loss(batch: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            wanted = teacher(batch)
        return (model(batch) - wanted).square().mean()

    faults, options = POLICIES[policy]
    strategy = cadenza.diloco(period=PERIOD, faults=cadenza.shrink(**faults), **options)
    membership = cadenza.join(address, worker=worker, workers=WORKERS)
    sync = cadenza.attach(model, optimizer, strategy, membership=membership, observers=[count])
    done = 0
    landed.clear()
    with path.open("a") as file:
        while True:
            time.sleep(STEP_S * (2 if slow else 1))
            loss(torch.randn(8, 32, generator=data)).backward()
            optimizer.step()
            optimizer.zero_grad()
            done += 1
            sync.step()
            if landed:
                stall_s = sum(report.stall_s for report in landed)
                told = [time.time(), done, len(landed[-1].participants), float(loss(held_out).detach()), stall_s]
                print(json.dumps(told), file=file, flush=True)
                done = 0
                landed.clear()


def run(policy: str, seconds: float, *, slow: bool, kill_every_s: float | None) -> dict[str, float]:
    """Return what counted, and how good the model is after this time."""
    store = serve(host="127.0.0.1")
    address = f"127.0.0.1:{store.port}"
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{worker}.jsonl" for worker in range(WORKERS)]

        def start(worker: int) -> subprocess.Popen[bytes]:
            halves = ["--slow"] if slow and worker == WORKERS - 1 else []
            command = [sys.executable, "-m", "lab.goodput", "--worker", str(worker), "--store", address]
            return subprocess.Popen([*command, "--policy", policy, "--path", str(paths[worker]), *halves])

        processes = [start(worker) for worker in range(WORKERS)]
        try:
            while not all(path.exists() and path.read_text().count("\n") >= 2 for path in paths):
                time.sleep(0.05)
            began = killed_at = time.time()
            kills = 0
            while time.time() < began + seconds:
                time.sleep(0.1)
                if kill_every_s and time.time() > killed_at + kill_every_s * (0.5 if not kills else 1):
                    victim = kills % (WORKERS - 1)
                    processes[victim].send_signal(signal.SIGKILL)
                    processes[victim].wait()
                    processes[victim] = start(victim)
                    kills, killed_at = kills + 1, time.time()
        finally:
            for process in processes:
                process.kill()
                process.wait()
        told = [[json.loads(x) for x in path.read_text().splitlines() if x.endswith("]")] for path in paths]
    lines = [[line for line in one if began < line[0] < began + seconds] for one in told]
    counted = sum(done for one in lines for _, done, *_ in one)
    quick = [one for one in lines[: WORKERS - 1] if one]
    losses = [one[-1][3] for one in quick]
    return {
        "steps_a_second": round(counted / seconds, 2),
        "rounds": sum(map(len, lines)) / WORKERS,
        "kills": kills,
        "loss": round(statistics.median(losses), 5) if losses else math.nan,
        "standstill_a_round_s": round(statistics.fmean(line[4] for one in quick for line in one), 4),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--kill-every-s", type=float, default=60.0)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--policies", nargs="+", default=list(POLICIES))
    parser.add_argument("--worker", type=int)
    for name in ("--store", "--policy", "--path"):
        parser.add_argument(name, default="", help=argparse.SUPPRESS)
    parser.add_argument("--slow", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.worker is not None:
        work(given.worker, given.store, given.policy, given.slow, Path(given.path))
        return
    for _ in range(given.runs):
        quiet = run("barrier", given.seconds, slow=False, kill_every_s=None)
        able = quiet["steps_a_second"] * (WORKERS - 0.5) / WORKERS  # one has half the speed
        found: dict[str, Any] = {"workers": WORKERS, "cores": os.cpu_count(), "seconds": given.seconds}
        found |= {"kill_every_s": given.kill_every_s, "undisturbed": quiet}
        print("undisturbed", quiet, flush=True)
        for policy in given.policies:
            disturbed = run(policy, given.seconds, slow=True, kill_every_s=given.kill_every_s)
            found[policy] = {**disturbed, "goodput": round(disturbed["steps_a_second"] / able, 3)}
            print(policy, found[policy], flush=True)
        earlier = json.loads(given.out.read_text()) if given.out.exists() else []
        given.out.write_text(json.dumps([*earlier, found], indent=1) + "\n")


if __name__ == "__main__":
    main()

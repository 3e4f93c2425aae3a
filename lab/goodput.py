"""How much of the work of four workers counts, while one is at half speed and one is killed every minute.

A step is a sleep; work counts when a round with it has landed, so what a killed worker had done since its last round is
lost, and so is the time in which anybody waits. Goodput is the work that counts in a second, over what the same workers
do undisturbed, the slow one counted as half of one.

    python -m lab.goodput --seconds 120
"""

from __future__ import annotations

import argparse
import json
import os
import signal
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
POLICIES: dict[str, dict[str, Any]] = {
    "barrier": {},
    "commit_at=0.75": {"commit_at": 0.75},
    "commit_at=1": {"commit_at": 1, "quorum": 0.0},
}


def work(worker: int, address: str, policy: str, slow: bool, path: Path) -> None:
    """Train until killed; write down, at every round, when it landed and how many own steps it has counted."""
    torch.manual_seed(worker)
    torch.set_num_threads(1)
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    done = 0
    with path.open("a") as file:

        def tell(report: RoundReport) -> None:
            nonlocal done
            if report.kind == "round":
                print(json.dumps([time.time(), done, len(report.participants)]), file=file, flush=True)
                done = 0

        strategy = cadenza.diloco(period=PERIOD, faults=cadenza.shrink(**POLICIES[policy]))
        membership = cadenza.join(address, worker=worker, workers=WORKERS)
        sync = cadenza.attach(model, optimizer, strategy, membership=membership, observers=[tell])
        while True:
            time.sleep(STEP_S * (2 if slow else 1))
            model(torch.randn(8, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            done += 1
            sync.step()


def run(policy: str, seconds: float, *, slow: bool, kill_every_s: float | None) -> dict[str, float]:
    """Return what counted."""
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
        lines = [json.loads(line) for path in paths for line in path.read_text().splitlines() if line.endswith("]")]
    counted = sum(done for at, done, _ in lines if began < at < began + seconds)
    rounds = sum(1 for at, *_ in lines if began < at < began + seconds)
    return {"steps_a_second": counted / seconds, "rounds": rounds / WORKERS, "kills": kills}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--policies", nargs="+", default=list(POLICIES))
    parser.add_argument("--worker", type=int)
    for name in ("--store", "--policy", "--path"):
        parser.add_argument(name, default="", help=argparse.SUPPRESS)
    parser.add_argument("--slow", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.worker is not None:
        work(given.worker, given.store, given.policy, given.slow, Path(given.path))
        return
    best = run("barrier", min(30.0, given.seconds), slow=False, kill_every_s=None)["steps_a_second"]
    found: dict[str, Any] = {"undisturbed_steps_a_second": round(best, 2), "workers": WORKERS, "cores": os.cpu_count()}
    for policy in given.policies:
        disturbed = run(policy, given.seconds, slow=True, kill_every_s=60.0)
        able = best * (WORKERS - 0.5) / WORKERS  # one has half the speed
        found[policy] = {**disturbed, "goodput": round(disturbed["steps_a_second"] / able, 3)}
        print(policy, found[policy], flush=True)
    earlier = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    RESULTS.write_text(json.dumps([*earlier, found], indent=1))


if __name__ == "__main__":
    main()

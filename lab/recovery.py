"""The same faults under Cadenza, torchft and torchrun's restart: what they cost the workers that they do not befall.

    python lab/recovery.py --out lab/results/recovery.json

    python lab/recovery.py --systems cadenza torchft --workers 3 --runs 5 --out lab/results/beside_torchft.json

Some workers train a little network, averaging every ten steps. When they are at step 105 one thing happens: a worker is
killed between rounds, when its transfer begins, or when the values are there and it is asked whether they count; killed
and started again; stopped for some seconds; gets NaN into its parameters; whatever all depend on is killed (Cadenza's
store, torchft's lighthouse, torchrun itself); or everything is killed, and started again from the last checkpoint,
which is written at every averaging. Cadenza and torchft have the same patience: 1 s without a heart-beat, 3 s for who
is late. torchrun restarts all workers, from the checkpoint.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

STEPS, STEP_S, AT = 400, 0.05, 105
VICTIM = 2
MOMENTS = {"kill in a round": "transfer", "kill in the vote": "vote"}
FAULTS = ("nothing", "kill", *MOMENTS, "kill and return", "stop", "nan", "store", "everything")
SYSTEMS = ("cadenza", "torchft", "torchrun")
STOP_S, RETURN_S, AWAY_S = 5.0, 2.0, 3.0
PATIENCE_S = 90.0


class Job:
    """Workers under one system, and what they depend on."""

    def __init__(self, system: str, fault: str, logs: Path, stack: ExitStack, given: argparse.Namespace) -> None:
        self.system, self.logs, self._stack = system, logs, stack
        self.workers = given.workers
        self._options = [f"--quorum-retries={given.quorum_retries}", *(["--save"] if fault == "everything" else [])]
        self._options += [f"--moment={MOMENTS[fault]}"] if fault in MOMENTS else []
        self._port = _free_port()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        self._environment |= {"CADENZA_STORE": f"127.0.0.1:{self._port}", "WORLD_SIZE": str(self.workers)}
        self._environment |= {"LIGHTHOUSE": f"http://127.0.0.1:{self._port}", "MASTER_ADDR": "127.0.0.1"}
        # Without it workers that start again find stale addresses in torchrun's store, and hang.
        self._environment |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        self.python = sys.executable
        if system == "torchft":
            from lab.race.environments import python

            self.python = python("torchft")
        stack.callback(self.end_orphans)
        self.start()

    def start(self) -> None:
        self.start_store()
        for worker in range(self.workers if self.system != "torchrun" else 0):
            self.start_worker(worker)

    def start_store(self) -> None:
        """Start what all workers depend on."""
        script = [str(Path(__file__).with_name("recovery_worker.py")), *self._arguments()]
        command = {
            "cadenza": [self.python, "-m", "cadenza.membership", "--host", "127.0.0.1", "--port", str(self._port)],
            "torchft": [
                str(Path(self.python).with_name("torchft_lighthouse")),
                f"--bind=127.0.0.1:{self._port}",
                "--min_replicas=2",
                "--join_timeout_ms=3000",
                "--heartbeat_timeout_ms=1000",
            ],
            "torchrun": [
                *(self.python, "-m", "torch.distributed.run", f"--nproc-per-node={self.workers}", "--max-restarts=5"),
                *("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{self._port}", *script),
            ],
        }[self.system]
        self.store = self._start(command, "store")
        deadline = time.monotonic() + 30
        while self.system != "torchrun" and time.monotonic() < deadline:
            with suppress(OSError), socket.create_connection(("127.0.0.1", self._port), 1):
                return
            time.sleep(0.05)

    def start_worker(self, worker: int) -> None:
        script = [str(Path(__file__).with_name("recovery_worker.py")), *self._arguments(), f"--worker={worker}"]
        self._start([self.python, *script], f"worker-{worker}", RANK=str(worker))

    def _arguments(self) -> list[str]:
        return [self.system, f"--steps={STEPS}", f"--step-s={STEP_S}", f"--into={self.logs}", *self._options]

    def _start(self, command: Sequence[str], name: str, **environment: str) -> subprocess.Popen[bytes]:
        with (self.logs / f"{name}.err").open("a") as file:
            process = subprocess.Popen(
                command, env={**self._environment, **environment}, stdout=file, stderr=file, start_new_session=True
            )
        self._processes.append(process)
        self._stack.callback(process.wait)
        self._stack.callback(_end, process)
        return process

    def said(self, worker: int) -> list[dict[str, Any]]:
        path = self.logs / f"{worker}.jsonl"
        return [json.loads(x) for x in path.read_text().splitlines() if x.endswith("}")] if path.exists() else []

    def is_over(self) -> bool:
        """Whether no worker is left, and nobody who would start one."""
        told = [line["process"] for worker in range(self.workers) for line in self.said(worker) if "process" in line]
        launchers = (
            self._processes if self.system == "torchrun" else [p for p in self._processes if p is not self.store]
        )
        ended = all(process.poll() is not None for process in launchers)
        return ended and not any(Path(f"/proc/{number}/fd/0").exists() for number in told)

    def step(self, worker: int) -> int:
        return next((line["step"] for line in reversed(self.said(worker)) if "step" in line), 0)

    def signal(self, worker: int, number: int) -> None:
        """Send a signal to the process that is a worker now."""
        os.kill(next(line["process"] for line in reversed(self.said(worker)) if "process" in line), number)

    def end_orphans(self) -> None:
        """End workers whose launcher is gone."""
        for worker in range(self.workers):
            for line in self.said(worker):
                with suppress(OSError):
                    if str(self.logs) in Path(f"/proc/{line.get('process')}/cmdline").read_text():
                        os.kill(line["process"], signal.SIGKILL)

    def strike(self, fault: str) -> None:
        if fault in ("kill", "kill and return"):
            self.signal(VICTIM, signal.SIGKILL)
            if fault == "kill and return" and self.system != "torchrun":  # which starts it again by itself
                time.sleep(RETURN_S)
                self.start_worker(VICTIM)
        elif fault == "stop":
            self.signal(VICTIM, signal.SIGSTOP)
            time.sleep(STOP_S)
            self.signal(VICTIM, signal.SIGCONT)
        elif fault in MOMENTS:
            self.signal(VICTIM, signal.SIGUSR2)
        elif fault == "nan":
            self.signal(VICTIM, signal.SIGUSR1)
        elif fault == "everything":
            for process in self._processes:
                _end(process)
            self.end_orphans()
            time.sleep(AWAY_S)
            self.start()
        elif fault == "store":
            self.store.kill()
            self.store.wait()
            time.sleep(AWAY_S)
            if self.system != "torchrun":
                self.start_store()


def run(system: str, fault: str, given: argparse.Namespace) -> dict[str, Any]:
    """Let a fault happen to a job; return what it has cost the other workers."""
    with tempfile.TemporaryDirectory(prefix="recovery-") as folder, ExitStack() as stack:
        logs = Path(folder)
        job = Job(system, fault, logs, stack, given)
        everyone = range(given.workers)
        deadline = time.monotonic() + PATIENCE_S
        while min(job.step(worker) for worker in everyone) < AT and time.monotonic() < deadline:
            time.sleep(0.02)
        struck_at = time.time()
        job.strike(fault)
        lost = {VICTIM} if fault in ("kill", *MOMENTS) and system != "torchrun" else set()
        expected = [worker for worker in everyone if worker not in lost]
        while time.monotonic() < deadline and not all(_ended(job.said(worker)) for worker in expected):
            if job.is_over():
                break
            time.sleep(0.1)
        said = {worker: job.said(worker) for worker in everyone}
        for name in ("worker-0", "store"):
            if (logs / f"{name}.err").exists():
                shutil.copy(logs / f"{name}.err", Path(tempfile.gettempdir()) / f"recovery-{system}-{name}.err")
    return judged(said, struck_at, expected, fault)


def judged(said: dict[int, list[dict[str, Any]]], struck_at: float, expected: list[int], fault: str) -> dict[str, Any]:
    """Return what a fault has cost those whom it did not befall."""
    survivors = [worker for worker in said if worker != VICTIM or fault in ("nothing", "store", "everything")]
    pauses = [pause for worker in survivors for at, pause in _pauses(said[worker])]
    after = [pause for worker in survivors for at, pause in _pauses(said[worker]) if at >= struck_at]
    ends = [said[worker][-1] for worker in expected if _ended(said[worker])]
    taken = [sum("step" in line for line in said[worker]) for worker in survivors if _ended(said[worker])]
    started = [line["at"] for line in said[VICTIM] if "process" in line][-1:]
    back = [line["at"] for line in said[VICTIM] if "step" in line and started and line["at"] > started[0]]
    return {
        "usual_pause_s": round(median(pauses or [0.0]), 3),
        "stood_still_s": round(max(after, default=0.0), 2),
        "lost_steps": max((count - STEPS for count in taken), default=None),
        "survived": len(ends) == len(expected),
        "ended": len(ends),
        "finite": bool(ends) and all(end["finite"] for end in ends),
        "equal": len({end["digest"] for end in ends}) == 1,
        "unlike_rounds": _unlike(said, survivors),
        "back_s": round(back[0] - started[0], 2) if back and fault == "kill and return" else None,
    }


def _unlike(said: dict[int, list[dict[str, Any]]], survivors: list[int]) -> list[int]:
    """Return the steps after whose round two survivors held other bits."""
    found: dict[int, set[str]] = {}
    for worker in survivors:
        last = {line["step"]: line["digest"] for line in said[worker] if "step" in line and "digest" in line}
        for step, digest in last.items():
            found.setdefault(step, set()).add(digest)
    return sorted(step for step, digests in found.items() if len(digests) > 1)


def _pauses(lines: list[dict[str, Any]]) -> list[tuple[float, float]]:
    """Return when each pause between two steps ended, and how long it was."""
    times = [line["at"] for line in lines if "step" in line]
    return [(now, now - before) for before, now in pairwise(times)]


def _ended(lines: list[dict[str, Any]]) -> bool:
    return bool(lines) and "end" in lines[-1]


def _end(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--systems", nargs="+", default=SYSTEMS, choices=SYSTEMS)
    parser.add_argument("--faults", nargs="+", default=FAULTS, choices=FAULTS)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--quorum-retries", type=int, default=0, help="torchft's; noted in the name")
    parser.add_argument("--out", type=Path, default=Path("lab/results/recovery.json"))
    given = parser.parse_args()
    told: dict[str, Any] = json.loads(given.out.read_text()) if given.out.exists() else {}
    for _ in range(given.runs):
        for fault in given.faults:
            for system in given.systems:  # by turns: the machine is not equally quiet all the time
                found = run(system, fault, given)
                name = f"{system}, quorum_retries={given.quorum_retries}" if given.quorum_retries else system
                told.setdefault(name, {}).setdefault(fault, []).append(found)
                print(system, fault, json.dumps(found), flush=True)
                given.out.parent.mkdir(parents=True, exist_ok=True)
                given.out.write_text(json.dumps(told, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

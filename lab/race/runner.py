"""Runs jobs on an emulated network, and keeps what they gave in a file."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lab.race import environments
from lab.race.jobs import Job
from lab.race.rivals import METHODS

from cadenza.emulation import Network

__all__ = ["Link", "Results", "bits_a_second", "machine", "run"]

TIMEOUT_S = 3600
UNITS = {"gbit": 1e9, "mbit": 1e6, "kbit": 1e3}


class Link(str):
    """Where a job runs: "100mbit", "unlimited" or, for two sites, "sites 1gbit 20mbit"; "x8": on 8 hosts."""

    @property
    def hosts(self) -> int:
        return next((int(word[1:]) for word in self.split() if word.startswith("x")), 4)

    def network(self) -> Network:
        words = [word for word in self.split() if not word.startswith("x")]
        if words[0] == "sites":
            return Network([self.hosts // 2, self.hosts // 2], rate=words[1], between=words[2])
        return Network(self.hosts, rate=None if words[0] == "unlimited" else words[0])


def bits_a_second(link: str) -> float | None:
    """Return the rate of the slowest part of a link; None if it has no limit."""
    rates = [
        float(word.removesuffix(unit)) * factor
        for word in link.split()
        for unit, factor in UNITS.items()
        if word.endswith(unit)
    ]
    return min(rates, default=None)


def run(job: Job, link: str) -> dict[str, Any]:
    """Run a job on every host, and return what is to be known of it."""
    interpreter = environments.python(METHODS[job.method].environment)
    path = os.pathsep.join(map(str, (environments.ROOT, environments.ROOT / "src")))  # this tree's, in any environment
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "TORCH_CPP_LOG_LEVEL": "ERROR"}
    with Link(link).network() as network:
        outputs = network.run(
            [interpreter, "-m", "lab.race.worker", job.to_json()], env=environment, timeout_s=TIMEOUT_S
        )
    ranks = [json.loads(output.split("RESULT ", 1)[1].splitlines()[0]) for output in outputs]
    return {
        "elapsed_s": statistics.fmean(rank["elapsed_s"] for rank in ranks),
        "floor_s": statistics.fmean(rank["floor_s"] for rank in ranks),
        "step_s": [
            round(statistics.fmean(steps), 5) for steps in zip(*(rank["seconds"] for rank in ranks), strict=True)
        ],
        "cpu_s": statistics.fmean(rank["cpu_s"] for rank in ranks),
        "bytes_sent": statistics.fmean(rank["bytes_sent"] for rank in ranks),
        "bytes_sent_most": max(rank["bytes_sent"] for rank in ranks),
        "peak_bytes": max(rank["peak_bytes"] for rank in ranks),
        "curve": ranks[0]["curve"],
        "parameters": ranks[0]["parameters"],
        "versions": ranks[0]["versions"],
    }


class Results:
    """What has been run, kept in a file: an interrupted race goes on where it was."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.runs: list[dict[str, Any]] = json.loads(path.read_text())["runs"] if path.exists() else []

    def find(self, job: Job, link: str, repeat: int = 0) -> dict[str, Any] | None:
        key = json.loads(job.to_json())
        same = (run for run in self.runs if run["job"] == key and run["link"] == link and run["repeat"] == repeat)
        return next(same, None)

    def get(
        self, job: Job, link: str, repeat: int = 0, run: Callable[[Job, str], dict[str, Any]] = run
    ) -> dict[str, Any]:
        """Return the figures of a job; it runs only if they are not there yet."""
        if (known := self.find(job, link, repeat)) is not None:
            return known
        began = time.monotonic()
        try:
            figures = run(job, link)
        except Exception as error:  # a rival that fails is a result too
            figures = {"failed": str(error)[-2000:]}
        entry = {"job": json.loads(job.to_json()), "link": link, "repeat": repeat, **figures}
        self.runs.append(entry)
        self.save()
        told = figures.get("failed", "").splitlines()[-1:] or [f"{figures.get('elapsed_s', 0):8.2f} s"]
        setting = " ".join(f"{key}={value}" for key, value in job.settings.items())
        print(
            f"{link:20} {job.method:32} H={job.period:<3} {setting:24} {told[0]}  ({time.monotonic() - began:.0f} s)",
            flush=True,
        )
        return entry

    def save(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lines = ",\n".join(json.dumps(run) for run in self.runs)
        self.path.write_text(f'{{"environment": {json.dumps(machine())}, "runs": [\n{lines}\n]}}\n')


def machine() -> str:
    model = next((x.split(":")[1] for x in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in x), "?")
    return (
        f"{os.cpu_count()} cores of {model.strip()}, {platform.system()}, Python {sys.version.split()[0]}, "
        f"torch {torch.__version__}, Gloo"
    )

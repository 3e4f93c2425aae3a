"""How long the command takes to answer, beside an interpreter that does nothing and one that imports torch.

    python lab/bench_startup.py

Contestants take turns; medians, and ratios to ``python -c pass``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time

CADENZA = ["-m", "cadenza.cli"]
CONTESTANTS = {
    "python -c pass": ["-c", "pass"],
    "python -c 'import torch'": ["-c", "import torch"],
    "cadenza --version": [*CADENZA, "--version"],
    "cadenza --help": [*CADENZA, "--help"],
    "cadenza train --help": [*CADENZA, "train", "--help"],
    "a key that is not known": [*CADENZA, "train", "--set", "lunch.workers=2"],
    "a value out of range": [*CADENZA, "train", "--set", "strategy.outer_lr=-1"],
    "a misspelt module": [*CADENZA, "train", "cadenza.training.standard_library_gtp:build"],
    "a misspelt function": [*CADENZA, "train", "cadenza.training.standard_library_gpt:biuld"],
}


def seconds(arguments: list[str], folder: str) -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, *arguments], cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    given = parser.parse_args()
    taken: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    with tempfile.TemporaryDirectory() as folder:
        for repeat in range(given.repeats + 1):
            for name, arguments in CONTESTANTS.items():
                found = seconds(arguments, folder)
                if repeat:  # the first one reads files from the disk
                    taken[name].append(found)
    medians = {name: statistics.median(times) for name, times in taken.items()}
    nothing = medians["python -c pass"]
    rows = {name: {"seconds": round(m, 4), "ratio": round(m / nothing, 1)} for name, m in medians.items()}
    if given.json:
        print(json.dumps(rows, indent=1))
        return
    for name, row in rows.items():
        print(f"{name:28} {row['seconds']:7.3f} s {row['ratio']:7.1f} ×")


if __name__ == "__main__":
    main()

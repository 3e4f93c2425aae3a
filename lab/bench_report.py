"""Open the report of a long run in Chromium: how large the page is, and how long until all its charts are drawn.

    python lab/bench_report.py                       # 10,000 rounds of 4 workers, 40,000 steps; about a minute
    python lab/bench_report.py --rounds 1000 --repeats 3

The run is made up (no training), the page is the one that `cadenza report` writes. Every opening is in a browser of its
own, started anew, so nothing is cached. Times are the browser's own, from the beginning of the navigation.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from cadenza.cli.report import write_report
from support.browser import opened_browser, wait_until_drawn
from support.runs import MadeUpRun

PAINTED = "return performance.getEntriesByName('first-contentful-paint')[0]?.startTime"


def open_once(page: Path) -> tuple[float, float]:
    """Return the seconds until something was painted and until all charts were drawn."""
    with opened_browser() as browser:
        browser.get(page.as_uri())
        ready = wait_until_drawn(browser)
        return browser.execute_script(PAINTED) / 1e3, ready / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10_000)
    parser.add_argument("--period", type=int, default=4, help="steps between two rounds")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        steps = arguments.rounds * arguments.period
        run = MadeUpRun(steps=steps, period=arguments.period, workers=arguments.workers, checkpoint_every=1000)
        made = run.write(Path(folder) / "long")
        began = time.perf_counter()
        page = write_report([made], Path(folder) / "report.html")
        written = time.perf_counter() - began
        print(f"{arguments.rounds:,} rounds of {arguments.workers} workers, {steps:,} steps; {os.cpu_count()} cores")
        print(f"page: {page.stat().st_size / 1e6:.2f} MB, written in {written:.1f} s")
        times = [open_once(page) for _ in range(arguments.repeats)]
        for name, figures in zip(("first paint", "all charts drawn"), zip(*times, strict=True), strict=True):
            middle = statistics.median(figures)
            print(f"{name}: median {middle:.2f} s, {min(figures):.2f} to {max(figures):.2f} s, {len(times)} openings")


if __name__ == "__main__":
    main()

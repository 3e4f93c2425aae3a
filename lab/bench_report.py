"""Open the report of a long run in Chromium: how large the page is, and how long until all its charts are drawn.

    python lab/bench_report.py                       # 10,000 rounds of 4 workers, 40,000 steps; about a minute
    python lab/bench_report.py --rounds 1000 --repeats 3

The run is made up (no training), the page is the one that `cadenza report` writes. Every opening is in a browser of its
own, started anew, so nothing is cached. Times are the browser's own, from the beginning of the navigation. They are
asked for after the page has come to rest: with developer tools listening all along, V8 reads all of plotly's script
once more for the lines of its stack traces, which takes half a second and which no reader of a report has to wait for.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from urllib.parse import quote
from urllib.request import Request, urlopen

from selenium import webdriver
from selenium.webdriver.chrome.service import Service

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from cadenza.cli.report.page import write_report
from support.browser import OPTIONS, wait_until_drawn, why_no_browser
from support.runs import MadeUpRun

PAINTED = "return performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
START_S, REST_S = 3, 6  # until the browser has started, and until the page has surely come to rest


def open_once(page: Path) -> tuple[float, float]:
    """Return the seconds until something was painted and until all charts were drawn."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        ports = ["--remote-debugging-port=0", f"--user-data-dir={profile}"]
        browser = subprocess.Popen(["chromium", *OPTIONS, *ports, "about:blank"], stderr=subprocess.DEVNULL)
        try:
            time.sleep(START_S)
            address = f"127.0.0.1:{(Path(profile) / 'DevToolsActivePort').read_text().split()[0]}"
            urlopen(Request(f"http://{address}/json/new?{quote(page.as_uri())}", method="PUT")).close()
            time.sleep(REST_S)
            return times_of_page(address)
        finally:
            browser.terminate()
            browser.wait()


def times_of_page(address: str) -> tuple[float, float]:
    options = webdriver.ChromeOptions()
    options.debugger_address = address
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        for handle in driver.window_handles:
            driver.switch_to.window(handle)
            if driver.current_url.startswith("file:"):
                break
        ready = wait_until_drawn(driver)
        return driver.execute_script(PAINTED) / 1e3, ready / 1e3
    finally:
        driver.quit()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10_000)
    parser.add_argument("--period", type=int, default=4, help="steps between two rounds")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    if reason := why_no_browser():
        raise SystemExit(f"There is no Chromium: {reason}.")
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

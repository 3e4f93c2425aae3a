"""Measure what the live display costs: the processor time of the front and of the agent, beside that of the workers.

    python lab/bench_display.py                      # the default run, some three minutes on two cores
    python lab/bench_display.py -- --steps 100

The real command runs on a terminal of its own (a pseudo-terminal of 100 × 30), and the kernel counts. Time before the
first and after the last step, such as imports and the report, is left out.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import pty
import struct
import sys
import tempfile
import termios
import threading
import time
from pathlib import Path

import psutil


def used(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def drain(terminal: int) -> None:
    """Read what is written to the terminal, as a terminal does."""
    try:
        while os.read(terminal, 65536):
            pass
    except OSError:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arguments", nargs="*", help="after --, more arguments for cadenza train")
    parser.add_argument("--run", type=Path, help="the run's folder, to keep it")
    given = parser.parse_args()
    folder = given.run or Path(tempfile.mkdtemp()) / "run"
    command = [sys.executable, "-m", "cadenza.cli", "train", "--run", str(folder), *given.arguments]
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ["TERM"] = "xterm-256color"
        os.execv(command[0], command)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
    threading.Thread(target=drain, args=(terminal,), daemon=True).start()
    front = psutil.Process(pid)
    while not list((folder / "metrics").glob("*.jsonl")):
        time.sleep(0.05)
    agent = next(child for child in front.children() if "cadenza.cli.agent" in child.cmdline())
    workers = agent.children()
    began, before = time.monotonic(), [used(process) for process in (front, agent, *workers)]
    seconds, after = 0.0, before
    while all(worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE for worker in workers):
        seconds, after = time.monotonic() - began, [used(process) for process in (front, agent, *workers)]
        time.sleep(0.2)
    os.waitpid(pid, 0)
    shown, watched, *trained = [end - start for start, end in zip(before, after, strict=True)]
    print(f"{seconds:.1f} s of training on {os.cpu_count()} processors; processor time of {len(trained)} workers "
          f"{sum(trained):.1f} s, of the front {shown:.3f} s, of the agent {watched:.3f} s")  # fmt: skip
    print(f"front: {shown / seconds:.2%} of one processor, {shown / sum(trained):.2%} of what the workers used")
    print(f"agent: {watched / seconds:.2%} of one processor, {watched / sum(trained):.2%} of what the workers used")


if __name__ == "__main__":
    main()

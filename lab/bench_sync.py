"""What one synchronisation costs: time, bytes and memory, by codec and by link.

    python lab/bench_sync.py                              # everything of the table, about 15 minutes
    python lab/bench_sync.py --links 100mbit --codecs fp32 int8

Four hosts, each a network namespace behind a shaped link (cadenza.emulation, which needs root), or four ranks of this
machine over Gloo's loopback ("loopback") or over shared memory ("memory"). Every contender is a DiLoCo synchronisation
of the same model in another codec; they take turns, so that noise hits all alike, and medians are compared. The
processor's time is one rank's; other programs on the machine disturb it less. Beside the contenders runs one bare Gloo
all-reduce of as many fp32 values ("all-reduce"). Bytes are counted at the hosts' interfaces.

With a delay, training goes on while the values are under way: steps are emulated by sleeping, long enough in all for
the slowest transfer, and what counts is how long the calls of `step()` take, against the time on the wire.

Memory is measured in fresh processes: "kept" is what attaching leaves resident (anchor, momentum, residuals), "peak"
how far the resident set rises above that during a synchronisation.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import cadenza
from cadenza import codecs
from cadenza.emulation import INTERFACE, Network

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "sync.json"
HOSTS = 4
MB = 1e6

CODECS: dict[str, Callable[[], codecs.Codec]] = {
    "fp32": codecs.fp32,
    "bf16": codecs.bf16,
    "int8": codecs.int8,
    "e3m0": codecs.e3m0,
    "topk": codecs.topk,
    "int8+feedback": lambda: codecs.error_feedback(codecs.int8()),
    "e3m0+feedback": lambda: codecs.error_feedback(codecs.e3m0()),
    "topk+feedback": lambda: codecs.error_feedback(codecs.topk()),
}
MEMORY: dict[str, Callable[[], cadenza.Strategy]] = {
    "local_sgd": lambda: cadenza.local_sgd(1),
    **{f"diloco {name}": lambda codec=codec: cadenza.diloco(1, codec=codec()) for name, codec in CODECS.items()},
    "diloco fp32, delay": lambda: cadenza.diloco(2, delay=1),
    "diloco int8, delay": lambda: cadenza.diloco(2, delay=1, codec=codecs.int8()),
    "diloco int8, by bytes": lambda: cadenza.diloco(16, codec=codecs.int8(), fragments=cadenza.by_bytes(10_000_000)),
}


# ---- on a rank ------------------------------------------------------------------------------------------------------


class Contender:
    """A model of its own and the strategy on it; its values change before every synchronisation."""

    def __init__(self, strategy: cadenza.Strategy, millions: float) -> None:
        torch.manual_seed(0)
        width = 1000
        layers = [torch.nn.Linear(width, width) for _ in range(round(millions * 1e6 / width**2))]
        self.model = torch.nn.Sequential(*layers)
        self.reports: list[cadenza.RoundReport] = []
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.sync = cadenza.attach(self.model, optimizer, strategy, observers=[self.reports.append])
        self._noise = torch.randn(width, width, generator=torch.Generator().manual_seed(dist.get_rank())) * 1e-3

    @torch.no_grad()
    def move(self) -> None:
        for parameter in self.model.parameters():
            parameter.add_(self._noise if parameter.ndim == 2 else self._noise[0])


def interface_bytes() -> int:
    counter = Path(f"/sys/class/net/{INTERFACE}/statistics/tx_bytes")
    return int(counter.read_text()) if os.environ.get("GLOO_SOCKET_IFNAME") == INTERFACE else 0


def measure_syncs(case: dict[str, Any]) -> dict[str, Any]:
    """Let the contenders take turns; return the seconds and bytes of each."""
    contenders = {name: Contender(cadenza.diloco(1, codec=CODECS[name]()), case["millions"]) for name in case["codecs"]}
    numel = sum(p.numel() for contender in contenders.values() for p in contender.model.parameters())
    flat = torch.zeros(numel // len(contenders))
    seconds: dict[str, list[float]] = {name: [] for name in ("all-reduce", *contenders)}
    cpu: dict[str, list[float]] = {name: [] for name in seconds}
    sent: dict[str, list[int]] = {name: [] for name in seconds}
    for repeat in range(case["repeats"] + 1):
        for name in seconds:
            if name in contenders:
                contenders[name].move()
            dist.barrier()
            before, worked, start = interface_bytes(), time.process_time(), time.perf_counter()
            if name in contenders:
                contenders[name].sync.step()
            else:
                dist.all_reduce(flat)
            worked = time.process_time() - worked
            dist.barrier()
            if repeat:  # the first one warms up
                cpu[name].append(worked)
                seconds[name].append(time.perf_counter() - start)
                sent[name].append(interface_bytes() - before)
    reports = {name: contender.reports[-1] for name, contender in contenders.items()}
    return {
        "seconds": seconds,
        "cpu_s": cpu,
        "interface_bytes": sent,
        "reported_bytes": {name: report.bytes_sent for name, report in reports.items()},
        "codec_error": {name: report.codec_error for name, report in reports.items()},
    }


def measure_delay(case: dict[str, Any]) -> dict[str, Any]:
    """Train by sleeping, with a round in flight most of the time; return what the calls of `step` took."""
    period, delay = 8, 7
    result = {}
    for name in case["codecs"]:
        strategy = cadenza.diloco(period, delay=delay, codec=CODECS[name]())
        contender = Contender(strategy, case["millions"])
        stalls, works = [], []
        for _ in range(case["repeats"] + 1):
            stall = work = 0.0
            for _ in range(period):
                contender.move()
                time.sleep(case["transfer_s"] / delay)
                worked, start = time.thread_time(), time.perf_counter()
                contender.sync.step()
                stall += time.perf_counter() - start
                work += time.thread_time() - worked
            stalls.append(stall)
            works.append(work)
        contender.sync.finish()
        wires = [report.wire_s for report in contender.reports if report.delay]
        reported = [report.stall_s for report in contender.reports if report.delay]
        # A period's calls land the round before and launch the next; the first period only launches.
        result[name] = {
            "stall_s": stalls[1:],
            "stall_cpu_s": works[1:],
            "wire_s": wires[1:],
            "reported_stall_s": reported[1:],
        }
    return result


def measure_memory(case: dict[str, Any]) -> dict[str, Any]:
    torch.zeros(1).add_(1)
    contender = Contender(MEMORY["local_sgd"](), 1)  # lanes, threads and libraries are there from here on
    contender.sync.step()
    del contender
    start = resident()
    contender = Contender(MEMORY[case["strategy"]](), case["millions"])
    sizes = [p.numel() * p.element_size() for p in contender.model.parameters()]
    kept = resident() - start - sum(sizes)
    period = contender.sync.strategy.period
    for _ in range(period):  # the first round
        contender.move()
        contender.sync.step()
    Path("/proc/self/clear_refs").write_text("5")
    before = resident()
    for _ in range(2 * period):
        contender.move()
        contender.sync.step()
    names = [name for name, _ in contender.model.named_parameters()]
    split = contender.sync.strategy.fragments.split(list(zip(names, sizes, strict=True)))
    size_of = dict(zip(names, sizes, strict=True))
    fragment = max(sum(size_of[name] for name in fragment) for fragment in split)
    return {"model": sum(sizes), "fragment": fragment, "kept": kept, "peak": high_water() - before}


def resident() -> int:
    return status("VmRSS")


def high_water() -> int:
    return status("VmHWM")


def status(what: str) -> int:
    text = Path("/proc/self/status").read_text()
    return int(text.split(f"{what}:")[1].split()[0]) * 1024


MEASURES = {"syncs": measure_syncs, "delay": measure_delay, "memory": measure_memory}


def run_on_this_rank(case: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    result = MEASURES[case["measure"]](case)
    if dist.get_rank() == 0:
        print(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


# ---- all cases ------------------------------------------------------------------------------------------------------


def run(case: dict[str, Any], link: str) -> dict[str, Any]:
    """Run a case on four hosts or, for "loopback" and "memory", on four ranks of this one."""
    job = [str(Path(__file__).resolve()), "--job", json.dumps(case)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if case["measure"] == "memory":  # the allocator gives back what is freed, so that only what is in use is resident
        environment["MALLOC_MMAP_THRESHOLD_"] = str(1 << 20)
    if link in ("loopback", "memory"):
        environment["CADENZA_SHARED_MEMORY"] = "0" if link == "loopback" else "1"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(HOSTS), *job]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"The case {case} failed:\n{done.stderr[-4000:]}")
        output = done.stdout
    else:
        with Network(HOSTS, rate=link) as network:
            output = network.run([sys.executable, *job], env=environment, timeout_s=1200)[0]
    return json.loads(output.splitlines()[-1])


def bits_a_second(link: str) -> float | None:
    if link in ("loopback", "memory"):
        return None
    units = {"gbit": 1e9, "mbit": 1e6, "kbit": 1e3}
    return next(float(link.removesuffix(unit)) * factor for unit, factor in units.items() if link.endswith(unit))


def sync_table(results: dict[str, dict[str, Any]]) -> str:
    head = ["link", "codec", "ms", "÷ fp32", "processor, ms", "the link allows, ms", "MB sent", "of fp32's bytes"]
    head.append("codec error")
    lines = ["| " + " | ".join(head) + " |", "| --- | --- |" + " ---: |" * 7]
    for link, result in results.items():
        medians = {name: statistics.median(values) for name, values in result["seconds"].items()}
        at_interface = {name: statistics.median(values) for name, values in result["interface_bytes"].items()}
        sent = at_interface if at_interface["fp32"] else {"all-reduce": 0, **result["reported_bytes"]}
        for name, seconds in medians.items():
            rate = bits_a_second(link)
            error = result["codec_error"].get(name)
            cells = [
                link,
                name,
                f"{seconds * 1e3:.0f}",
                f"{seconds / medians['fp32']:.2f}",
                f"{statistics.median(result['cpu_s'][name]) * 1e3:.0f}",
                "" if rate is None else f"{sent[name] * 8 / rate * 1e3:.0f}",
                f"{sent[name] / MB:.2f}" if sent[name] else "",
                f"{sent[name] / sent['fp32']:.3f}" if sent[name] else "",
                "" if error is None else f"{100 * error:.2f} %",
            ]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def delay_table(results: dict[str, dict[str, Any]]) -> str:
    lines = [
        "| link | codec | stall a round, ms | of it working, ms | on the wire, ms | stall ÷ wire |",
        "| --- | --- |" + " ---: |" * 4,
    ]
    for link, result in results.items():
        for name, one in result.items():
            stall, wire = statistics.median(one["stall_s"]), statistics.median(one["wire_s"])
            work = statistics.median(one["stall_cpu_s"])
            cells = [f"{value * 1e3:.0f}" for value in (stall, work, wire)]
            lines.append(f"| {link} | {name} | {' | '.join(cells)} | {100 * stall / wire:.1f} % |")
    return "\n".join(lines)


def memory_table(results: dict[str, dict[str, Any]]) -> str:
    lines = [
        "| strategy | largest fragment, MB | kept ÷ model | peak, MB | peak ÷ fragment |",
        "| --- |" + " ---: |" * 4,
    ]
    for name, one in results.items():
        lines.append(
            f"| {name} | {one['fragment'] / MB:.0f} | {one['kept'] / one['model']:.2f} | {one['peak'] / MB:.0f} "
            f"| {one['peak'] / one['fragment']:.2f} |"
        )
    return "\n".join(lines)


def machine() -> str:
    model = next((x.split(":")[1] for x in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in x), "?")
    return f"{os.cpu_count()} cores of {model.strip()}, {platform.system()}, torch {torch.__version__}, Gloo"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--links", nargs="*", default=["memory", "loopback", "1gbit", "200mbit", "100mbit"])
    parser.add_argument("--delay-links", nargs="*", default=["200mbit", "100mbit"])
    parser.add_argument("--codecs", nargs="+", choices=CODECS, default=list(CODECS))
    parser.add_argument("--memory", nargs="*", choices=MEMORY, default=list(MEMORY))
    parser.add_argument("--millions", type=float, default=5, help="parameters; five times as many for the memory")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--job", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.job:
        run_on_this_rank(arguments.job)
        return
    known = json.loads(arguments.results.read_text()) if arguments.results.exists() else {}
    common = {"millions": arguments.millions, "repeats": arguments.repeats}
    print(f"{machine()}; {HOSTS} hosts, {arguments.millions:g} M parameters, medians of {arguments.repeats} repeats\n")

    def keep(kind: str, key: str, value: dict[str, Any]) -> None:
        known.setdefault(kind, {})[key] = value
        known["environment"] = machine()
        arguments.results.parent.mkdir(parents=True, exist_ok=True)
        arguments.results.write_text(json.dumps(known, indent=1) + "\n")

    for link in arguments.links:
        keep("syncs", link, run({"measure": "syncs", "codecs": arguments.codecs, **common}, link))
    if arguments.links:
        print(sync_table({link: known["syncs"][link] for link in arguments.links}), end="\n\n", flush=True)
    for link in arguments.delay_links:
        slowest = 2 * arguments.millions * 32e6 / (bits_a_second(link) or 10e9)
        case = {"measure": "delay", "codecs": ["fp32", "int8", "e3m0"], "transfer_s": 1.2 * slowest, **common}
        keep("delay", link, run(case, link))
    if arguments.delay_links:
        print(delay_table({link: known["delay"][link] for link in arguments.delay_links}), end="\n\n", flush=True)
    for name in arguments.memory:
        case = {"measure": "memory", "strategy": name, "millions": 5 * arguments.millions}
        keep("memory", name, run(case, "loopback"))
    if arguments.memory:
        print(memory_table({name: known["memory"][name] for name in arguments.memory}))


if __name__ == "__main__":
    main()
